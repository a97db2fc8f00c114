"""Text for a terminal: what came from elsewhere (agents, models, data, other processes) made fit for it, and tables.

Such text may hold escape sequences that move the cursor, recolour the screen, rename the window or turn the
direction of writing. Every way out of this package to a terminal or a log passes here: such characters are shown as
their escapes, so that one sees what was there and nothing happens.

Tables on stdout are plain, readable in a terminal, a file and `grep`. rich, which sets them, is loaded to print one.
"""

import errno
import os
import re
import select
import shutil
import sys
import textwrap
import traceback
from dataclasses import dataclass, field
from types import TracebackType

MAX_SHOWN_LENGTH = 200
EXIT_READER_GONE = 141
"""What shells show for a program whose reader went away, as in `ng_help | head -1`."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1, but for tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufeff\ud800-\udfff"  # other ends of lines, and what no encoding takes
    "]"
)


def harmless(text: str) -> str:
    """`text` with every character that could act on a terminal as its escape; lines and tabs stay."""
    return _HARMFUL.sub(lambda match: _escape(match[0]), text)


def harmless_json(text: str) -> str:
    """JSON that means the same and holds no such character."""
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shown(text: object, limit: int = MAX_SHOWN_LENGTH) -> str:
    """`text` on one line of printable characters, cut after `limit` of them."""
    line = " ".join(str(text)[: 4 * limit].split())
    if not line.isprintable():
        line = "".join(character if character.isprintable() else _escape(character) for character in line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def without_numbers(text: str) -> str:
    """`text` without what differs between two messages that say the same: words with digits in them."""
    return " ".join("#" if any(map(str.isdigit, word)) else word for word in text.split())


def print_line(text: str = "") -> None:
    """Print text to stdout."""
    sys.stdout.write(f"{harmless(text)}\n")


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:  # a `sys.excepthook`
    """Print the traceback of an exception nobody expected, which may quote what a server sent."""
    sys.stderr.write(harmless("".join(traceback.format_exception(kind, error, trace))))


def exit_code_of_lost_output(error: OSError) -> int | None:
    """How a program ends that could not print its product, which nothing is written to any more; None: that was fine.

    A reader that went away, as in `ng_help | head -1`, has read enough; that there is no room is said.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return None
    if isinstance(error, BrokenPipeError):
        return _given_up(descriptor, EXIT_READER_GONE) if _is_closed_there(descriptor) else None
    if error.errno not in _NO_ROOM or error.filename is not None or not _is_full(descriptor):
        return None
    sys.stderr.write(f"Error: the output cannot be written: {error.strerror}\n")
    return _given_up(descriptor, 1)


def _is_full(descriptor: int) -> bool:
    """Whether nothing more can be written there: else it was another file that had no room."""
    try:
        return os.fstatvfs(descriptor).f_bavail == 0 or os.write(descriptor, b"\n") == 0
    except OSError as error:
        return error.errno in _NO_ROOM


def _is_closed_there(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _given_up(descriptor: int, exit_code: int) -> int:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return exit_code


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


_WIDTH_WITHOUT_TERMINAL = 500
_GAP = 2
_INDENT = " " * 4


@dataclass
class PlainTable:
    """A table of plain text: a cell is neither markup nor able to act on the terminal."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: object) -> None:
        """Add a row of texts."""
        self.rows.append(tuple(harmless("" if cell is None else str(cell)) for cell in cells))


def new_table(*columns: str) -> PlainTable:
    """A table without lines."""
    return PlainTable(columns)


def print_table(table: PlainTable, described_by: str | None = None) -> None:
    """Print to stdout, as wide as it needs to be and without blanks at line ends when that is no terminal.

    A terminal folds the cells of a table that is too wide for it. With `described_by`, the column of a sentence about
    each row, such a table becomes a list instead, so that the names in its first column stay whole.
    """
    columns = shutil.get_terminal_size().columns
    if described_by is not None and sys.stdout.isatty() and _width(table) > columns:
        _print_entries(table, described_by, columns)
    else:
        _print_columns(table.columns, table.rows)


def _print_columns(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich import console, table, text

    on_terminal = sys.stdout.isatty()
    laid_out = table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        laid_out.add_column(column, no_wrap=not on_terminal, overflow="fold")
    for row in rows:
        laid_out.add_row(*map(text.Text, row))
    width = None if on_terminal else _WIDTH_WITHOUT_TERMINAL
    output = console.Console(file=sys.stdout, width=width, highlight=False, markup=False)
    if on_terminal:
        output.print(laid_out)
        return
    with output.capture() as printed:
        output.print(laid_out)
    for line in printed.get().splitlines():
        print_line(line.rstrip())


def _width(table: PlainTable) -> int:
    """How wide the table is if no cell is folded."""
    columns = zip(table.columns, *table.rows, strict=True)
    return sum(max(map(len, cells)) + _GAP for cells in columns) - _GAP


def _print_entries(table: PlainTable, described_by: str, width: int) -> None:
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        name = cells.pop(table.columns[0])
        sentence = cells.pop(described_by)
        facts = "; ".join(f"{column.lower()}: {cell}" for column, cell in cells.items() if cell)
        print_line(name)
        for text in filter(None, (sentence, facts)):
            for line in textwrap.wrap(text, max(1, width - len(_INDENT))):
                print_line(_INDENT + line)
