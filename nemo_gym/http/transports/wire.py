"""HTTP/1.1 over bare connections: a whole request out, a whole answer back.

This is what nearly all calls of a run are, and it costs a quarter of what a general client needs for it. Names are
resolved, the addresses of one tried and certificates checked just as aiohttp does it; everything else (streams, HEAD,
proxies, settings of TLS) is aiohttp's. Errors are those of aiohttp.
"""

import asyncio
import errno
import math
import os
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import aiohappyeyeballs
import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.client_reqrep import ConnectionKey

from nemo_gym.http.addresses import TOKENS_TO_PROVE, Address, Challenge, TlsAddress
from nemo_gym.http.errors import CannotConnectError, NotHttpAnswerError, UnprovenServerError
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.http.transports.base import (
    KEEPALIVE_TIMEOUT_S,
    LocalRequest,
    is_bare,
    message_of,
    socket_factory,
    workers_share,
)
from nemo_gym.http.transports.response import LocalResponse
from nemo_gym.http.transports.wire_connection import Answer, Connection, httptools

Place = Address | TlsAddress

_LOCALHOST = ("127.0.0.1", "::1")
_NAMES_KNOWN_FOR_S = 10.0
_MOST_NAMES = 1000
_NEXT_ADDRESS_AFTER_S = 0.25


class WirePool:
    """The bare connections of one event loop, kept open between calls.

    Calls beyond the limits wait, those to one address in the order in which they came. Whoever has waited is handed
    a connection rather than told to look for one: calls that begin just then cannot take it away. The queues are
    looked at whenever a connection becomes free or is gone, and nobody waits unless there is one that will be.
    """

    def __init__(
        self,
        limit: int,
        limit_per_host: int,
        opener: "Opener",
        max_response_bytes: int,
    ) -> None:
        """`limit` and `limit_per_host` are connections in all and to one address; 0 is no limit."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._limit_per_host = limit_per_host
        self._opener = opener
        self._max_response_bytes = max_response_bytes
        self._connections: set[Connection] = set()
        self._open: Counter[Place] = Counter()
        self._idle: dict[Place, list[Connection]] = {}
        self._waiting: dict[Place, deque[asyncio.Future[Connection]]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._deadlines: dict[asyncio.Future[Answer], float] = {}
        self._next_deadline_s = math.inf
        self._deadline: asyncio.TimerHandle | None = None
        """One for all answers: most of them come long before, and a timer of its own for each costs more than that."""
        self._is_closed = False

    def ensure_capacity(self, connections: int) -> None:
        """Raise the limits, where there are any, so that one server may be sent that many calls at once."""
        if self._limit_per_host:
            self._limit_per_host = max(self._limit_per_host, connections)
        if self._limit:
            self._limit = max(self._limit, connections)

    async def exchange(self, request: LocalRequest, timeout_s: float) -> LocalResponse:
        """Send a request and return the whole answer, whatever its status.

        Raises:
            CannotConnectError, aiohttp.ConnectionTimeoutError: nothing was sent.
            UnprovenServerError: nothing was sent: it would show the run's token to somebody who does not know it.
            aiohttp.ClientConnectionError: the connection broke before the answer began.
            NotHttpAnswerError: what came back is not HTTP.
            AnswerTooLargeError: more came back than is allowed.
            TimeoutError: no complete answer within `timeout_s`.
            ValueError: the request cannot be sent as one.
        """
        address = request.address
        assert address is not None
        if request.head is None:
            message = message_of(request)
        else:
            message = (request.head, *request.pieces) if request.pieces else (request.head, request.body)
        token = None
        for name, value in request.headers if TOKENS_TO_PROVE else ():
            if name == b"authorization" and value in TOKENS_TO_PROVE:
                token = TOKENS_TO_PROVE[value]
        now_s = self._loop.time()
        deadline_s = now_s + timeout_s
        connection = self._take_idle(address, now_s)
        if connection is None:
            async with asyncio.timeout_at(deadline_s):
                connection = await self._free_one(address)
        if token is not None and connection.proven_for != token:
            await self._have_it_prove(connection, token, deadline_s)
        answered = connection.send(message)
        self._deadlines[answered] = deadline_s
        if deadline_s < self._next_deadline_s:
            self._await_deadline(deadline_s)
        try:
            answer = await answered
            body, is_complete = answer.body(self._max_response_bytes)
            if not is_complete:
                connection.close()
        except BaseException:
            connection.close()
            raise
        finally:
            del self._deadlines[answered]
            self._give_back(connection)
        return LocalResponse(
            request.method,
            request.url,
            answer.status,
            answer.headers,
            body,
            broken=not is_complete,
            sent_headers=request.headers,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        self.close()
        await self._opener.names.aclose()

    def close(self) -> None:
        """Close every connection; calls under way break, and those that wait for one give up."""
        self._is_closed = True
        for timer in (self._sweep, self._deadline):
            if timer is not None:
                timer.cancel()
        for connection in self._connections:
            connection.close()
        self._idle.clear()
        for turn in [turn for queue in self._waiting.values() for turn in queue if not turn.done()]:
            turn.set_exception(_closed())
        self._waiting.clear()

    def _take_idle(self, address: Place, now_s: float) -> Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.is_open and now_s - connection.idle_since_s < KEEPALIVE_TIMEOUT_S:
                return connection
            connection.close()
        return None

    async def _free_one(self, address: Place) -> Connection:
        """A connection that nobody uses, as soon as the limits allow it."""
        while True:
            connection = self._granted(address) or await self._turn(address)
            if connection.transport is None:
                await self._open_up(connection)
                return connection
            if connection.is_open:  # it may have broken on the way here
                return connection

    def _granted(self, address: Place) -> Connection | None:
        """A connection within the limits: an idle one or one yet to be opened."""
        connection = self._take_idle(address, self._loop.time())
        if connection is not None:
            return connection
        if self._limit_per_host and self._open[address] >= self._limit_per_host:
            return None
        if self._limit and len(self._connections) >= self._limit and not self._close_an_idle_one():
            return None
        connection = Connection(address, self._gone, self._max_response_bytes)
        self._connections.add(connection)
        self._open[address] += 1
        return connection

    def _close_an_idle_one(self) -> bool:
        for idle in self._idle.values():
            while idle:
                connection = idle.pop(0)
                if connection.is_open:
                    connection.close()
                    return True
        return False

    async def _turn(self, address: Place) -> Connection:
        turn: asyncio.Future[Connection] = self._loop.create_future()
        self._waiting.setdefault(address, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result())
            raise

    def _let_next(self) -> None:
        """Hand out what has become free; an address that got something is the last to be asked next time."""
        for address, queue in list(self._waiting.items()):
            while queue:
                connection = None if queue[0].done() else self._granted(address)
                if connection is None and not queue[0].done():
                    break
                turn = queue.popleft()
                if connection is not None:
                    turn.set_result(connection)
                    self._waiting[address] = self._waiting.pop(address)
            if not queue:
                del self._waiting[address]

    async def _open_up(self, connection: Connection) -> None:
        try:
            await self._opener.open(connection)
            if self._is_closed:
                raise _closed()
            if connection.said_first and not connection.said_first.startswith(b"HTTP/"):
                raise NotHttpAnswerError.of("it speaks before it is asked", connection.said_first)
            if not connection.is_open:
                raise ConnectionResetError(errno.ECONNRESET, "closed as soon as it was open")
        except BaseException as error:
            connection.close()
            self._gone(connection)
            if isinstance(error, OSError) and not isinstance(error, aiohttp.ClientError):
                raise _not_opened(connection.address, error) from error
            raise

    def _await_deadline(self, deadline_s: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._next_deadline_s = deadline_s
        self._deadline = self._loop.call_at(deadline_s, self._give_up_late)

    def _give_up_late(self) -> None:
        """No more waiting for answers whose time is over; the next to be looked at is the earliest of the others."""
        now_s = self._loop.time()
        self._next_deadline_s, self._deadline = math.inf, None
        for answered, deadline_s in self._deadlines.items():
            if deadline_s > now_s:
                self._next_deadline_s = min(self._next_deadline_s, deadline_s)
            elif not answered.done():
                answered.set_exception(TimeoutError())
        if self._next_deadline_s < math.inf:
            self._await_deadline(self._next_deadline_s)

    async def _have_it_prove(self, connection: Connection, token: str, deadline_s: float) -> None:
        """Make sure that who is at the other end knows the run's token; it is asked once per connection."""
        challenge = Challenge(connection.address, token)
        try:
            async with asyncio.timeout_at(deadline_s):
                answer = await connection.send(challenge.message())
            challenge.check(answer.status, answer.body(self._max_response_bytes)[0], is_open=connection.is_open)
        except BaseException as error:
            connection.close()
            self._give_back(connection)
            if isinstance(error, aiohttp.ClientConnectionError) and not isinstance(error, UnprovenServerError):
                raise challenge.failed(str(error) or "it hangs up") from error
            raise
        connection.proven_for = token

    def _give_back(self, connection: Connection) -> None:
        if not connection.is_open:
            if connection.transport is None:  # it was never opened
                self._gone(connection)
            return
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.address, []).append(connection)
        if self._waiting:
            self._let_next()
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

    def _gone(self, connection: Connection) -> None:
        """Count a connection no more. Told twice of one whose opening was broken off halfway."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]
        if self._waiting:
            self._let_next()


class Names:
    """The addresses of host names, each remembered for a while.

    Asking is the system's affair, which has no word about how long an answer holds: that is ten seconds, as for
    aiohttp. Whoever wants a name that is being asked for waits for the same answer. Each gets the addresses from
    another one on, so that connections spread over all of them.
    """

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver
        self._known: dict[Place, tuple[float, deque[aiohttp.AddrInfoType]]] = {}
        self._asked: dict[Place, asyncio.Task[deque[aiohttp.AddrInfoType]]] = {}

    async def addresses_of(self, place: Place) -> list[aiohttp.AddrInfoType]:
        """Where to connect to, the address to prefer first.

        Raises:
            OSError: there is no such name, or nobody to ask.
        """
        if is_bare(place.host):
            hosts = _LOCALHOST if place.host == "localhost" else (place.host,)
            return [_as_info(host, place.port) for host in hosts]
        until_s, found = self._known.get(place, (0.0, deque()))
        if until_s < asyncio.get_running_loop().time():
            if place not in self._asked:
                self._asked[place] = asyncio.create_task(self._ask(place))
                self._asked[place].add_done_callback(lambda asked: asked.cancelled() or asked.exception())
            found = await asyncio.shield(self._asked[place])  # it goes on for the others if one gives up
        addresses = list(found)
        found.rotate(-1)
        return addresses

    async def _ask(self, place: Place) -> deque[aiohttp.AddrInfoType]:
        try:
            answers = await self._resolver.resolve(place.host, place.port, socket.AF_UNSPEC)
            if not answers:
                raise socket.gaierror(socket.EAI_NONAME, "No address for this name")
        finally:
            del self._asked[place]
        until_s = asyncio.get_running_loop().time() + _NAMES_KNOWN_FOR_S
        found = deque(_as_info(each["host"], each["port"]) for each in answers)
        self._known.pop(place, None)
        self._known[place] = until_s, found
        if len(self._known) > _MOST_NAMES:
            del self._known[next(iter(self._known))]
        return found

    async def aclose(self) -> None:
        """Ask for nothing any more."""
        for asked in self._asked.values():
            asked.cancel()
        await self._resolver.close()


class Opener:
    """Opens connections to wherever, one at a time and each within a bound."""

    def __init__(self, timeout_s: float, new_socket: Callable[[Any], socket.socket], names: Names) -> None:
        """`timeout_s` is for asking for a name, and for each address whose server takes up the connection."""
        self._timeout_s = timeout_s
        self._new_socket = new_socket
        self.names = names

    async def open(self, connection: Connection) -> None:
        """Open a connection to the first address that answers, and of these to the first that speaks TLS if it should.

        Raises:
            aiohttp.ClientConnectorDNSError: the name has no address.
            OSError: no address answers, or none in time (`TimeoutError`), or none as it should (`ssl.SSLError`).
        """
        addresses, failure = await self._addresses_of(connection.address), None
        while addresses:
            made = tried = None
            try:
                async with asyncio.timeout(self._timeout_s):
                    made = await aiohappyeyeballs.start_connection(
                        addresses, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_S, socket_factory=self._new_socket
                    )
                    tried = made.getpeername()
                    await _begin(connection, made)
            except BaseException as error:
                if made is not None:
                    made.close()
                if not isinstance(error, OSError):
                    raise
                failure = failure or error
                others = [address for address in addresses if address[4] != tried]
                if len(others) == len(addresses) or connection.transport is not None:
                    break
                addresses = others
            else:
                return
        assert failure is not None
        raise failure

    async def _addresses_of(self, place: Place) -> list[aiohttp.AddrInfoType]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.names.addresses_of(place)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise aiohttp.ClientConnectorDNSError(_key(place), error) from error


class _BeforeTls(asyncio.Protocol):
    """A connection until its TLS begins; servers that speak TLS say nothing on it."""

    has_spoken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).pause_reading()  # which uvloop may forget

    def data_received(self, data: bytes) -> None:
        self.has_spoken = True


async def _begin(connection: Connection, made: socket.socket) -> None:
    loop, place = asyncio.get_running_loop(), connection.address
    if not isinstance(place, TlsAddress):
        await loop.create_connection(lambda: connection, sock=made)
        return
    line, before = await loop.create_connection(_BeforeTls, sock=made)
    try:
        if before.has_spoken:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "it speaks before a handshake")
        if line.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, "closed as soon as it was open")
        transport = await loop.start_tls(line, connection, _tls(), server_hostname=place.host)
    except BaseException:
        line.abort()
        raise
    assert transport is not None
    connection.take(transport, line)


@lru_cache
def _tls() -> ssl.SSLContext:
    """What aiohttp takes for calls that say nothing about TLS; made with the first of them, which takes 20 ms."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _as_info(host: str, port: int) -> aiohttp.AddrInfoType:
    if ":" in host:
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)


def _key(place: Place) -> ConnectionKey:
    """A place as aiohttp's errors name it."""
    is_tls = isinstance(place, TlsAddress)
    return ConnectionKey(place.host, place.port, is_tls, ssl=True, proxy=None, proxy_auth=None, proxy_headers_hash=None)


def _not_opened(place: Place, error: OSError) -> aiohttp.ClientError:
    """What aiohttp calls the reason for which there is no connection."""
    if isinstance(error, TimeoutError):
        return aiohttp.ConnectionTimeoutError(f"Connection timeout to host {place.host}:{place.port}")
    if isinstance(error, ssl.CertificateError):
        return aiohttp.ClientConnectorCertificateError(_key(place), error)
    if isinstance(error, ssl.SSLError):
        return aiohttp.ClientConnectorSSLError(_key(place), error)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return CannotConnectError(error.errno, f"Cannot connect to host {place.host}:{place.port} [{reason}]")


def _closed() -> CannotConnectError:
    return CannotConnectError(errno.ECANCELED, "The HTTP client was closed before a connection was free")


def open_transport(settings: GlobalAIOHTTPAsyncClientConfig) -> WirePool | None:
    """Bare connections for the running event loop; None where there is no parser."""
    if httptools is None:
        return None
    names = Names(aiohttp.DefaultResolver())
    return WirePool(
        workers_share(settings.global_aiohttp_connector_limit),
        workers_share(settings.global_aiohttp_connector_limit_per_host),
        Opener(settings.http_connect_timeout_s, socket_factory(settings), names),
        settings.max_response_bytes,
    )
