"""A connection to a server, as uvicorn speaks HTTP over it, but for what takes long.

An answer goes out in one write, a long body comes in one piece, and a connection keeps one timer. All of it is built
into uvicorn's own protocol, and left to uvicorn where that is not made as we know it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import uvicorn

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
except ImportError:  # without httptools, or in a version that is not known, uvicorn has a way of its own
    HttpToolsProtocol = RequestResponseCycle = STATUS_LINE = None  # type: ignore[assignment, misc]

from nemo_gym.http.transports.memory import Answer
from nemo_gym.http.transports.response import RawHeaders
from nemo_gym.http.transports.wire_connection import LONGEST_AT_ONCE_BYTES, LongBody
from nemo_gym.servers.middleware import CALLER

logger = logging.getLogger(__name__)

_COPIED_UP_TO_BYTES = 64 * 1024
_LONG_BODY_BYTES = 128 * 1024
_AT_ONCE_BYTES = 4_000_000
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})
_OF_PROTOCOL = frozenset(
    [
        "cycle",
        "flow",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "server_state",
        "timeout_keep_alive",
        "timeout_keep_alive_task",
        "transport",
    ]
)
_OF_CYCLE = frozenset(
    [
        "access_log",
        "body",
        "chunked_encoding",
        "default_headers",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "on_response",
        "response_complete",
        "response_started",
        "scope",
        "transport",
        "waiting_for_100_continue",
    ]
)
"""What `HttpProtocol` reads and sets in objects of uvicorn's that are none of its interface."""
_METHODS = (
    "_unset_keepalive_if_required",
    "connection_lost",
    "data_received",
    "on_headers_complete",
    "on_response_complete",
    "timeout_keep_alive_handler",
)


def http_protocol() -> Any:
    """Our own way to speak HTTP where uvicorn is made as we know it (0.38 to 0.54), else uvicorn's."""
    if HttpToolsProtocol is None:
        missing = ["uvicorn.protocols.http.httptools_impl"]
    else:
        missing = sorted(
            {*(_OF_PROTOCOL - _set_by(HttpToolsProtocol)), *(_OF_CYCLE - _set_by(RequestResponseCycle))}
            | {name for name in _METHODS if not hasattr(HttpToolsProtocol, name)}
        )
    if not missing:
        return HttpProtocol
    logger.warning(
        "uvicorn %s lacks what whole answers are sent with (%s): it sends them in its own way, which takes more CPU",
        uvicorn.__version__,
        ", ".join(missing),
    )
    return "auto"


def _set_by(made: type) -> frozenset[str]:
    """The attributes that the constructor of a class sets."""
    return frozenset(made.__init__.__code__.co_names)  # type: ignore[misc]


class _HeadWithBody:
    """The connection as the answer to one request sees it: its head waits for the body, and goes out together with it.

    That is one write instead of two for nearly every answer. Where no length is announced, the head goes first.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: "RequestResponseCycle", transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """Keep the head; send it with whatever follows, and be out of the way from then on."""
        cycle = self._cycle
        if not self._head and cycle.response_started:
            if cycle.chunked_encoding is False and cycle.scope["method"] != "HEAD":
                self._head = data
                return
            cycle.transport = self._transport
        elif self._head:
            self._flush(data)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Send what there is, and close."""
        if self._head:
            self._flush(b"")
        self._transport.close()

    def _flush(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        head, self._head = self._head, b""
        _write(self._transport, head, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _write(transport: asyncio.Transport, head: bytes, body: bytes) -> None:
    if len(body) < _COPIED_UP_TO_BYTES:
        transport.write(head + body)
    else:
        transport.writelines((head, body))


if HttpToolsProtocol is not None:

    class HttpProtocol(HttpToolsProtocol):
        """Uvicorn's HTTP, with one write per answer; to servers, the `Caller` of what comes over a connection."""

        when_gone: Callable[[], object] | None = None
        _idle_since_s: float | None = None

        def _unset_keepalive_if_required(self) -> None:
            self._idle_since_s = None  # the timer goes on: to stop and start one takes longer than the rest of this

        def on_response_complete(self) -> None:
            """Uvicorn: an answer is out; a connection on which nothing follows for too long is closed."""
            if self.pipeline or self.transport.is_closing():
                super().on_response_complete()
                return
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self._idle_since_s = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._look_again_in(self.timeout_keep_alive)

        def timeout_keep_alive_handler(self) -> None:
            """Uvicorn: the timer of the connection has ended."""
            self.timeout_keep_alive_task = None
            if self._idle_since_s is None:
                self._look_again_in(self.timeout_keep_alive)
                return
            idle_s = self.loop.time() - self._idle_since_s
            if idle_s < self.timeout_keep_alive:
                self._look_again_in(self.timeout_keep_alive - idle_s)
            else:
                super().timeout_keep_alive_handler()

        def _look_again_in(self, wait_s: float) -> None:
            self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)

        def data_received(self, data: bytes) -> None:
            """Asyncio: some bytes; if a long body begins with them, its rest need not come in pieces."""
            super().data_received(data)
            cycle = self.cycle
            if cycle is not None and cycle.more_body and cycle.body and not self.pipeline:
                length = _announced_length(cycle)
                if _LONG_BODY_BYTES <= length <= LONGEST_AT_ONCE_BYTES:
                    cycle.receive = _WholeBody(self, cycle, length)  # type: ignore[method-assign]

        def read_on(self, beginning: bytearray, length: int) -> "asyncio.Future[bytes | None]":
            """All of a body; None when its caller goes before it is there."""
            whole: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

            def end(body: bytes, is_complete: bool) -> None:
                if not whole.done():
                    whole.set_result(body if is_complete else None)

            self.parser = httptools.HttpRequestParser(self)  # which has seen nothing of this request
            if hasattr(self.parser, "set_dangerous_leniencies"):
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            LongBody(self, self.transport, length, beginning, end)
            self.flow.resume_reading()
            return whole

        def on_headers_complete(self) -> None:
            """Parser: there is a request, whose task does not run before this has returned."""
            super().on_headers_complete()
            cycle = self.cycle
            if cycle is not None and cycle.scope is self.scope:
                scope: Any = self.scope
                scope[CALLER] = self
                if not self.parser.should_keep_alive():  # uvicorn up to 0.52 finds that out when it sends the answer
                    cycle.keep_alive = False
                cycle.transport = cast(asyncio.Transport, _HeadWithBody(cycle, self.transport))

        def connection_lost(self, exc: Exception | None) -> None:
            """Asyncio: the connection is gone; whoever works for its caller is told."""
            super().connection_lost(exc)
            if self.timeout_keep_alive_task is not None:
                self.timeout_keep_alive_task.cancel()
                self.timeout_keep_alive_task = None
            if self.when_gone is not None and self.cycle.disconnected:
                self.when_gone()

        def whole_body(self, scope: Any) -> bytes | None:
            """The body of a request, if all of it has come and nobody has read any: what `receive` would say first."""
            cycle = self.cycle
            if cycle.scope is not scope or cycle.more_body or cycle.disconnected or cycle.response_complete:
                return None
            if cycle.waiting_for_100_continue or not cycle.message_event.is_set():
                return None
            self.flow.resume_reading()
            cycle.message_event.clear()
            body, cycle.body = bytes(cycle.body), bytearray()
            return body

        def take(self, answer: Answer) -> bool:
            """Send a whole answer as uvicorn would, without looking at every part of it."""
            cycle = self.cycle
            status, headers, body, _ = answer
            is_usual = cycle.keep_alive and not (cycle.response_started or cycle.disconnected or cycle.access_log)
            if not is_usual or self.pipeline or self.flow.write_paused or cycle.scope["method"] != "POST":
                return False
            head = _head(status, headers, len(body))
            if head is None or cycle.default_headers:
                return False
            cycle.transport = self.transport
            cycle.response_started = cycle.response_complete = True
            cycle.waiting_for_100_continue = cycle.chunked_encoding = False
            _write(self.transport, head, body)
            cycle.message_event.set()
            cycle.on_response()
            return True


class _WholeBody:
    """The `receive` of a request whose long body has begun to come: who asks for it gets it in one piece.

    Nothing more of it is read before, so that nobody has to keep what nobody wants.
    """

    def __init__(self, protocol: "HttpProtocol", cycle: "RequestResponseCycle", length: int) -> None:
        self._protocol, self._cycle, self._length = protocol, cycle, length

    async def __call__(self) -> Any:
        cycle = self._cycle
        vars(cycle).pop("receive", None)  # or else the two keep each other, and what the request has
        if cycle.more_body and cycle.body and not (cycle.disconnected or cycle.response_complete):
            beginning, cycle.body = cycle.body, bytearray()
            whole = await self._protocol.read_on(beginning, self._length)
            cycle.more_body = False
            if whole is not None and not cycle.response_complete:
                cycle.message_event.clear()
                return {"type": "http.request", "body": whole, "more_body": False}
        return await RequestResponseCycle.receive(cycle)


def _announced_length(cycle: "RequestResponseCycle") -> int:
    """How long the body of a request is; 0 where only the parser can tell."""
    headers = dict(cycle.scope["headers"])
    length = headers.get(b"content-length", b"")
    is_plain = b"transfer-encoding" not in headers and b"upgrade" not in headers and length.isdigit()
    return int(length) if is_plain and not cycle.waiting_for_100_continue else 0


def _head(status: int, headers: RawHeaders, length: int) -> bytes | None:
    """The head of a whole answer, if it is one of ours; others are for uvicorn to judge."""
    if status not in STATUS_LINE or headers[0] != (b"content-length", b"%d" % length) or length > _AT_ONCE_BYTES:
        return None
    lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in headers], b"\r\n"]
    for name, _ in headers[1:]:
        if name in _FRAMING or not name.islower():
            return None
    head = b"".join(lines)
    return head if head.count(b"\n") == head.count(b"\r") == len(lines) and b"\0" not in head else None
