"""One bare HTTP/1.1 connection: bytes of a request out, the parsed answer back.

A connection carries one request at a time. Whatever a server says without having been asked makes the connection
unusable, so that no call is given the answer to another; so does an answer that came before all of its request was
out. Only what is said on a new connection counts as the answer to its first request: busy servers do that.

What passes for HTTP is what passes with aiohttp, which is lenient with lines and headers. Head and body are bounded.
"""

import asyncio
import re
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import NamedTuple, cast

import aiohttp

from nemo_gym.http.addresses import Address, TlsAddress
from nemo_gym.http.errors import AnswerTooLargeError, NotHttpAnswerError
from nemo_gym.http.transports.base import MAX_HEAD_BYTES
from nemo_gym.http.transports.response import RawHeaders

try:
    import httptools
except ImportError:  # then aiohttp makes every call
    httptools = None  # type: ignore[assignment]

__all__ = ["Answer", "Connection", "LongBody", "httptools"]

_MAX_HEADERS = 128
_COPIED_UP_TO_BYTES = 64 * 1024
LONGEST_AT_ONCE_BYTES = 32 << 20
"""For a longer body no memory is set aside before it comes."""
_UNPACKED_AT_ONCE_BYTES = 4096
_SWITCHING_PROTOCOLS = 101
_LENIENT = {
    "lenient_headers": True,
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,
}
"""What aiohttp lets pass."""
_USUAL_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9]{2})(?: [^\r\n\0]*)?((?:\r\n[A-Za-z0-9_-]+:[^\r\n\0]*){1,%d})" % _MAX_HEADERS
).fullmatch
_BODILESS = frozenset({204, 304})
_MOST_DIGITS = 18
_KEEPS_OPEN = b"keep-alive"
_FRAMING = frozenset({b"transfer-encoding", b"connection", b"proxy-connection", b"upgrade", b"trailer"})


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: RawHeaders
    chunks: list[bytes]
    is_complete: bool = True

    def body(self, max_bytes: int) -> tuple[bytes, bool]:
        """The body without compression, and whether all of it is there; it is handed over, and not kept.

        Raises:
            AnswerTooLargeError: it has more than `max_bytes`.
        """
        if len(self.chunks) == 1:  # of one read, which is shorter than any limit, or known to be within this one
            body = self.chunks.pop()
        else:
            whole = BytesIO()
            while self.chunks:
                whole.write(self.chunks.pop(0))
            body = whole.getvalue()  # which is no copy
            if len(body) > max_bytes:
                raise AnswerTooLargeError.than(max_bytes)
        encoding = b""
        for name, value in self.headers:
            if name == b"content-encoding":
                encoding = value.lower()
        if body and encoding in (b"gzip", b"deflate"):
            body, is_whole = _unpacked(body, encoding, max_bytes)
            return body, self.is_complete and is_whole
        return body, self.is_complete


class LongBody(asyncio.BufferedProtocol):
    """The rest of a body whose length is known, read to where it belongs instead of in pieces that are joined.

    It stands in for the protocol of a connection until the body is whole or the connection is gone.
    """

    def __init__(
        self,
        owner: asyncio.Protocol,
        transport: asyncio.Transport,
        length: int,
        beginning: bytes | bytearray | memoryview,
        end: Callable[[bytes, bool], None],
    ) -> None:
        """`beginning` has come already, and is not all; `end` is told the body, and whether all of it is there."""
        self._owner, self._transport = owner, transport
        self._end: Callable[[bytes, bool], None] = end
        self._is_over = False
        self._whole = BytesIO(bytes(length))
        self._rest = self._whole.getbuffer()
        self._rest[: len(beginning)] = beginning
        self._rest = self._rest[len(beginning) :]
        transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Asyncio: where to put what comes next; never more than belongs to the body."""
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """Asyncio: so much more has come."""
        self._rest = self._rest[nbytes:]
        if not self._rest:  # while the transport has a view of it, the whole is only to be had as a copy
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._finish)

    def pause_writing(self) -> None:
        """Asyncio: what is sent meanwhile has to wait."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """Asyncio: it need not any more."""
        self._owner.resume_writing()

    def eof_received(self) -> bool | None:
        """Asyncio: nothing more will come."""
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: the connection is gone."""
        self._hand_over()
        self._owner.connection_lost(exc)

    def _finish(self) -> None:
        if not self._is_over:
            self._transport.set_protocol(self._owner)
            self._hand_over()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _hand_over(self) -> None:
        """Tell what came, and keep nothing of it: transports may keep this."""
        missing, self._rest, self._is_over = len(self._rest), memoryview(b""), True
        whole = self._whole.getvalue()  # which is no copy
        end, self._end, self._whole = self._end, _nobody, BytesIO()
        end(whole[: len(whole) - missing] if missing else whole, not missing)


def _nobody(body: bytes, is_complete: bool) -> None:
    """Who is told when all has been told."""


class Connection(asyncio.Protocol):
    """One connection, counted from before it is opened until it is gone."""

    __slots__ = (
        "_answered",
        "_beginning",
        "_chunks",
        "_gone",
        "_headers",
        "_line",
        "_loop",
        "_max_bytes",
        "_parser",
        "_received",
        "_status",
        "address",
        "idle_since_s",
        "proven_for",
        "said_first",
        "transport",
    )

    def __init__(self, address: Address | TlsAddress, gone: "Callable[[Connection], None]", max_bytes: int) -> None:
        """`max_bytes` is how long the body of an answer may be."""
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self.proven_for: str | None = None
        self.said_first: bytes | None = b""
        """What the server said on a new connection before it was asked anything; None once it was asked."""
        self._gone = gone
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        if hasattr(self._parser, "set_dangerous_leniencies"):
            self._parser.set_dangerous_leniencies(**_LENIENT)
        self._answered: asyncio.Future[Answer] | None = None
        self._line: asyncio.WriteTransport | None = None
        """What the bytes go out through: the connection itself, or what is below its TLS."""
        self._received = 0
        self._beginning = b""
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: RawHeaders = []
        self._chunks: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether something can be sent; also false while a connection is known to break."""
        return self.transport is not None and not self.transport.is_closing()

    def send(self, message: Sequence[bytes]) -> "asyncio.Future[Answer]":
        """Send a request, its head and its body in pieces, over an open connection; the future is its answer."""
        assert self.transport is not None
        answered: asyncio.Future[Answer] = self._loop.create_future()
        self._answered = answered
        self._received = 0
        head, body, *more = message
        if more or len(body) > _COPIED_UP_TO_BYTES:
            self.transport.writelines(message)
        else:
            self.transport.write(head + body)
        early, self.said_first = self.said_first, None
        if early:
            self.data_received(early)
        return answered

    def close(self) -> None:
        """Close the connection at once; what has not been sent is dropped."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: the connection is open."""
        self.take(cast(asyncio.Transport, transport), cast(asyncio.Transport, transport))

    def take(self, transport: asyncio.Transport, line: asyncio.WriteTransport) -> None:
        """Speak over `transport`, whose bytes go out through `line`."""
        self.transport, self._line = transport, line
        self._loop = asyncio.get_running_loop()
        line.set_write_buffer_limits(high=0)  # uvloop then writes at once

    def data_received(self, data: bytes) -> None:
        """Asyncio: some bytes, however many."""
        if self.said_first is not None:
            self.said_first += data
            if len(self.said_first) > MAX_HEAD_BYTES:
                self.close()
            return
        if not self._received:
            if self._answered is not None and (usual := _usual_head(data)) is not None:
                answer, missing = usual
                self._received = len(data)
                if not missing:
                    self._complete(answer)
                    return
                if missing + len(data) <= min(self._max_bytes, LONGEST_AT_ONCE_BYTES):
                    self._await_rest(answer, missing)
                    return
                self._received = 0
            self._beginning = data
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break_off(error)
        if self._received > MAX_HEAD_BYTES:
            self._check_bounds()

    def _await_rest(self, answer: Answer, missing: int) -> None:
        """Read the rest of an answer without the parser, which has seen nothing of it."""
        status, headers, (beginning,), _ = answer

        def end(body: bytes, is_complete: bool) -> None:
            self._received += missing
            if is_complete:
                self._complete(Answer(status, headers, [body]))
            else:
                self._status, self._headers, self._chunks = status, headers, [body]

        assert self.transport is not None
        LongBody(self, self.transport, len(beginning) + missing, beginning, end)

    def _break_off(self, error: Exception) -> None:
        """End an answer that makes no sense: if it had begun well, it is one that is not complete."""
        if isinstance(error.__context__, NotHttpAnswerError):
            self._end(error.__context__)
        elif self._status >= 200:
            self._end(Answer(self._status, self._headers, self._chunks, is_complete=False))
        else:
            self._end(NotHttpAnswerError.of(str(error), self._beginning))
        self.close()

    def _check_bounds(self) -> None:
        if self._answered is None:
            return
        if not self._status:
            self._end(NotHttpAnswerError.of(f"its head has more than {MAX_HEAD_BYTES} bytes", self._beginning))
        elif self._received > self._max_bytes + 2 * MAX_HEAD_BYTES + self._max_bytes // 8:  # chunks have sizes, too
            self._end(AnswerTooLargeError.than(self._max_bytes))
        else:
            return
        self.close()

    def eof_received(self) -> None:
        """Asyncio: the other side has said its last; over TLS that is known long before the connection is gone."""
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
        """Parser: a header, or a trailer, which nobody reads."""
        if b"\0" in value:
            raise NotHttpAnswerError.of("a header holds a null", self._beginning)
        if not self._status:
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Parser: the end of the headers."""
        self._status = self._parser.get_status_code()
        if self._headers[_MAX_HEADERS:]:
            raise NotHttpAnswerError.of(f"it has more than {_MAX_HEADERS} headers", self._beginning)
        if self._received > MAX_HEAD_BYTES:
            size = sum(map(len, (b"".join(each) for each in self._headers)))
            if size > MAX_HEAD_BYTES or b"\n" not in self._beginning[:MAX_HEAD_BYTES]:
                raise NotHttpAnswerError.of(f"its head has more than {MAX_HEAD_BYTES} bytes", self._beginning)

    def on_body(self, data: bytes) -> None:
        """Parser: a piece of the body."""
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        """Parser: the last byte of an answer."""
        if not 100 <= self._status < 200 or self._status == _SWITCHING_PROTOCOLS:  # else the real one follows
            if not self._parser.should_keep_alive():
                self.close()
            self._complete(Answer(self._status, self._headers, self._chunks))
            self._beginning = b""
        self._reset()

    def _complete(self, answer: Answer) -> None:
        assert self._line is not None
        if self._line.get_write_buffer_size():
            self.close()
        self._end(answer)

    def _ends_with_connection(self) -> bool:
        """Whether the answer said nothing about its length, so that the end of the connection is its end."""
        headers = dict(self._headers)
        is_chunked = headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        return b"content-length" not in headers and not is_chunked

    def _end(self, outcome: Answer | Exception) -> None:
        answered, self._answered = self._answered, None
        if answered is None or answered.done():
            return
        if isinstance(outcome, Answer):
            answered.set_result(outcome)
        else:
            answered.set_exception(outcome)


def _usual_head(data: bytes) -> tuple[Answer, int] | None:
    """The answer that `data` is, if it came as nearly all do: with its length, and nothing else in one piece.

    A long one may have begun to come; how many bytes are missing is told, too, and the body is a view of what came.
    Anything else is for the parser, which takes three times as long.
    """
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    head = _USUAL_HEAD(data, 0, end) if end > 0 else None
    if head is None:
        return None
    length, headers = b"", []
    for line in head[2].split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if name == b"content-length":
            if length or not value.isdigit() or len(value) > _MOST_DIGITS:
                return None
            length = value
        elif name in _FRAMING and not (name == b"connection" and value.lower() == _KEEPS_OPEN):
            return None
        headers.append((name, value))
    status = int(head[1])
    if not length or status in _BODILESS:
        return None
    missing = end + 4 + int(length) - len(data)
    if missing < 0 or (missing and int(length) < _COPIED_UP_TO_BYTES):
        return None
    return Answer(status, headers, [data[end + 4 :]]), missing


def _unpacked(body: bytes, encoding: bytes, max_bytes: int) -> tuple[bytes, bool]:
    """What a server compressed although nobody asked it to, and whether all of it is there."""
    deflate = zlib.MAX_WBITS if body[0] & 0xF == 8 else -zlib.MAX_WBITS  # some call raw data by that name
    kind = zlib.MAX_WBITS | 16 if encoding == b"gzip" else deflate
    try:
        return _inflated(body, kind, max_bytes)
    except zlib.error:
        return b"", False


def _inflated(body: bytes, kind: int, max_bytes: int) -> tuple[bytes, bool]:
    """Little by little: what is left over is copied after each of the members in which gzip may come."""
    parts, size = [], 0
    reader = zlib.decompressobj(kind)
    for start in range(0, len(body), _UNPACKED_AT_ONCE_BYTES):
        rest = body[start : start + _UNPACKED_AT_ONCE_BYTES]
        while rest:
            if reader.eof:
                reader = zlib.decompressobj(kind)
            parts.append(reader.decompress(rest, max_bytes - size + 1))
            size += len(parts[-1])
            if size > max_bytes:
                raise AnswerTooLargeError.than(max_bytes)
            rest = reader.unused_data
    return b"".join(parts), reader.eof
