"""JSON Lines, one JSON value per line: read with true line numbers, written compactly.

Blank lines are nobody's fault and are skipped; they still count for line numbers. A line that is
not JSON is one error naming the file and the line.
"""

import json
import math
import os
import re
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import orjson

from nemo_gym.errors import ConfigError

_BUFFER_BYTES = 1 << 20
_LONG_LINE_BYTES = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EXCERPT_LENGTH = 60
_MOST_LEVELS = 1_000
"""That orjson reads back; it writes a quarter of them."""
_MOST_LEVELS_OF_SERVERS = 200
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PORTION_BYTES = 1 << 18
_MOST_CUTS_TRIED = 100
_HUGE = b"0" * 19
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_BRACKET_OR_STRING = re.compile(rb'[\[{]|[\]}]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


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
    offset: int = 0
    """Where they begin in the file."""


PlainLine: TypeAlias = tuple[int, int, int, bytes, int]
"""A `Line` without the names, which take longer to attach than the line takes to read."""


def iter_lines(path: str | Path) -> Iterator[Line]:
    """The lines of a file, one at a time, in order; memory does not grow with the file."""
    return map(partial(tuple.__new__, Line), iter_plain_lines(path))  # half the time of Line(...)


def iter_plain_lines(path: str | Path) -> Iterator[PlainLine]:
    """The same for whoever takes them apart at once."""
    with Path(path).open("rb", buffering=_BUFFER_BYTES) as file:
        passed = number = end = 0
        while True:
            for number, raw in enumerate(file, passed + 1):
                length = len(raw)
                start, end = end, end + length
                content = raw.strip()
                if start == 0:
                    content = content.removeprefix(_BYTE_ORDER_MARK)
                if content:
                    offset = start if raw[0] == content[0] else start + raw.index(content)
                    yield number, start, end, content, offset
                if length >= _LONG_LINE_BYTES and file.seekable():
                    break
            else:
                return
            passed, end = yield from _long_lines(file.fileno(), number, end, length)
            file.seek(end)


def _long_lines(descriptor: int, number: int, end: int, length: int) -> Generator[PlainLine, None, tuple[int, int]]:
    """The lines from `end` on as long as they are long; returns how many there are up to then, and where they end.

    The next is taken to be as long as the one before, `length` with its newline: repeats of a row are. Then it is not
    copied, and where it is not, it is read as if it had come in pieces.
    """
    while True:
        start = end
        content = os.pread(descriptor, length - 1, start)
        last = content.find(b"\n")
        if last >= 0:
            content, rest = content[:last], b"\n"
        else:
            rest = os.pread(descriptor, 1, start + len(content))
            while rest and not rest.endswith(b"\n"):
                more = os.pread(descriptor, _BUFFER_BYTES, start + len(content) + len(rest))
                last = more.find(b"\n") + 1
                rest += more[: last or len(more)]
                if not more:
                    break
        length = len(content) + len(rest)
        if length < _LONG_LINE_BYTES:
            return number, start
        if len(rest) > 1:
            content += rest
        number, end = number + 1, start + length
        stripped = content.strip()
        if stripped:
            offset = start if content[0] == stripped[0] else start + content.index(stripped)
            yield number, start, end, stripped, offset


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


def refusal_by_servers(content: bytes) -> str | None:
    """Return why no server reads a line that `parse` does read; None when servers do.

    Servers read bodies with the parser of pydantic, which takes no lone surrogates and fewer levels.
    """
    is_deep = content.count(b"[") + content.count(b"{") > _MOST_LEVELS_OF_SERVERS
    if not is_deep and _SURROGATE.search(content) is None:
        return None
    from pydantic_core import from_json

    try:
        from_json(content)
    except ValueError as error:
        if "recursion" in str(error):
            return f"nested in more than {_MOST_LEVELS_OF_SERVERS} levels, which no server reads"
        if "escape" in str(error):
            return "half of a surrogate pair (such as \\ud83d), which no server reads: write the whole character"
        return f"no server reads it ({error})"
    return None


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


def loads_jsonl_line(raw: bytes | str, fpath: str | Path, line_no: int) -> Any:
    """The same under the name that programs elsewhere know; raises as `parse_line`."""
    return parse_line(raw, fpath, line_no)


def malformation(content: bytes, error: ValueError) -> str:
    """What is wrong with a line that `parse` refused, for people."""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    text = content.decode(errors="replace")
    shown = text if len(text) <= _EXCERPT_LENGTH else f"{text[:_EXCERPT_LENGTH]}…"
    return f"not valid JSON ({reason}{column}): {shown}"


def json_type(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "a boolean", str: "text", list: "an array", dict: "an object"}
    return names.get(type(value), "a number")


def to_line(record: Any) -> bytes:
    """`record` as one compact line, newline included.

    UTF-8 as it is, except where text cannot be encoded (lone surrogates): such a record is ASCII-escaped. What JSON
    cannot say becomes null: numbers that are none, and what is nested more deeply than `parse` can read.
    """
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:
        pass
    try:
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (ValueError, RecursionError):
        return "".join(_pieces(record)).encode() + b"\n"


def _pieces(value: Any) -> Iterator[str]:
    """The JSON of any value, without recursion."""
    waiting: list[tuple[Iterator[Any], bool]] = [(iter([value]), False)]
    separator = ""
    while waiting:
        entries, has_keys = waiting[-1]
        for entry in entries:
            value = entry[1] if has_keys else entry
            yield separator + (f"{json.dumps(str(entry[0]))}:" if has_keys else "")
            if isinstance(value, dict | list | tuple) and len(waiting) <= _MOST_LEVELS:
                is_object = isinstance(value, dict)
                waiting.append((iter(value.items()) if isinstance(value, dict) else iter(value), is_object))
                separator = ""
                yield "{" if is_object else "["
                break
            separator = ","
            is_null = isinstance(value, dict | list | tuple) or (isinstance(value, float) and not math.isfinite(value))
            yield "null" if is_null else json.dumps(value)
        else:
            waiting.pop()
            separator = ","
            if waiting:
                yield "}" if has_keys else "]"


def array_portions(content: bytes, start: int, end: int, *, exact: bool = False) -> Iterator[list[dict[str, Any]]]:
    """The objects in an array, some at a time: `content[start:end]` is what stands between its brackets.

    If `exact`, whole numbers of more than 64 bits are no floats.

    Raises:
        ValueError: not all of them are objects, or they cannot be told apart without reading everything at once.
    """
    while start < end:
        cut = start + _PORTION_BYTES
        for _ in range(_MOST_CUTS_TRIED):
            cut = content.find(b"},{", cut, end) + 1
            stop = cut or end
            try:
                piece = b"[%b]" % content[start:stop]  # which is JSON only if both ends are between two objects
                entries = json.loads(piece) if exact and _has_huge_number(piece) else orjson.loads(piece)
            except ValueError:
                if not cut:
                    raise
            else:
                break
        else:
            raise ValueError("objects in the array cannot be told apart")
        if not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("the array does not hold objects only")
        yield entries
        start = stop + 1


def _has_huge_number(content: bytes) -> bool:
    """Whether there may be a number of more than 64 bits; an expression would take as long as parsing does."""
    return _HUGE in content.translate(_DIGITS_AS_ZEROS)


def cut_levels(content: bytes, levels: int) -> bytes:
    """JSON with null for what is nested in more than `levels` others; no parser has to read that."""
    pieces, kept_to, depth = [], 0, 0
    for token in _BRACKET_OR_STRING.finditer(content):
        if token[0] in b"[{":
            depth += 1
            if depth == levels + 1:
                pieces.append(content[kept_to : token.start()])
                kept_to = token.start()
        elif token[0] in b"]}":
            if depth == levels + 1:
                pieces.append(b"null")
                kept_to = token.end()
            depth -= 1
    return b"".join([*pieces, content[kept_to:]])


def is_deeper(text: str, levels: int) -> bool:
    """Return whether something in this JSON is nested in more than `levels` others, which writers may not take."""
    content = text.encode(errors="replace") if len(text) > 2 * levels else b""
    return cut_levels(content, levels) != content


def count_lines(path: str | Path) -> int:
    """How many newlines the file has, blank lines included; several times faster than reading lines."""
    with Path(path).open("rb", buffering=0) as file:
        return sum(map(newlines_in, iter(lambda: file.read(_BUFFER_BYTES), b"")))


def newlines_in(content: bytes) -> int:
    """How many there are; for lines of more than a hundred bytes faster than `count`, which looks at each byte."""
    found, at = 0, content.find(b"\n")
    while at >= 0:
        found, at = found + 1, content.find(b"\n", at + 1)
    return found


def ends_torn(path: str | Path) -> bool:
    """Whether the file's last line lacks its newline: its writer may have been stopped in the middle."""
    with Path(path).open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
