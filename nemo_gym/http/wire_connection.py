"""One bare HTTP/1.1 connection: bytes of a request out, the parsed answer back.

A connection carries one request at a time. Whatever a server says without having been asked makes the connection
unusable, so that no call is given the answer to another.
"""

import asyncio
import zlib
from collections.abc import Callable
from typing import NamedTuple, cast

import aiohttp

from nemo_gym.http.addresses import Address
from nemo_gym.http.local_request import LocalRequest
from nemo_gym.http.local_response import RawHeaders

try:
    import httptools
except ImportError:  # then aiohttp makes every call
    httptools = None  # type: ignore[assignment]

__all__ = ["Answer", "Connection", "httptools", "message_of"]

_COPIED_UP_TO_BYTES = 64 * 1024
_COMPRESSED = {b"gzip", b"x-gzip", b"deflate"}


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: RawHeaders
    chunks: list[bytes]
    is_complete: bool = True

    def body(self) -> tuple[bytes, bool]:
        """The body without compression, and whether all of it is there."""
        body = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        is_complete = self.is_complete
        for name, value in self.headers:
            if name == b"content-encoding" and value.lower() in _COMPRESSED:
                body, is_complete = _decompressed(body, is_complete)
        return body, is_complete


class Connection(asyncio.Protocol):
    """One connection, counted from before it is opened until it is gone."""

    __slots__ = (
        "_answered",
        "_chunks",
        "_gone",
        "_headers",
        "_parser",
        "_status",
        "address",
        "idle_since_s",
        "transport",
    )

    def __init__(self, address: Address, gone: "Callable[[Connection], None]") -> None:
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self._gone = gone
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[Answer] | None = None
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: RawHeaders = []
        self._chunks: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether something can be sent; also false while a connection is known to break."""
        return self.transport is not None and not self.transport.is_closing()

    def send(self, message: tuple[bytes, bytes]) -> "asyncio.Future[Answer]":
        """Send a request over an open connection; the future is its answer."""
        assert self.transport is not None
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answered = answered
        head, body = message
        if len(body) > _COPIED_UP_TO_BYTES:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head + body)
        return answered

    def close(self) -> None:
        """Close the connection at once; what has not been sent is dropped."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: the connection is open."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Asyncio: some bytes, however many."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(aiohttp.ServerDisconnectedError(f"The answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Asyncio: the connection is gone, by whoever's doing."""
        if self._status:
            is_complete = error is None and self._ends_with_connection()
            self._end(Answer(self._status, self._headers, self._chunks, is_complete))
        elif isinstance(error, OSError):
            self._end(aiohttp.ClientOSError(*error.args))
        else:
            self._end(aiohttp.ServerDisconnectedError())
        self._gone(self)

    def on_message_begin(self) -> None:
        """Parser: the first byte of an answer."""
        if self._answered is None:  # nobody asked, or this is a second answer on the heels of the first
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser: a header."""
        self._headers.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        """Parser: the end of the headers."""
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Parser: a piece of the body."""
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        """Parser: the last byte of an answer."""
        if self._status >= 200:  # else an interim answer: the real one follows
            if not self._parser.should_keep_alive():
                self.close()
            self._end(Answer(self._status, self._headers, self._chunks))
        self._reset()

    def _ends_with_connection(self) -> bool:
        """Whether the answer said nothing about its length, so that the end of the connection is its end."""
        names = {name for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _end(self, outcome: Answer | Exception) -> None:
        answered, self._answered = self._answered, None
        if answered is None or answered.done():
            return
        if isinstance(outcome, Answer):
            answered.set_result(outcome)
        else:
            answered.set_exception(outcome)


def message_of(request: LocalRequest) -> tuple[bytes, bytes]:
    """Head and body as they go out.

    Raises:
        ValueError: the method or a header holds what would end its line.
    """
    target = b"%b?%b" % (request.raw_path, request.query) if request.query else request.raw_path
    lines = [b"%b: %b\r\n" % header for header in request.headers]
    head = b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode("ascii"), target, b"".join(lines))
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2 or b"\0" in head or " " in request.method:
        raise ValueError(f"a header of {request.method!r} {request.path} holds a line break or a null")
    return head, request.body


def _decompressed(body: bytes, is_complete: bool) -> tuple[bytes, bool]:
    """What a server compressed although nobody asked it to."""
    any_kind = zlib.MAX_WBITS | 32
    for kind in (any_kind, -zlib.MAX_WBITS):  # some call raw data "deflate"
        try:
            return _inflated(body, kind, is_complete)
        except zlib.error:
            continue
    return b"", False


def _inflated(body: bytes, kind: int, is_complete: bool) -> tuple[bytes, bool]:
    parts = []
    while body:  # gzip may come in several members
        reader = zlib.decompressobj(kind)
        parts.append(reader.decompress(body))
        body, is_complete = reader.unused_data, is_complete and reader.eof
    return b"".join(parts), is_complete
