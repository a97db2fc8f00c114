"""Plain tables on stdout, readable in a terminal, a file and `grep`. Imports rich, so import it only to print."""

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym.terminal import harmless, print_line

_WIDTH_WITHOUT_TERMINAL = 500


class PlainTable(Table):
    """A table of plain text: a cell is neither markup nor able to act on the terminal."""

    def add_row(self, *cells: object, **_options: object) -> None:
        """Add a row of texts."""
        super().add_row(*(Text(harmless("" if cell is None else str(cell))) for cell in cells))


def new_table(*columns: str) -> PlainTable:
    """A table without lines."""
    table = PlainTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=not sys.stdout.isatty(), overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print to stdout, as wide as it needs to be and without blanks at line ends when that is no terminal."""
    if sys.stdout.isatty():
        Console(file=sys.stdout, highlight=False, markup=False).print(table)
        return
    console = Console(file=sys.stdout, width=_WIDTH_WITHOUT_TERMINAL, highlight=False, markup=False)
    with console.capture() as printed:
        console.print(table)
    for line in printed.get().splitlines():
        print_line(line.rstrip())
