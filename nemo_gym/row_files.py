"""Rows in the files people have them in: JSON lines, plain or compressed, CSV and Parquet.

The ending of the name decides: `.jsonl.gz`, `.jsonl.zst`, `.csv` and `.parquet` are what they say,
everything else is JSON lines. Rows come one at a time, as lines: whoever reads `.jsonl` can read
them all. A line of any other format holds the row's compact JSON. A file that begins like something
else (a spreadsheet, UTF-16, one JSON array) is refused with the way to turn it into rows.

- CSV: the first record names the columns. Cells are text; one that holds a JSON object or a list of
  objects is that. Empty cells of the columns that are never text are left out.
- Parquet: rows are numbered from 1. Inside a struct, which has all its members in every row, a null
  is a member that is not there.

`open_data_set` writes a data set for training: an example per line, or per row of a parquet file; complete, or not at
all. Chat templates look at what a message has: a key that is there and null is not the same to them as one that is
absent. So in parquet messages and tools have Arrow's type for JSON, which `datasets` reads as the objects of the JSONL.
"""

import csv
import gzip
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import orjson

from nemo_gym.errors import ConfigError, listed
from nemo_gym.jsonl import Line, MalformedLineError, iter_lines, json_type, parse, parse_line, to_line
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.paths import install_command, make_folder, write_aside

MESSAGES_KEY_NAME = "messages"
PROMPT_KEY_NAME = "prompt"
TOOLS_KEY_NAME = "tools"
Write: TypeAlias = Callable[[dict[str, Any]], None]
ROW_FILE_ENDINGS = (".jsonl", ".gz", ".zst", ".csv", ".parquet")

_NEVER_TEXT = {
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    AGENT_REF_KEY_NAME,
    TASK_INDEX_KEY_NAME,
    MESSAGES_KEY_NAME,
    TOOLS_KEY_NAME,
}
_LARGEST_CELL = 1 << 30
_BATCH_ROWS = 1024
_WRITTEN_AT_ONCE = 512
_UNREADABLE = (EOFError, OSError, zlib.error, UnicodeDecodeError)
_HEAD_BYTES = 4096
_FORMATS = "rows are read from .jsonl, .jsonl.gz, .jsonl.zst, .csv and .parquet files"
_UTF_16 = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16LE",
    b"[\0": "UTF-16LE",
    b"\0{": "UTF-16BE",
    b"\0[": "UTF-16BE",
}
"""What rows in it begin with, with a byte order mark or without."""
_SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
_BEGINNINGS = {
    b"PK\x03\x04": "a zip archive, as spreadsheets are; unpack it, or save the sheet as CSV (UTF-8)",
    b"\x1f\x8b": "compressed by gzip; let its name end with .jsonl.gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard; let its name end with .jsonl.zst",
    b"PAR1": "a Parquet file; let its name end with .parquet",
}
_TO_LINES = "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]"


class BinaryReader(Protocol):
    """As much of a file as is needed here."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""


class RowFileError(ConfigError, ValueError):
    """A file that is not what its name says."""


class MissingLibraryError(ConfigError, ImportError):
    """A file that needs a library which is not installed."""


def iter_row_lines(path: str | Path) -> Iterator[Line]:
    """The rows of a file of any format, as lines; memory does not grow with the file.

    A line that is not JSON comes as it is: whoever parses it finds out.

    Raises:
        ConfigError: the file is not what its name says, or a library to read it is missing.
    """
    read = _reader_for(Path(path).name)
    if read is None or read is _csv_lines:
        _refuse_other_formats(Path(path))
    return iter_lines(path) if read is None else _explained(read, Path(path))


def is_plain(path: str | Path) -> bool:
    """Whether a file is read as plain JSON lines."""
    return _reader_for(Path(path).name) is None


def stem_of(path: str | Path) -> str:
    """The name of a row file without its ending: `a` for `a.jsonl` and for `a.jsonl.gz`."""
    name = Path(path).name
    for ending in (".jsonl.gz", ".jsonl.zst"):
        if name.endswith(ending) and name != ending:
            return name.removesuffix(ending)
    return Path(path).stem


def read_rows(path: str | Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Every row of a file of any format.

    Raises:
        ConfigError: a row is not JSON, or not an object; or the file cannot be read.
    """
    for line in iter_row_lines(path):
        value = parse_line(line.content, path, line.number)
        if not isinstance(value, dict):
            raise MalformedLineError(f"{path}, line {line.number}: expected a JSON object, found {json_type(value)}")
        yield line, value


def _reader_for(name: str) -> Callable[[Path], Iterator[Line]] | None:
    readers = {".gz": _gzip_lines, ".zst": _zstd_lines, ".csv": _csv_lines, ".parquet": _parquet_lines}
    return readers.get(Path(name).suffix.lower())


def _refuse_other_formats(path: Path) -> None:
    """Look at the beginning of a file that should be text; one that cannot be opened is for the reader to explain."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return
    found = next((what for mark, what in _BEGINNINGS.items() if head.startswith(mark)), None)
    if path.suffix.lower() in _SPREADSHEETS:
        found = "a spreadsheet; save it as CSV (UTF-8), whose first line names the columns"
    if found is not None:
        raise RowFileError(f"{path} is {found} ({_FORMATS})")
    aside, source = shlex.quote(f"{path.stem}_rows{path.suffix}"), shlex.quote(str(path))
    encoding = _UTF_16.get(head[:2])
    if encoding is not None:
        raise RowFileError(
            f"{path} is UTF-16 text, and rows are UTF-8: save it as UTF-8, or convert it with "
            f"`iconv -f {encoding} -t UTF-8 {source} > {aside}`"
        )
    if path.suffix.lower() != ".csv" and _begins_an_array(path, head):
        raise RowFileError(
            f"{path} is one JSON array, and rows are one JSON object per line: turn it into lines with "
            f"`python -c {shlex.quote(_TO_LINES)} < {source} > {aside}`"
        )


def _begins_an_array(path: Path, head: bytes) -> bool:
    """Whether a file is a list of rows instead of lines; a line that is some other list is a mistake of that line."""
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return False
    first = next(iter_lines(path)).content
    try:
        value = parse(first)
    except ValueError:  # goes on in the next line
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _explained(read: Callable[[Path], Iterator[Line]], path: Path) -> Iterator[Line]:
    try:
        yield from read(path)
    except FileNotFoundError:
        raise
    except (*_UNREADABLE, csv.Error) as error:
        raise RowFileError(f"{path} cannot be read as {path.suffix.removeprefix('.')}: {error}") from error


def _gzip_lines(path: Path) -> Iterator[Line]:
    return _compact_lines(gzip.open(path, "rb"))


def _zstd_lines(path: Path) -> Iterator[Line]:
    try:
        import zstandard
    except ImportError as error:
        raise _missing(path, "zstandard", "data") from error
    try:
        yield from _compact_lines(zstandard.open(path, "rb"))
    except zstandard.ZstdError as error:
        raise RowFileError(f"{path} cannot be read as zst: {error}") from error


def _compact_lines(opened: AbstractContextManager[BinaryReader]) -> Iterator[Line]:
    with opened as file:
        for number, raw in enumerate(_split(file), 1):
            content = raw.strip()
            if number == 1:
                content = content.removeprefix(b"\xef\xbb\xbf")
            if content:
                yield Line(number, 0, 0, _compact(content))


def _split(file: BinaryReader) -> Iterator[bytes]:
    """The lines of a file whose reader need not know what a line is."""
    begun: list[bytes] = []
    while chunk := file.read(1 << 20):
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*begun, lines[0]])
            begun.clear()
            yield from lines
        begun.append(rest)
    yield b"".join(begun)


def _compact(content: bytes) -> bytes:
    try:
        return to_line(parse(content)).rstrip(b"\n")
    except ValueError:
        return content


def _csv_lines(path: Path) -> Iterator[Line]:
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CELL))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        columns = _columns(next(reader, []), path)
        last = reader.line_num
        for cells in reader:
            first, last = last + 1, reader.line_num
            if not cells:
                continue
            if len(cells) != len(columns):
                raise RowFileError(
                    f"{path}, line {first}: {len(cells)} cells, but there are {len(columns)} columns "
                    f"({listed(columns)}); put quotes around cells with commas or line breaks"
                )
            row = {name: _cell(name, text) for name, text in zip(columns, cells, strict=True)}
            present = {name: value for name, value in row.items() if not (value == "" and name in _NEVER_TEXT)}
            yield Line(first, 0, 0, to_line(present).rstrip(b"\n"))


def _columns(names: list[str], path: Path) -> list[str]:
    columns = [name.strip() for name in names]
    odd = sorted({name for name in columns if not name or columns.count(name) > 1})
    if not columns or odd:
        found = f"it has {odd}" if odd else "it is empty"
        raise RowFileError(f"{path}: the first line must name every column, each differently; {found}")
    return columns


def _cell(name: str, text: str) -> Any:
    trimmed = text.strip()
    if name == TASK_INDEX_KEY_NAME and trimmed.isdecimal():
        return int(trimmed)
    if not trimmed.startswith(("{", "[")):
        return text
    try:
        value = orjson.loads(trimmed)
    except orjson.JSONDecodeError:
        return text
    holds_objects = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    return value if isinstance(value, dict) or holds_objects else text


def _parquet_lines(path: Path) -> Iterator[Line]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise _missing(path, "pyarrow", "data") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=_BATCH_ROWS))
            yield from _parquet_rows(batches, path)
    except pyarrow.ArrowException as error:
        raise RowFileError(f"{path} cannot be read as parquet: {error}") from error


def _parquet_rows(batches: Iterable[list[dict[str, Any]]], path: Path) -> Iterator[Line]:
    number = 0
    for batch in batches:
        for row in batch:
            number += 1
            present = {name: _without_nulls(value) for name, value in row.items()}
            try:
                content = to_line(present)
            except TypeError as error:
                raise RowFileError(
                    f"{path}, row {number}: {error}; leave out the column or turn it into text"
                ) from error
            yield Line(number, 0, 0, content.rstrip(b"\n"))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(inner) for inner in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _missing(path: Path, library: str, extra: str) -> MissingLibraryError:
    return MissingLibraryError(
        f"reading {path} needs {library}, which is not installed; install it with: {install_command(extra)}"
    )


@contextmanager
def open_data_set(path: Path) -> Iterator[Write]:
    """A function that writes one example; the ending of the name decides the format.

    Raises:
        MissingLibraryError: parquet is asked for and pyarrow is not installed.
    """
    make_folder(path.parent)
    if path.suffix == ".parquet":
        with _open_parquet(path) as write:
            yield write
    else:
        with write_aside(path) as file:

            def write_line(example: dict[str, Any]) -> None:
                file.write(to_line(example))

            yield write_line


@contextmanager
def _open_parquet(path: Path) -> Iterator[Write]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingLibraryError(
            f"writing {path} needs pyarrow, which is not installed; write .jsonl, or install it with: "
            f"{install_command('data')}"
        ) from error
    waiting: list[dict[str, Any]] = []
    writer: Any = None

    def flush(to: Any) -> None:
        nonlocal writer
        if waiting:
            rows = [_in_columns(example) for example in waiting]
            table = _marked_as_json(pyarrow.Table.from_pylist(rows, schema=_columns_of(waiting[0], pyarrow)), pyarrow)
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(to, table.schema)
            writer.write_table(table)
            waiting.clear()

    with write_aside(path) as file:

        def write(example: dict[str, Any]) -> None:
            waiting.append(example)
            if len(waiting) >= _WRITTEN_AT_ONCE:
                flush(file)

        yield write
        flush(file)
        if writer is None:
            pyarrow.parquet.write_table(pyarrow.table({}), file)
        else:
            writer.close()


def _columns_of(example: dict[str, Any], arrow: Any) -> Any:
    """The same columns for every example of a format, whatever the first one happens to have."""
    text, number, count = arrow.string(), arrow.float64(), arrow.int64()
    origin = arrow.struct(
        [
            ("file", text),
            ("line", count),
            (TASK_INDEX_KEY_NAME, count),
            (ROLLOUT_INDEX_KEY_NAME, count),
            ("agent", text),
        ]
    )
    of_pair = arrow.struct([("chosen", origin), ("rejected", origin)])
    known = {
        **dict.fromkeys(("messages", "prompt", "completion", "chosen", "rejected"), arrow.list_(text)),
        "tools": text,
        **dict.fromkeys(("reward", "chosen_reward", "rejected_reward"), number),
        "provenance": of_pair if "chosen" in example else origin,
    }
    columns = [name for name in known if name in example or name == "tools"]
    return arrow.schema([(name, known[name]) for name in columns])


def _marked_as_json(table: Any, arrow: Any) -> Any:
    """The table with its columns of JSON text marked as JSON, alone or in lists."""
    kind = arrow.json_()
    for place, column in enumerate(table.schema):
        values = table[column.name].combine_chunks()
        if column.name == "tools":
            marked = arrow.ExtensionArray.from_storage(kind, values)
        elif arrow.types.is_list(column.type):
            marked = arrow.ListArray.from_arrays(values.offsets, arrow.ExtensionArray.from_storage(kind, values.values))
        else:
            continue
        table = table.set_column(place, column.name, marked)
    return table


def _in_columns(example: dict[str, Any]) -> dict[str, Any]:
    """An example in fixed columns."""
    row = dict(example)
    for name, value in example.items():
        if name == "tools":
            row[name] = orjson.dumps(value).decode()
        elif isinstance(value, list):
            row[name] = [orjson.dumps(message).decode() for message in value]
    return row
