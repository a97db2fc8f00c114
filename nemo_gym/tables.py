"""Plain tables on stdout, readable in a terminal, a file and `grep`. Imports rich, so import it only to print."""

import sys

from rich.console import Console
from rich.table import Table

_WIDTH_WITHOUT_TERMINAL = 500


def new_table(*columns: str) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
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


def print_line(text: str) -> None:
    """Print one line of plain text to stdout."""
    sys.stdout.write(f"{text}\n")
