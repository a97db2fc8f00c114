"""HTTP/1.1 over bare connections: a whole request out, a whole answer back.

This is what nearly all calls of a run are, and it costs a quarter of what a general client needs for it. It knows
plain HTTP to addresses that need no resolving; everything else (TLS, host names, redirects, streams, HEAD) is
aiohttp's. Errors are those of aiohttp.
"""

import asyncio
import socket
import zlib
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, NamedTuple, cast

import aiohttp
from yarl import URL

from nemo_gym.http.addresses import Address
from nemo_gym.http.local_request import LocalRequest
from nemo_gym.http.local_response import LocalResponse, RawHeaders

try:
    import httptools
except ImportError:  # then aiohttp makes every call
    httptools = None  # type: ignore[assignment]

KEEPALIVE_TIMEOUT_S = 15.0
"""How long an idle connection is kept: long before servers of ours close it."""

_LOCALHOST = ("127.0.0.1", "::1")
_COPIED_UP_TO_BYTES = 64 * 1024
_COMPRESSED = {b"gzip", b"x-gzip", b"deflate"}


class CannotConnectError(aiohttp.ClientOSError):
    """No connection could be opened, so nothing was sent."""


class Target(NamedTuple):
    """Where a URL leads, if it can be reached over a bare connection."""

    address: Address
    origin: str
    path: str


@lru_cache(4096)
def target_of(url: str) -> Target | None:
    """The target of a URL; None if it takes more than a bare connection."""
    try:
        parsed = URL(url)
        host = parsed.raw_host or ""
        if host != "localhost":
            ip_address(host)
    except ValueError:
        return None
    if httptools is None or parsed.scheme != "http" or parsed.raw_user is not None or parsed.port is None:
        return None
    path = url.partition("://")[2].partition("/")[2].partition("#")[0]
    return Target(Address(host, parsed.port), str(parsed.origin()), f"/{path}")


class WirePool:
    """The bare connections of one event loop, kept open between calls."""

    def __init__(
        self, limit: int, limit_per_host: int, connect_timeout_s: float, new_socket: Callable[[Any], socket.socket]
    ) -> None:
        """`limit` and `limit_per_host` are connections in all and to one address; 0 is no limit."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._limit_per_host = limit_per_host
        self._connect_timeout_s = connect_timeout_s
        self._new_socket = new_socket
        self._idle: dict[Address, list[_Connection]] = {}
        self._open: Counter[Address] = Counter()
        self._busy: set[_Connection] = set()
        self._waiting: dict[Address | None, deque[asyncio.Future[None]]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def ensure_capacity(self, connections: int) -> None:
        """Raise the limits, where there are any, so that one server may be sent that many calls at once."""
        if self._limit_per_host:
            self._limit_per_host = max(self._limit_per_host, connections)
        if self._limit:
            self._limit = max(self._limit, connections)

    async def exchange(self, target: Target, request: LocalRequest, timeout_s: float) -> LocalResponse:
        """Send a request and return the whole answer, whatever its status.

        Raises:
            CannotConnectError, aiohttp.ConnectionTimeoutError: nothing was sent.
            aiohttp.ClientConnectionError: the connection broke before the answer began.
            TimeoutError: no complete answer within `timeout_s`.
        """
        message = _message(request)
        connection = self._take_idle(target.address)
        if connection is None:
            async with asyncio.timeout(timeout_s):
                connection = await self._opened(target.address)
        self._busy.add(connection)
        answered = connection.send(message)
        timer = self._loop.call_later(timeout_s, _give_up, answered)
        try:
            await answered
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()
            self._busy.discard(connection)
            self._give_back(connection)
        return connection.answer_to(request)

    def close(self) -> None:
        """Close every connection; calls under way break."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._busy, *(each for idle in self._idle.values() for each in idle)]:
            connection.close()
        self._idle.clear()

    def _take_idle(self, address: Address) -> "_Connection | None":
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.is_open and self._loop.time() - connection.idle_since_s < KEEPALIVE_TIMEOUT_S:
                return connection
            connection.close()
        return None

    async def _opened(self, address: Address) -> "_Connection":
        """A connection that is free, or a new one as soon as the limits allow it."""
        while True:
            connection = self._take_idle(address)
            if connection is not None:
                return connection
            if self._limit_per_host and self._open[address] >= self._limit_per_host:
                await self._turn(address)
            elif self._limit and self._open.total() >= self._limit and not self._close_an_idle_one():
                await self._turn(None)
            else:
                return await self._connect(address)

    async def _turn(self, address: Address | None) -> None:
        """Wait until a connection to `address`, or any if it is None, is free or gone."""
        turn: asyncio.Future[None] = self._loop.create_future()
        queue = self._waiting.setdefault(address, deque())
        queue.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._let_next(address)  # it was our turn, and we are gone
            raise

    def _let_next(self, address: Address | None) -> None:
        for queue in (self._waiting.get(None), self._waiting.get(address)):
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break

    def _close_an_idle_one(self) -> bool:
        for idle in self._idle.values():
            if idle:
                idle.pop(0).close()
                return True
        return False

    async def _connect(self, address: Address) -> "_Connection":
        self._open[address] += 1
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._connected(address)
                return connection
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {address.host}:{address.port}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotConnectError(
                error.errno, f"Cannot connect to host {address.host}:{address.port} [{reason}]"
            ) from error
        finally:
            if connection is None:
                self._gone(address)

    async def _connected(self, address: Address) -> "_Connection":
        hosts = _LOCALHOST if address.host == "localhost" else (address.host,)
        for number, host in enumerate(hosts, 1):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = self._new_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, address.port)))
            try:
                made.setblocking(False)
                await self._loop.sock_connect(made, (host, address.port))
                _, connection = await self._loop.create_connection(lambda: _Connection(address, self._gone), sock=made)
            except BaseException as error:
                made.close()
                if number < len(hosts) and isinstance(error, ConnectionRefusedError):
                    continue
                raise
            return connection
        raise AssertionError("there is always a host to try")

    def _give_back(self, connection: "_Connection") -> None:
        if not connection.is_open:
            return
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.address, []).append(connection)
        if self._waiting:
            self._let_next(connection.address)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEPALIVE_TIMEOUT_S, self._close_old)

    def _close_old(self) -> None:
        self._sweep = None
        oldest_s = self._loop.time() - KEEPALIVE_TIMEOUT_S
        for address, idle in list(self._idle.items()):
            kept = [each for each in idle if each.is_open and each.idle_since_s > oldest_s]
            for connection in set(idle).difference(kept):
                connection.close()
            if kept:
                self._idle[address] = kept
                self._sweep = self._sweep or self._loop.call_later(KEEPALIVE_TIMEOUT_S, self._close_old)
            else:
                del self._idle[address]

    def _gone(self, address: Address) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
        self._let_next(address)


class _Connection(asyncio.Protocol):
    """One connection; requests on it follow one another."""

    __slots__ = (
        "_chunks",
        "_future",
        "_gone",
        "_headers",
        "_parser",
        "_status",
        "_transport",
        "address",
        "idle_since_s",
        "is_open",
    )

    def __init__(self, address: Address, gone: Callable[[Address], None]) -> None:
        self.address = address
        self.is_open = True
        self.idle_since_s = 0.0
        self._gone = gone
        self._parser = httptools.HttpResponseParser(self)
        self._future: asyncio.Future[bool] | None = None
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: RawHeaders = []
        self._chunks: list[bytes] = []

    def send(self, message: tuple[bytes, bytes]) -> "asyncio.Future[bool]":
        """Send a request; the future says whether its answer, once it has ended, is complete."""
        self._reset()
        self._future = asyncio.get_running_loop().create_future()
        head, body = message
        if len(body) > _COPIED_UP_TO_BYTES:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)
        return self._future

    def answer_to(self, request: LocalRequest) -> LocalResponse:
        """The answer that has come."""
        assert self._future is not None
        is_complete = self._future.result()
        chunks, headers = self._chunks, self._headers
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        for name, value in headers:
            if name == b"content-encoding" and value.lower() in _COMPRESSED:
                body, is_complete = _decompressed(body, is_complete)
        self._future = None
        return LocalResponse(
            request.method,
            request.url,
            self._status,
            headers,
            body,
            broken=not is_complete,
            sent_headers=request.headers,
        )

    def close(self) -> None:
        """Close the connection at once; what has not been sent is dropped."""
        self.is_open = False
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._future is None:  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(aiohttp.ServerDisconnectedError(f"The answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._status and not error and self._ends_with_connection():
            self._end(None)
        elif self._status >= 200:
            self._end(None, is_complete=False)
        elif isinstance(error, OSError):
            self._end(aiohttp.ClientOSError(*error.args))
        else:
            self._end(aiohttp.ServerDisconnectedError())
        self._gone(self.address)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        if self._status < 200:  # an interim answer: the real one follows
            self._reset()
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _ends_with_connection(self) -> bool:
        """Whether the answer said nothing about its length, so that the end of the connection is its end."""
        names = {name for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _end(self, error: Exception | None, *, is_complete: bool = True) -> None:
        future = self._future
        if future is None or future.done():
            return
        if error is None:
            future.set_result(is_complete)
        else:
            future.set_exception(error)


def _give_up(answered: "asyncio.Future[bool]") -> None:
    if not answered.done():
        answered.set_exception(TimeoutError())


def _message(request: LocalRequest) -> tuple[bytes, bytes]:
    """Head and body as they go out."""
    target = b"%b?%b" % (request.raw_path, request.query) if request.query else request.raw_path
    lines = [b"%b: %b\r\n" % header for header in request.headers]
    head = b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode("ascii"), target, b"".join(lines))
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2 or b"\0" in head:
        raise ValueError(f"a header of {request.method} {request.path} holds a line break or a null")
    return head, request.body


def _decompressed(body: bytes, is_complete: bool) -> tuple[bytes, bool]:
    """What a server compressed although nobody asked it to."""
    any_kind = zlib.MAX_WBITS | 32
    for kind in (any_kind, -zlib.MAX_WBITS):  # some call raw data "deflate"
        reader = zlib.decompressobj(kind)
        try:
            return reader.decompress(body), is_complete and reader.eof
        except zlib.error:
            continue
    return b"", False
