"""aiohttp: the transport that can do everything, for whatever the others cannot.

Its connections show a run's token to no stranger, its answers are bounded, and its habit of repeating GET, PUT and
DELETE after a disconnect is switched off: see `nemo_gym.http.session`, where the session of an event loop is kept.
"""

from functools import lru_cache
from io import BytesIO
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import orjson
from aiohttp import ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from multidict import CIMultiDict
from yarl import URL

from nemo_gym.config.secrets import unproven
from nemo_gym.http.addresses import TOKENS_TO_PROVE, Address, base_url, require_proof
from nemo_gym.http.errors import AnswerTooLargeError, UnprovenServerError, not_http
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.http.transports.base import (
    KEEPALIVE_TIMEOUT_S,
    MAX_HEAD_BYTES,
    LocalRequest,
    socket_factory,
    workers_share,
)

_READ_BUFFER_BYTES = 1024 * 1024


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


class SessionTransport:
    """One event loop's aiohttp session."""

    def __init__(self, client: ClientSession, connector: GymConnector, connect_timeout_s: float) -> None:
        self.client = client
        self._connector = connector
        self._connect_timeout_s = connect_timeout_s

    async def exchange(self, request: LocalRequest, timeout_s: float) -> ClientResponse:
        """Send a request and return the answer as soon as it has begun; see `Transport`."""
        headers = CIMultiDict((name.decode(), value.decode()) for name, value in request.headers)
        timeout = ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        url = URL(request.url, encoded=True)
        return await over_aiohttp(
            self.client, request.method, url, {"headers": headers, "data": request.body or None, "timeout": timeout}
        )

    def ensure_capacity(self, connections: int) -> None:
        """Raise the limits, where there are any, so that one server may be sent that many calls at once."""
        self._connector.ensure_capacity(connections)

    async def aclose(self) -> None:
        """Close the session and every connection."""
        await self.client.close()


async def over_aiohttp(client: ClientSession, method: str, url: str | URL, kwargs: dict[str, Any]) -> ClientResponse:
    """Send what only aiohttp can: its own keyword arguments, whatever they are; redirects are not followed."""
    try:
        return await client.request(method=method, url=url, **{**kwargs, "allow_redirects": False})
    except aiohttp.ClientResponseError as error:
        foreign = not_http(error)
        if foreign is None:
            raise
        raise foreign from error


def open_transport(settings: GlobalAIOHTTPAsyncClientConfig) -> SessionTransport:
    """A session for the running event loop."""
    connector = GymConnector(
        limit=workers_share(settings.global_aiohttp_connector_limit),
        limit_per_host=workers_share(settings.global_aiohttp_connector_limit_per_host),
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        socket_factory=socket_factory(settings),
    )
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
    return SessionTransport(client, connector, settings.http_connect_timeout_s)


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
