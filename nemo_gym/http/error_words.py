"""What an error says for itself, on one line.

Endpoints wrap their message in JSON or a page, and each server on the way wraps what it was told in a text of its own.
Here the message is taken out again: unescaped, on one line, and cut where it stops being of use. It travels beside the
body, in a header that every hop passes on, so that nobody has to quote what he was told.
"""

import ast
import errno
import os
import re
import socket
import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any
from urllib.parse import quote, unquote

import orjson

WORDS_LENGTH = 300
_LINE_LENGTH = 1_000
_HEADER_LENGTH = 6_000
_READ_BYTES = 65_536
_MOST_HOPS = 10
_UNQUOTED = " !\"#$&'()*+,-./:;<=>?@[]^_`{|}~"
_HOP = re.compile(r"Hit an exception in \S{1,300} calling an inner server: (?P<inner>b['\"].*)", re.DOTALL)
_MESSAGE_KEYS = ("message", "detail", "error", "msg", "error_description", "title")
_TITLE = re.compile(r"<title>([^<]{1,300})", re.IGNORECASE)
_SHOWN_PROBLEMS = 3


def own_words(body: bytes, length: int = WORDS_LENGTH) -> str:
    """The message in the body of an error answer."""
    body = unwrapped(body)
    return cut(_message_in(body[:_READ_BYTES]), length)


def unwrapped(body: bytes) -> bytes:
    """The body that the innermost server got, from the body of one that quotes it; any other body as it is."""
    for _ in range(_MOST_HOPS):
        if len(body) > _READ_BYTES or b" calling an inner server: " not in body:
            break
        try:
            text = orjson.loads(body)
            hop = _HOP.fullmatch(text) if isinstance(text, str) else None
            inner = ast.literal_eval(hop["inner"]) if hop else None
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            break
        if not isinstance(inner, bytes):
            break
        body = inner
    return body


def cut(text: str, length: int = WORDS_LENGTH) -> str:
    """`text` on one line that is not longer than that."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _message_in(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        content = orjson.loads(body)
    except ValueError:
        content = text
    if isinstance(content, str):
        title = _TITLE.search(content) if content.lstrip()[:1] == "<" else None
        return title[1] if title else content
    return _found_in(content) or text


def _found_in(content: Any, depth: int = 4) -> str:
    """The message somewhere in a JSON answer; empty if there is none where one would look."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) and depth:
        found = (_found_in(content.get(key), depth - 1) for key in _MESSAGE_KEYS)
        message = next(filter(None, found), "")
        place = content.get("loc")
        return f"{'.'.join(map(str, place))}: {message}" if message and isinstance(place, list) else message
    if isinstance(content, list) and depth:
        return _listed(_found_in(item, depth - 1) for item in content[: _SHOWN_PROBLEMS + 1])
    return ""


def _listed(texts: Iterable[str]) -> str:
    said = list(filter(None, texts))
    return "; ".join(said[:_SHOWN_PROBLEMS]) + ("; …" if len(said) > _SHOWN_PROBLEMS else "")


def raised_in(error: BaseException, path: str) -> str:
    """What an exception that nobody expected says to those who do not see its traceback."""
    text, place = cut(str(error)), place_of(error)
    said, where = f": {text}" if text else "", f", {place}" if place else ""
    return f"{path} raised {type(error).__name__}{said}{where}; its log has the traceback"


def place_of(error: BaseException) -> str:
    """Where an exception was raised, as `folder/file.py line 5`; empty if it was not."""
    frames = deque(traceback.walk_tb(error.__traceback__), maxlen=1)
    return "".join(f"{'/'.join(PurePath(it.f_code.co_filename).parts[-2:])} line {line}" for it, line in frames)


def as_header(line: str) -> str:
    """A line as the value of a header."""
    value = quote(cut(line, _LINE_LENGTH), safe=_UNQUOTED)
    if len(value) > _HEADER_LENGTH:
        value = value[:_HEADER_LENGTH].rpartition("%")[0]
    return value


def from_header(value: str) -> str:
    """The line in the value of a header."""
    return unquote(value, errors="replace")


def cause_of(error: BaseException) -> str:
    """What went wrong with a connection, in a few words."""
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    if isinstance(getattr(error, "os_error", error), socket.gaierror):
        return "unknown host name"
    number = getattr(error, "errno", None)
    if number is None and f"[Errno {errno.ECONNREFUSED}]" in str(error):  # several addresses, each refused
        number = errno.ECONNREFUSED
    if isinstance(number, int) and number > 0:
        return os.strerror(number).lower()
    return str(error) or type(error).__name__
