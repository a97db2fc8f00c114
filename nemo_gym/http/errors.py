"""What a caller of a server may have to catch.

All of these can be pickled (they cross process and Ray boundaries) and stay what existing code
catches: aiohttp's client errors, `OSError`, `TimeoutError`, `ValueError`.

Some answers are refused: what is not HTTP, with a guess at what it is instead, and what is too large. Either would
be the same the next time, so such calls are not tried again.

What an error says for itself is one line. Endpoints wrap their message in JSON or a page, and each server on the way
wraps what it was told in a text of its own; here the message is taken out again: unescaped, and cut where it stops
being of use. It travels beside the body, in a header that every hop passes on, so that nobody has to quote what he was
told.
"""

import ast
import errno
import json
import os
import re
import socket
import traceback
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from nemo_gym import errors
from nemo_gym.config.secrets import mask_url_passwords
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.keys import SERVER_TYPES

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
ERROR_STATUS_HEADER = "x-nemo-gym-error-status"
ERROR_SERVER_HEADER = "x-nemo-gym-error-server"
ERROR_CLASS_HEADER = "x-nemo-gym-error-class"
ERROR_MESSAGE_HEADER = "x-nemo-gym-error-message"
ERROR_RAISED_HEADER = "x-nemo-gym-error-raised"
ERROR_HEADERS = (
    *(ERROR_STATUS_HEADER, ERROR_SERVER_HEADER, ERROR_CLASS_HEADER, ERROR_MESSAGE_HEADER),
    ERROR_RAISED_HEADER,
)
"""Headers of an error answer that describe the innermost failure; every hop passes them on unchanged."""

_EXCERPT_LENGTH = 500
_READ_AT_BEGINNING, _READ_AT_END = 12_288, 4_096
_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
_NOT_OF_AUTHORS = tuple(f"{Path(file).parent}{os.sep}" for file in (os.__file__, errors.__file__))
"""Folders of the standard library and of this package."""
_QUOTED_BYTES = re.compile(r"^ *(?P<bytes>b(?:'[^\n]*'|\"[^\n]*\"))$", re.MULTILINE)
_SHOWN_BYTES = 40
_LOOKS = {
    b"\x15\x03": "this looks like a TLS port: use https://",
    b"\x16\x03": "this looks like a TLS port: use https://",
    b"SSH-": "this looks like an SSH server: check host and port",
    b"\x00\x00\x00\x04": "this looks like an HTTP/2 (gRPC) server: name the port on which it speaks HTTP/1.1",
    b"-ERR": "this looks like a Redis server: check host and port",
    b"-DENIED": "this looks like a Redis server: check host and port",
    b"220": "this looks like a mail or FTP server: check host and port",
    b"+OK": "this looks like a mail server: check host and port",
    b"* OK": "this looks like a mail server: check host and port",
    b"RFB ": "this looks like a VNC server: check host and port",
}


class HttpSettingsError(ConfigError, ValueError):
    """A setting of the HTTP client has an impossible value."""


class HeadServerError(ConfigError, ValueError):
    """The head server cannot be reached, or what answers in its place is none."""


class ClientResponseError(GymError, aiohttp.ClientResponseError):
    """A server answered with an error status. Programs know it by its base's name, and look for that in texts.

    `status` and `response_content` are the answer's own. `error_status`, `error_server`, `error_class` and
    `error_message` describe the innermost failure, however many servers lie between.
    """

    def __init__(
        self,
        url: str,
        status: int,
        response_content: bytes = b"",
        *,
        method: str = "POST",
        headers: Iterable[tuple[str, str]] = (),
        attempts: int = 1,
        elapsed_s: float = 0.0,
    ) -> None:
        url = mask_url_passwords(url)
        parsed = URL(url)
        # The headers of the request stay out of the error: they hold the API key.
        request_info = aiohttp.RequestInfo(parsed, method, CIMultiDictProxy(CIMultiDict()), parsed)
        super().__init__(
            request_info, (), status=status, message=reason_phrase(status), headers=CIMultiDict(list(headers))
        )
        self.url = url
        self.method = method
        self.response_content = response_content
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        self.args = (str(self),)

    @property
    def error_status(self) -> int:
        """The status of the innermost failure; this answer's own when it is the innermost."""
        text = self._header(ERROR_STATUS_HEADER)
        return int(text) if text is not None and text.isdecimal() else self.status

    @property
    def error_server(self) -> str | None:
        """The server in which the innermost failure happened, if it said so."""
        return self._header(ERROR_SERVER_HEADER)

    @property
    def error_class(self) -> str | None:
        """The name of the innermost exception's class, if it was said."""
        return self._header(ERROR_CLASS_HEADER)

    @property
    def error_message(self) -> str | None:
        """The innermost failure on one line, if it was said."""
        text = self._header(ERROR_MESSAGE_HEADER)
        return None if text is None else from_header(text)

    @property
    def error_raised(self) -> str | None:
        """The path, the class and the line of code of an exception that nobody expected, if it was said."""
        text = self._header(ERROR_RAISED_HEADER)
        return None if text is None else from_header(text)

    def _header(self, name: str) -> str | None:
        return None if self.headers is None else self.headers.get(name)

    def __str__(self) -> str:
        return self.line()

    def line(self, length: int = WORDS_LENGTH) -> str:
        """What happened on one line, with so much of what the answer says."""
        if self.error_message is not None:
            return f"in {self.error_server}: {self.error_message}"
        tries = f" (try {self.attempts}, after {self.elapsed_s:.1f} s)" if self.attempts > 1 else ""
        origin = ""
        if self.error_server is not None:
            origin = f" [failed in {self.error_server!r}: {self.error_class}, status {self.error_status}]"
        said = own_words(self.response_content, length)
        return f"{self.status} {self.message} from {self.method} {self.url}{tries}{origin}: {said}"

    def excerpt(self, length: int = _EXCERPT_LENGTH) -> str:
        """The beginning of the answer's body, as text."""
        return excerpt(self.response_content, length)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        headers = [] if self.headers is None else list(self.headers.items())
        arguments = (self.url, self.status, self.response_content)
        options = {
            "method": self.method,
            "headers": headers,
            "attempts": self.attempts,
            "elapsed_s": self.elapsed_s,
        }
        return _rebuild, (type(self), arguments, options)


ServerResponseError = ClientResponseError


class ServerCallError(GymError):
    """A call that ended without an answer: which server, where, how many tries, how long."""

    message: Any

    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        method: str = "",
        server_name: str | None = None,
        attempts: int = 1,
        elapsed_s: float = 0.0,
    ) -> None:
        self.args = (message,)
        self.message = message
        self.url = url
        self.method = method
        self.server_name = server_name
        self.attempts = attempts
        self.elapsed_s = elapsed_s

    def __str__(self) -> str:
        return str(self.message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"

    def __reduce__(self) -> tuple[object, ...]:
        options = {
            "url": self.url,
            "method": self.method,
            "server_name": self.server_name,
            "attempts": self.attempts,
            "elapsed_s": self.elapsed_s,
        }
        return _rebuild, (type(self), (self.message,), options)


class ServerUnreachableError(ServerCallError, aiohttp.ClientOSError, ConnectionError):
    """No connection came about: the request was never sent."""


class ServerLostError(ServerCallError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
    """The connection broke after the request went out: it may or may not have been carried out."""


class ServerCallTimeoutError(ServerCallError, aiohttp.ServerTimeoutError):
    """No complete answer in the allowed time: the request may or may not have been carried out."""


class UnprovenServerError(aiohttp.ClientOSError):
    """What listens at an address did not prove that it has the run's token, so it was sent nothing."""


class NotHttpAnswerError(aiohttp.ClientConnectionError):
    """What answers does not speak HTTP."""

    @classmethod
    def of(cls, reason: str, beginning: bytes) -> "NotHttpAnswerError":
        """`beginning` is what it said first."""
        return cls(f"the answer is not HTTP ({reason}): {looks_like(beginning)}")


class AnswerTooLargeError(aiohttp.ClientPayloadError):
    """An answer that is longer than the setting allows, as sent or once unpacked."""

    @classmethod
    def than(cls, max_bytes: int) -> "AnswerTooLargeError":
        """The error for an answer of more than `max_bytes`."""
        return cls(
            f"the answer is larger than max_response_bytes={max_bytes}; if answers of that size are meant, "
            "set max_response_bytes higher"
        )


class NotHttpError(ServerCallError, aiohttp.ClientConnectionError):
    """What answers there does not speak HTTP: asking again would not help."""


class ResponseTooLargeError(ServerCallError, aiohttp.ClientPayloadError):
    """An answer with more than `max_response_bytes`: the request was carried out, the rest was not read."""


class MalformedResponseError(GymError, json.JSONDecodeError):
    """A server answered with a body that is not JSON."""

    def __init__(self, message: str, body: bytes = b"", pos: int = 0) -> None:
        self.body = body
        json.JSONDecodeError.__init__(self, message, body.decode(errors="replace"), pos)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.msg, self.body, self.pos)


def looks_like(beginning: bytes) -> str:
    """A guess, for a message, at what speaks like that, and what to do about it; empty when there is none."""
    if beginning[3:4] == b"\x04" and beginning[:1] == b"\x00":  # the settings with which HTTP/2 begins
        beginning = b"\x00\x00\x00\x04"
    for first, words in _LOOKS.items():
        if beginning.startswith(first):
            return words
    return f"it begins with {beginning[:_SHOWN_BYTES]!r}; check that the address is the one you mean"


def not_http(error: aiohttp.ClientResponseError) -> NotHttpAnswerError | None:
    """What aiohttp's error about an answer amounts to; None if the answer was HTTP."""
    if not isinstance(error.__cause__, HttpProcessingError):
        return None
    reason = error.message.strip().partition("\n\n")[0]
    quoted = _QUOTED_BYTES.search(error.message[:4096])
    try:
        beginning = ast.literal_eval(quoted["bytes"]) if quoted else b""
    except (SyntaxError, ValueError):
        beginning = b""
    return NotHttpAnswerError.of(" ".join(reason.split())[:200], beginning)


def failure_headers(error: BaseException, server_name: str, line: str = "", raised: str = "") -> dict[str, str]:
    """The headers that tell callers of `server_name` where the failure behind `error` began, and `line` about it.

    `raised` is the path, the class and the line of code of an exception that nobody expected.
    """
    if isinstance(error, ServerResponseError) and error.error_server is not None:
        received: Mapping[str, str] = error.headers or {}
        said = {ERROR_MESSAGE_HEADER: as_header(line)} if line else {}
        return {**said, **{name: received[name] for name in ERROR_HEADERS if name in received}}
    status = error.status if isinstance(error, aiohttp.ClientResponseError) else HTTPStatus.INTERNAL_SERVER_ERROR
    name = error.server_name if isinstance(error, ServerCallError) and error.server_name else server_name
    described = {
        ERROR_STATUS_HEADER: str(int(status)),
        ERROR_SERVER_HEADER: name,
        ERROR_CLASS_HEADER: type(error).__name__,
    }
    if line:
        described[ERROR_MESSAGE_HEADER] = as_header(line)
    if raised:
        described[ERROR_RAISED_HEADER] = as_header(raised)
    return {header: value.encode("ascii", "replace").decode("ascii") for header, value in described.items()}


def reason_phrase(status: int) -> str:
    """The standard words for a status; empty for statuses nobody named."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def excerpt(body: bytes, length: int = _EXCERPT_LENGTH) -> str:
    """The beginning of a body, as text on one line."""
    text = " ".join(body[: 4 * length].decode(errors="replace").split())
    return text if len(text) <= length else f"{text[:length]}…"


def readable(body: bytes | str) -> str:
    """As much of an error's body as is searched for what it means, however long it is: its beginning and its end."""
    if len(body) > _READ_AT_BEGINNING + _READ_AT_END:
        beginning, end = body[:_READ_AT_BEGINNING], body[-_READ_AT_END:]
        return f"{readable(beginning)} {readable(end)}"
    return body if isinstance(body, str) else body.decode(errors="replace")


def _rebuild(cls: type[BaseException], arguments: tuple[object, ...], options: dict[str, object]) -> BaseException:
    return cls(*arguments, **options)


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


def raised_in(error: BaseException, path: str, log: str = "its log") -> str:
    """Return what an exception that nobody expected says to those who do not see its traceback, which `log` has."""
    text, place = cut(str(error)), place_of(error)
    said, where = f": {text}" if text else "", f", {place}" if place else ""
    return f"{path} raised {type(error).__name__}{said}{where}; {log} has the traceback"


def place_of(error: BaseException) -> str:
    """Return where an exception was raised, as `folder/file.py line 5`; empty if it was not.

    This is the innermost line that an author of a server wrote, before those of libraries and our own.
    """
    frames = [(it.f_code.co_filename, line) for it, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return ""
    file, line = next((each for each in reversed(frames) if _is_of_author(each[0])), frames[-1])
    parts = PurePath(file).parts
    start = next((at for at in reversed(range(len(parts))) if parts[at] in SERVER_TYPES), len(parts) - 2)
    return f"{'/'.join(parts[max(start, 0) :])} line {line}"


def _is_of_author(file: str) -> bool:
    """Return whether a file of code belongs neither to this package nor to a library; servers always count."""
    parts = PurePath(file).parts
    libraries = [at for at, part in enumerate(parts) if part in _LIBRARY_FOLDERS]
    if libraries:
        return parts[libraries[-1] + 1] in SERVER_TYPES
    return not file.startswith(("<", *_NOT_OF_AUTHORS))


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
