"""Calling a colocated server without a socket: scope and body go straight into its ASGI app.

Routes, middleware, cookies, status codes and error texts are those of HTTP, because it is the same
app that answers. Servers are known by name and address per event loop: the host process registers
those it runs, and `ServerClient` finds them here before it opens a connection.

A caller that vanishes (it is cancelled, or out of patience) takes the work at `CANCELLABLE_PATHS` with
it, and never a tool, `/seed_session` or `/verify`: these are carried out to the end, as they are over
HTTP. The caller goes on when the body of the answer is complete, while the app may still have work to do.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from http.cookies import Morsel, SimpleCookie
from typing import Any

import aiohttp
from aiohttp import ClientTimeout
from multidict import CIMultiDict
from yarl import URL

from nemo_gym.http.addresses import Address
from nemo_gym.http.errors import AnswerTooLargeError
from nemo_gym.http.local_response import LocalResponse, RawHeaders
from nemo_gym.http.session import current_settings
from nemo_gym.keys import MODEL_PATHS
from nemo_gym.rollout_correlation import without_rollout_prefix

logger = logging.getLogger(__name__)

CANCELLABLE_PATHS = frozenset({"/run", *MODEL_PATHS})
"""Paths of work that only its caller needs: it is cancelled when the caller is gone."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMITTED = "nemo_gym.admitted"
"""In the scope of a call that this process makes itself: it needs no token."""
_DISCONNECT = "http.disconnect"
_UNDERSTOOD = frozenset({"data", "headers", "cookies", "params", "timeout", "allow_redirects"})
_FRAMING = ("Content-Length", "Transfer-Encoding")
_TYPE_OF_TEXT = "text/plain; charset=utf-8"
_TYPE_OF_BYTES = "application/octet-stream"
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS", "TRACE")


@dataclass(frozen=True)
class InMemoryRequest:
    """A request as an ASGI server would hand it on."""

    method: str
    url: URL
    headers: RawHeaders
    body: bytes
    timeout_s: float | None = None
    """None: the client's own limit."""


def in_memory_request(method: str, url: str, kwargs: Mapping[str, Any]) -> InMemoryRequest | None:
    """Return the request that aiohttp's keyword arguments describe; None when only aiohttp can make it."""
    if not _UNDERSTOOD.issuperset(kwargs):
        return None
    data = kwargs.get("data")
    if data is not None and not isinstance(data, bytes | str):
        return None
    target = URL(url).extend_query(kwargs.get("params") or {})
    headers = CIMultiDict(kwargs.get("headers") or {})
    for name in _FRAMING:  # where the body ends is not for the caller to say
        headers.popall(name, None)
    if data is not None:
        headers.setdefault("Content-Type", _TYPE_OF_TEXT if isinstance(data, str) else _TYPE_OF_BYTES)
    headers.setdefault("Host", target.authority)
    headers.setdefault("Accept", "*/*")
    if pairs := [*headers.popall("Cookie", ()), *_cookies_for(target.path, kwargs.get("cookies") or {})]:
        headers["Cookie"] = "; ".join(pairs)
    body = data.encode() if isinstance(data, str) else data or b""
    if body or method not in _WITHOUT_BODY:
        headers["Content-Length"] = str(len(body))
    timeout = kwargs.get("timeout")
    timeout_s = timeout.total if isinstance(timeout, ClientTimeout) else timeout
    raw = [(name.lower().encode("ascii"), str(value).encode()) for name, value in headers.items()]
    return InMemoryRequest(method, target, raw, body, timeout_s)


def _cookies_for(path: str, cookies: Any) -> Iterator[str]:
    """Yield `name=value` of each cookie that applies to a path of the server that set it."""
    for name, value in cookies.items() if hasattr(cookies, "items") else cookies:
        if not isinstance(value, Morsel):
            yield f"{name}={SimpleCookie().value_encode(str(value))[1]}"
        elif value["max-age"] != "0" and not value["secure"] and f"{path}/".startswith(f"{value['path'].rstrip('/')}/"):
            yield f"{name}={value.coded_value}"


@dataclass(frozen=True)
class HostedApp:
    """A server in this event loop, and the transport that reaches it."""

    name: str
    app: ASGIApp
    addresses: frozenset[Address]
    """Every address a config may give for it."""
    cancellable_paths: frozenset[str] = CANCELLABLE_PATHS
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the app's lifespan yielded."""

    async def exchange(self, request: InMemoryRequest, timeout_s: float) -> LocalResponse:
        """Answer `request`; the app's exceptions become answers, as they do over HTTP.

        Raises:
            TimeoutError: no complete answer within `timeout_s`.
            aiohttp.ServerDisconnectedError: the server was stopped before it answered.
        """
        exchange = _Exchange(request, current_settings().max_response_bytes)
        task = asyncio.create_task(self._serve(request, exchange))
        _RUNNING.add(task)
        task.add_done_callback(_RUNNING.discard)
        try:
            async with asyncio.timeout(timeout_s):
                await exchange.answered
        except (asyncio.CancelledError, TimeoutError):
            if not exchange.complete and without_rollout_prefix(request.url.path) in self.cancellable_paths:
                exchange.disconnect()
                task.cancel()
            raise
        return exchange.response()

    async def _serve(self, request: InMemoryRequest, exchange: "_Exchange") -> None:
        try:
            await self.app(self._scope(request), exchange.receive, exchange.send)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            exchange.stop()
            raise
        except BaseException as error:  # also SystemExit: a handler must not end the process that hosts it
            logger.error("Server %r failed at %s %s", self.name, request.method, request.url.path, exc_info=error)
        exchange.fail()

    def _scope(self, request: InMemoryRequest) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "client": ("127.0.0.1", 0),
            "server": (request.url.raw_host, request.url.port),
            "method": request.method,
            "path": request.url.path,
            "raw_path": request.url.raw_path.encode(),
            "query_string": request.url.raw_query_string.encode(),
            "headers": request.headers,
            "state": {**self.state},
            ADMITTED: True,
        }


_HOSTED: dict[asyncio.AbstractEventLoop, dict[str, HostedApp]] = {}
_RUNNING: set[asyncio.Task[None]] = set()
"""Tasks under way; the event loop itself holds them by weak references only."""


def register_local_app(
    name: str,
    app: ASGIApp,
    addresses: Iterable[tuple[str, int]],
    *,
    cancellable_paths: frozenset[str] = CANCELLABLE_PATHS,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Let callers in the running event loop reach `app` in memory under `name`.

    A call is taken in memory only if the caller's config gives the server one of `addresses`, so
    that two runs in one process do not mistake each other's servers. A server whose tools may carry
    a name from `CANCELLABLE_PATHS` passes its own `cancellable_paths`.
    """
    known_at = frozenset(Address(host, port) for host, port in addresses)
    hosted = HostedApp(name, app, known_at, cancellable_paths, state or {})
    for loop in [loop for loop in _HOSTED if loop.is_closed()]:
        del _HOSTED[loop]
    _HOSTED.setdefault(asyncio.get_running_loop(), {})[name] = hosted


def unregister_local_app(name: str) -> None:
    """Forget `name`: calls to it use HTTP again. Calls under way are not disturbed."""
    _HOSTED.get(asyncio.get_running_loop(), {}).pop(name, None)


def find_local_app(name: str, address: tuple[str, int]) -> HostedApp | None:
    """The server called `name` at `address` if it lives in the running event loop."""
    here = _HOSTED.get(asyncio.get_running_loop())
    hosted = here.get(name) if here else None
    return hosted if hosted is not None and address in hosted.addresses else None


class _Exchange:
    """One request and the answer it gets: the `receive` and `send` of an ASGI call."""

    def __init__(self, request: InMemoryRequest, max_bytes: int) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.complete = False
        self._request = request
        self._request_taken = False
        self._status: int | None = None
        self._headers: RawHeaders = []
        self._chunks: list[bytes] = []
        self._max_bytes = self._room = max_bytes
        self._ended = asyncio.Event()

    async def receive(self) -> Message:
        if not self._request_taken:
            self._request_taken = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._ended.wait()
        return {"type": _DISCONNECT}

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if self.complete:
            raise RuntimeError(f"ASGI message {kind!r} after the answer was complete")
        if kind == "http.response.start":
            self._status = message["status"]
            self._headers = list(message.get("headers", ()))
        elif kind == "http.response.body":
            if self._status is None:
                raise RuntimeError("ASGI message 'http.response.body' before 'http.response.start'")
            self._chunks.append(message.get("body", b""))
            self._room -= len(self._chunks[-1])
            if self._room < 0:
                self._chunks.clear()
                self._settle(AnswerTooLargeError.than(self._max_bytes))
                self.disconnect()
                raise RuntimeError("the answer is larger than its caller takes (max_response_bytes)")
            if not message.get("more_body", False):
                self._finish()

    def fail(self) -> None:
        """The app ended without a complete answer: a 500, or a body that breaks off."""
        if self.complete:
            return
        if self._status is None:
            self._status = 500
            self._headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21")]
            self._chunks = [b"Internal Server Error"]
            self._finish()
        else:
            self.disconnect()
            self._settle(None)

    def stop(self) -> None:
        """The app was stopped from outside: what it has not answered, nobody will."""
        if not self.complete:
            self.disconnect()
            self._settle(aiohttp.ServerDisconnectedError())

    def disconnect(self) -> None:
        self._ended.set()

    def _finish(self) -> None:
        self.complete = True
        self._ended.set()
        self._settle(None)

    def _settle(self, error: BaseException | None) -> None:
        if self.answered.done():
            return
        if error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(error)

    def response(self) -> LocalResponse:
        assert self._status is not None
        request = self._request
        body = b"" if request.method == "HEAD" else b"".join(self._chunks)
        return LocalResponse(
            request.method, str(request.url), self._status, self._headers, body, broken=not self.complete
        )
