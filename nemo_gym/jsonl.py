"""JSON Lines, one JSON value per line: read with true line numbers, written compactly, replaced atomically.

Blank lines are nobody's fault and are skipped; they still count for line numbers. A line that is
not JSON is one error naming the file and the line.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import orjson

from nemo_gym.errors import ConfigError

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EXCERPT_LENGTH = 60


class MalformedLineError(ConfigError, ValueError):
    """A line of a JSONL file that is not what it should be."""


class Line(NamedTuple):
    """One line that is not blank."""

    number: int
    """Counted from 1, blank lines included."""
    start: int
    """Where it begins in the file, in bytes."""
    end: int
    """Where the next line begins."""
    content: bytes
    """Its bytes without surrounding whitespace."""


def iter_lines(path: str | Path) -> Iterator[Line]:
    """The lines of a file, one at a time, in order; memory does not grow with the file."""
    with Path(path).open("rb", buffering=_BUFFER_BYTES) as file:
        end = 0
        for number, raw in enumerate(file, 1):
            start, end = end, end + len(raw)
            content = raw.strip()
            if start == 0:
                content = content.removeprefix(_BYTE_ORDER_MARK)
            if content:
                yield Line(number, start, end, content)


def parse(content: bytes) -> Any:
    """The value of one line; lone surrogates (half an emoji), which models do produce, are kept.

    Raises:
        ValueError: the line is not JSON.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        if b"\\u" not in content:
            raise
    try:
        return json.loads(content, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_line(content: bytes | str, path: str | Path, number: int) -> Any:
    """The value of line `number` of `path`.

    Raises:
        ConfigError: the line is not JSON; the message names the file and the line.
    """
    encoded = content.encode() if isinstance(content, str) else content
    try:
        return parse(encoded.strip())
    except ValueError as error:
        raise MalformedLineError(f"{path}, line {number}: {malformation(encoded, error)}") from error


def malformation(content: bytes, error: ValueError) -> str:
    """What is wrong with a line that `parse` refused, for people."""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    text = content.decode(errors="replace")
    shown = text if len(text) <= _EXCERPT_LENGTH else f"{text[:_EXCERPT_LENGTH]}…"
    return f"not valid JSON ({reason}{column}): {shown}"


def read_objects(path: str | Path, *, allow_torn: bool = False) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Every line with the JSON object it holds.

    With `allow_torn`, a last line whose writer was stopped in the middle is left out, with a warning.

    Raises:
        ConfigError: a line is not JSON, or not an object.
    """
    for line in iter_lines(path):
        try:
            value = parse_line(line.content, path, line.number)
        except MalformedLineError:
            is_last = line.end >= Path(path).stat().st_size
            if not (allow_torn and is_last and ends_torn(path)):
                raise
            logger.warning("%s ends in the middle of line %d, which is left out", path, line.number)
            return
        if not isinstance(value, dict):
            raise MalformedLineError(f"{path}, line {line.number}: expected a JSON object, found {json_type(value)}")
        yield line, value


def json_type(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "a boolean", str: "text", list: "an array", dict: "an object"}
    return names.get(type(value), "a number")


def to_line(record: Any) -> bytes:
    """`record` as one compact line, newline included.

    UTF-8 as it is, except where text cannot be encoded (lone surrogates): such a record is ASCII-escaped.
    """
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def count_lines(path: str | Path) -> int:
    """How many newlines the file has, blank lines included; several times faster than reading lines."""
    with Path(path).open("rb", buffering=0) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_BUFFER_BYTES), b""))


def ends_torn(path: str | Path) -> bool:
    """Whether the file's last line lacks its newline: its writer may have been stopped in the middle."""
    with Path(path).open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@contextmanager
def write_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and vanishes when it does not.

    Readers see the old content or the new, never a part.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb", buffering=_BUFFER_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
