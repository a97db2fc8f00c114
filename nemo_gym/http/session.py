"""The HTTP client: one aiohttp session per event loop.

Its connections show a run's token to no stranger, and its answers are bounded.

There is one session per event loop, made on first use, closed with its loop. Threads with loops of their own and a
second `asyncio.run` therefore each get theirs, with the settings of the process.

Stale connections. A server may close an idle connection at the very moment a request is written to
it; the client then sees a disconnect and cannot know whether the request was carried out. Trying
again could run a tool twice, so it is not done: idle connections are dropped here after
`KEEPALIVE_TIMEOUT_S`, long before our servers drop them (300 s: both sides may lag behind by minutes
when thousands of calls are under way, and clocks count from when each got round to it), and aiohttp's own habit of
repeating GET, PUT and DELETE after a disconnect is switched off.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import orjson
from aiohttp import AddrInfoType, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from multidict import CIMultiDict
from yarl import URL

from nemo_gym.config.secrets import unproven
from nemo_gym.http.addresses import TOKENS_TO_PROVE, Address, base_url, require_proof
from nemo_gym.http.errors import AnswerTooLargeError, UnprovenServerError, not_http
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig, replaceable, settings_of_process
from nemo_gym.process_inputs import num_workers

KEEPALIVE_TIMEOUT_S = 15.0
"""How long an idle connection is kept: long before servers of ours close it."""
MAX_HEAD_BYTES = 64 * 1024
"""Of everything in an answer before the body."""
_CLOSE_TIMEOUT_S = 5.0
_READ_BUFFER_BYTES = 1024 * 1024
_SENT_AT_ONCE = 256 * 1024
"""Bytes, or characters of up to four bytes each."""


class GymConnector(TCPConnector):
    """A connection pool whose limits can be raised while it is in use, and which shows a run's token to no stranger."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._proven: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """Who is at the other end of a connection, known by the token that it knows."""

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Any],
        timeout: ClientTimeout,  # noqa: ASYNC109 - aiohttp's own signature
    ) -> aiohttp.connector.Connection:
        """A connection for a request; if that shows the run's token, one to somebody who knows it."""
        connection = await super().connect(req, traces, timeout)
        token = TOKENS_TO_PROVE.get(req.headers.get("Authorization", "").encode())
        if token is None or self._proven.get(connection.protocol) == token:
            return connection
        address = Address(req.url.raw_host or "", req.url.port or 80)
        try:
            await require_proof(address, token)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError) and not isinstance(error, UnprovenServerError | TimeoutError):
                raise UnprovenServerError(unproven(base_url(address), str(error) or type(error).__name__)) from error
            raise
        self._proven[connection.protocol] = token
        return connection

    def ensure_capacity(self, connections: int) -> None:
        """Raise the limits, where there are any, so that one server may be sent that many calls at once."""
        if self._limit_per_host:
            self._limit_per_host = max(self._limit_per_host, connections)
        if self._limit:
            self._limit = max(self._limit, connections)


async def over_aiohttp(client: ClientSession, method: str, url: str | URL, kwargs: dict[str, Any]) -> ClientResponse:
    """Send a request once, with aiohttp's keyword arguments; redirects are not followed."""
    try:
        return await client.request(method=method, url=url, **{**_in_pieces(kwargs), "allow_redirects": False})
    except aiohttp.ClientResponseError as error:
        foreign = not_http(error)
        if foreign is None:
            raise
        raise foreign from error


def _in_pieces(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` with a long body as a file, which is sent in pieces, so that other calls get their turn."""
    data = kwargs.get("data")
    if not isinstance(data, bytes | str) or len(data) <= _SENT_AT_ONCE:
        return kwargs
    headers = CIMultiDict(kwargs.get("headers") or {})
    if isinstance(data, str):
        headers.setdefault("Content-Type", "text/plain; charset=utf-8")
        data = data.encode()
    return {**kwargs, "headers": headers, "data": BytesIO(data)}


def _new_client(settings: GlobalAIOHTTPAsyncClientConfig) -> ClientSession:
    """Return a session for the running event loop."""
    connector = GymConnector(
        limit=workers_share(settings.global_aiohttp_connector_limit),
        limit_per_host=workers_share(settings.global_aiohttp_connector_limit_per_host),
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        socket_factory=socket_factory(settings),
    )
    connector.ensure_capacity(_SESSIONS.min_connections)
    client = ClientSession(
        connector=connector,
        timeout=ClientTimeout(total=settings.http_total_timeout_s, sock_connect=settings.http_connect_timeout_s),
        cookie_jar=DummyCookieJar(),
        json_serialize=lambda value: orjson.dumps(value).decode(),
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        read_bufsize=_READ_BUFFER_BYTES,
        response_class=_response_class(settings.max_response_bytes),
    )
    client._retry_connection = False
    return client


def workers_share(limit: int) -> int:
    """Return this worker's share of a limit; 0, which is no limit, stays 0."""
    workers = max(1, num_workers())
    return max(1, limit // workers) if limit else 0


def socket_factory(settings: GlobalAIOHTTPAsyncClientConfig) -> Callable[[Any], socket.socket]:
    """Return what makes sockets that notice a peer whose machine vanished, where the platform can."""
    wanted = {
        "TCP_KEEPIDLE": settings.global_aiohttp_tcp_keepalive_idle_seconds,
        "TCP_KEEPINTVL": settings.global_aiohttp_tcp_keepalive_interval_seconds,
        "TCP_KEEPCNT": settings.global_aiohttp_tcp_keepalive_probes,
    }
    options = [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]

    def make(address: AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in options:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        return made

    return make


@lru_cache
def _response_class(max_bytes: int) -> type[ClientResponse]:
    """Answers whose bodies are read up to `max_bytes`, unpacked; what is read as a stream is its reader's affair."""

    class BoundedResponse(ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                whole = BytesIO()
                while whole.tell() <= max_bytes and not self.content.at_eof():
                    whole.write(await self._next_piece())
                if whole.tell() > max_bytes:
                    self.close()
                    raise AnswerTooLargeError.than(max_bytes)
                self._body = whole.getvalue()  # which is no copy
            return await super().read()

        async def _next_piece(self) -> bytes:
            try:
                return await self.content.readany()
            except BaseException:
                self.close()
                raise

    return BoundedResponse


@dataclass
class LoopSession:
    """One event loop's session."""

    client: ClientSession
    keeper: AsyncGenerator[None, None]
    """Closes the session when the loop shuts its async generators down, as `asyncio.run` does."""


@dataclass
class _Sessions:
    by_loop: dict[asyncio.AbstractEventLoop, LoopSession] = field(default_factory=dict)
    settings_by_loop: dict[asyncio.AbstractEventLoop, GlobalAIOHTTPAsyncClientConfig] = field(default_factory=dict)
    chosen: GlobalAIOHTTPAsyncClientConfig | None = None
    """What a program chose for all its loops; None means what the config says."""
    min_connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_SESSIONS = _Sessions()


def get_global_aiohttp_client(
    global_aiohttp_client_config: GlobalAIOHTTPAsyncClientConfig | None = None,
) -> ClientSession:
    """The running event loop's session, made now if there is none; call it inside a coroutine."""
    session = _SESSIONS.by_loop.get(asyncio.get_running_loop())
    if session is not None and not session.client.closed:
        return session.client
    return _open_session(global_aiohttp_client_config or current_settings()).client


def set_global_aiohttp_client(cfg: GlobalAIOHTTPAsyncClientConfig) -> ClientSession:
    """Make the running event loop's session with `cfg`, which also holds for loops to come."""
    assert not is_global_aiohttp_client_setup(), (
        "This event loop already has an HTTP session; set its config before the first request is made"
    )
    use_client_settings(cfg)
    return _open_session(cfg).client


def use_client_settings(settings: GlobalAIOHTTPAsyncClientConfig | None) -> None:
    """Use `settings` from now on; None means what this process's config says. Open sessions keep their limits."""
    _SESSIONS.chosen = settings
    _SESSIONS.settings_by_loop.clear()


def is_global_aiohttp_client_setup() -> bool:
    """Whether the running event loop has an open session."""
    loop = _running_loop()
    session = None if loop is None else _SESSIONS.by_loop.get(loop)
    return session is not None and not session.client.closed


def current_settings() -> GlobalAIOHTTPAsyncClientConfig:
    """Return the settings in force; inside an event loop they are read once."""
    loop = _running_loop()
    if loop is None:
        return _SESSIONS.chosen or settings_of_process()
    settings = _SESSIONS.settings_by_loop.get(loop)
    if settings is None:
        _forget_dead_loops()
        settings = _SESSIONS.settings_by_loop[loop] = _SESSIONS.chosen or settings_of_process()
    return settings


def is_global_aiohttp_client_request_debug_enabled() -> bool:
    """Whether error answers are logged with request and body."""
    if replaceable("_GLOBAL_AIOHTTP_CLIENT_REQUEST_DEBUG", default=False):
        return True
    return current_settings().global_aiohttp_client_request_debug


def ensure_connection_capacity(connections: int) -> None:
    """Let that many calls to one server be open at once, in sessions open now and later."""
    _SESSIONS.min_connections = max(_SESSIONS.min_connections, connections)
    for session in list(_SESSIONS.by_loop.values()):
        if isinstance(session.client.connector, GymConnector):
            session.client.connector.ensure_capacity(connections)


async def close_global_aiohttp_client() -> None:
    """Close the running event loop's session in an orderly way; the next request makes a new one."""
    session = _SESSIONS.by_loop.get(asyncio.get_running_loop())
    if session is not None:
        await session.keeper.aclose()


def global_aiohttp_client_exit() -> None:
    """Close the sessions of all event loops, from outside of them, as a program ends."""
    for loop, session in list(_SESSIONS.by_loop.items()):
        if loop.is_closed():
            _forget_dead_loops()
        elif not loop.is_running():
            loop.run_until_complete(session.keeper.aclose())
        elif loop is not _running_loop():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_close(session), loop).result(_CLOSE_TIMEOUT_S)


async def _close(session: LoopSession) -> None:
    await session.keeper.aclose()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _open_session(settings: GlobalAIOHTTPAsyncClientConfig) -> LoopSession:
    loop = asyncio.get_running_loop()
    client = _new_client(settings)
    session = LoopSession(client, _closed_with_its_loop(loop, client))
    # Its first step registers the generator with the loop; there is nothing to wait for in it.
    with contextlib.suppress(StopIteration):
        session.keeper.__anext__().send(None)
    _forget_dead_loops()
    with _SESSIONS.lock:
        _SESSIONS.by_loop[loop] = session
    _SESSIONS.settings_by_loop[loop] = settings
    return session


async def _closed_with_its_loop(loop: asyncio.AbstractEventLoop, client: ClientSession) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        with _SESSIONS.lock:
            if loop in _SESSIONS.by_loop and _SESSIONS.by_loop[loop].client is client:
                del _SESSIONS.by_loop[loop]
        await client.close()


def _forget_dead_loops() -> None:
    """Drop settings and sessions of closed loops, also of those that did not shut their async generators down."""
    with _SESSIONS.lock:
        for loop in [loop for loop in _SESSIONS.settings_by_loop if loop.is_closed()]:
            del _SESSIONS.settings_by_loop[loop]
        dead = [loop for loop in _SESSIONS.by_loop if loop.is_closed()]
        sessions = [_SESSIONS.by_loop.pop(loop) for loop in dead]
    for session in sessions:
        # With its loop closed a session has nothing to wait for: one step closes it.
        with contextlib.suppress(StopIteration):
            session.client.close().__await__().send(None)
