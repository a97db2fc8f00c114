"""Plain tables on stdout, readable in a terminal, a file and `grep`. Imports rich, so import it only to print."""

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym.terminal import harmless

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
    """Print to stdout, as wide as it needs to be when that is no terminal."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    Console(file=sys.stdout, width=width, highlight=False).print(table)
