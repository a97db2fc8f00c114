"""Calling a colocated server without a socket: scope and body go straight into its ASGI app.

Routes, middleware, cookies, status codes and error texts are those of HTTP, because it is the same
app that answers. Servers are known by name and address per event loop: the host process registers
those it runs, and `ServerClient` finds them here before it opens a connection.

A caller that vanishes (it is cancelled, or out of patience) takes the work at `CANCELLABLE_PATHS` with
it, and never a tool, `/seed_session` or `/verify`: these are carried out to the end, as they are over
HTTP, and so run in a task of their own unless they never wait.

A server may offer a short way to its plain endpoints (`DirectCalls`). All other calls go through its
ASGI app: the caller goes on when the body is complete, while the task may still have work to do.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import aiohttp

from nemo_gym.http.addresses import Address
from nemo_gym.http.errors import AnswerTooLargeError
from nemo_gym.http.transports.base import LocalRequest, call_after, time_limit
from nemo_gym.http.transports.response import LocalResponse, RawHeaders
from nemo_gym.http.transports.session import current_settings
from nemo_gym.keys import MODEL_PATHS
from nemo_gym.rollout_correlation import without_rollout_prefix

logger = logging.getLogger(__name__)

CANCELLABLE_PATHS = frozenset({"/run", *MODEL_PATHS})
"""Work that nobody but its caller has a use for, in either transport."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMITTED = "nemo_gym.admitted"
"""In the scope of a call that needs no token: its caller is this process, or has shown the token already."""


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    headers: RawHeaders
    body: bytes
    content: Any = None
    """What the body is the JSON of, if the server still has it; nobody may change it."""


class DirectCalls(Protocol):
    """A server's short way to some of its endpoints."""

    def find(self, method: str, path: str, /) -> Any:
        """The endpoint, or None when it must be called through the app."""

    def never_waits(self, call: Any, /) -> bool:
        """Whether `answer` has its result at once: then there is nothing to carry out when its caller is gone."""

    async def answer(self, call: Any, scope: Scope, body: bytes, receive: Receive, content: Any = None, /) -> Any:
        """What an endpoint that `find` found answers: an `Answer`, or an ASGI app that sends one.

        `content` stands for `body` if the endpoint takes it.
        """


_DISCONNECT = "http.disconnect"
_ASGI = {"version": "3.0", "spec_version": "2.3"}
_SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "scheme": "http",
    "root_path": "",
    "client": ("127.0.0.1", 0),
    ADMITTED: True,
    "asgi": None,
    "method": None,
    "path": None,
    "raw_path": None,
    "query_string": None,
    "headers": None,
    "server": None,
    "state": None,
}
"""Copied for every call: a dict that is large enough from the start need not grow."""


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
    direct: DirectCalls | None = None
    loop: asyncio.AbstractEventLoop | None = None

    async def exchange(self, request: LocalRequest, timeout_s: float) -> LocalResponse:
        """Answer `request`; the app's exceptions become answers, as they do over HTTP.

        Raises:
            TimeoutError: no complete answer within `timeout_s`.
            aiohttp.ServerDisconnectedError: the server was stopped before it answered.
        """
        method, url, path, raw_path, query, headers, body, _, content, address, _, pieces = request
        if pieces:
            body = b"".join(pieces)
        scope: Scope = _SCOPE.copy()
        scope["asgi"] = _ASGI.copy()
        scope["method"], scope["path"], scope["raw_path"], scope["query_string"] = method, path, raw_path, query
        scope["headers"], scope["server"], scope["state"] = headers, address, {**self.state}
        direct = self.direct
        call = None if direct is None else direct.find(method, path)
        if call is None or direct is None:
            return await _call_app(self, self.app, scope, request, timeout_s, url)
        work = direct.answer(call, scope, body, _nothing_more, content)
        if path in self.cancellable_paths:
            with time_limit(timeout_s, self.loop):
                answer = await work
        elif direct.never_waits(call):
            answer = _at_once(work)
        else:
            answer = await _carried_out(work, timeout_s)
        if type(answer) is not Answer:
            return await _call_app(self, answer, scope, request, timeout_s, url)
        status, headers, body, content = answer
        return LocalResponse(method, url, status, headers, body, parsed=content)


_HOSTED: dict[asyncio.AbstractEventLoop, dict[str, HostedApp]] = {}
_RUNNING: dict[asyncio.Task[Any], asyncio.Future[None] | None] = {}
"""Work under way, and the future of whoever waits for its end."""


def register_local_app(
    name: str,
    app: ASGIApp,
    addresses: Iterable[tuple[str, int]],
    *,
    cancellable_paths: frozenset[str] = CANCELLABLE_PATHS,
    state: Mapping[str, Any] | None = None,
    direct: DirectCalls | None = None,
) -> None:
    """Let callers in the running event loop reach `app` in memory under `name`.

    A call is taken in memory only if the caller's config gives the server one of `addresses`, so
    that two runs in one process do not mistake each other's servers. A server whose tools may carry
    a name from `CANCELLABLE_PATHS` passes its own `cancellable_paths`.
    """
    known_at = frozenset(Address(host, port) for host, port in addresses)
    running = asyncio.get_running_loop()
    hosted = HostedApp(name, app, known_at, cancellable_paths, state or {}, direct, running)
    for loop in [loop for loop in _HOSTED if loop.is_closed()]:
        del _HOSTED[loop]
    _HOSTED.setdefault(running, {})[name] = hosted


def unregister_local_app(name: str) -> None:
    """Forget `name`: calls to it use HTTP again. Calls under way are not disturbed."""
    _HOSTED.get(asyncio.get_running_loop(), {}).pop(name, None)


def find_local_app(name: str, address: tuple[str, int]) -> HostedApp | None:
    """The server called `name` at `address` if it lives in the running event loop."""
    here = _HOSTED.get(asyncio.get_running_loop())
    hosted = here.get(name) if here else None
    return hosted if hosted is not None and address in hosted.addresses else None


def takes_over(hosted: HostedApp, method: str, path: str, content: Any) -> bool:
    """Whether a server takes `content` as it is, so that it need not become JSON on the way."""
    call = hosted.direct.find(method, path) if hosted.direct is not None else None
    return call is not None and bool(call.takes(content))


def _at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which never waits; what it does to its context is its own affair, as in a task.

    Work that waits even so fails where it does, and its server answers for that.
    """
    context = copy_context()
    try:
        context.run(work.send, None)
        context.run(work.throw, RuntimeError("this endpoint is marked never_waits, and it waited; take the mark off"))
    except StopIteration as ended:
        return ended.value
    except asyncio.CancelledError:
        raise aiohttp.ServerDisconnectedError from None
    work.close()
    raise AssertionError("work that never waits has waited again while it failed")


async def _carried_out(work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """The result of `work`, which goes on to its end even if nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    task = _spawn(loop, work, ended)
    timer = call_after(loop, timeout_s, _wake, ended)
    try:
        await ended
    finally:
        timer.cancel()
    if not task.done():
        raise TimeoutError
    if task.cancelled():
        raise aiohttp.ServerDisconnectedError
    return task.result()


def _spawn(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], ended: "asyncio.Future[None] | None" = None
) -> "asyncio.Task[Any]":
    task = loop.create_task(work)
    _RUNNING[task] = ended
    task.add_done_callback(_note_end)
    return task


def _note_end(task: "asyncio.Task[Any]") -> None:
    _wake(_RUNNING.pop(task))


def _wake(ended: "asyncio.Future[None] | None") -> None:
    if ended is not None and not ended.done():
        ended.set_result(None)


async def _nothing_more() -> Message:
    """The `receive` of a request whose body has been handed over: nothing follows."""
    await asyncio.Event().wait()
    return {"type": _DISCONNECT}


async def _call_app(
    hosted: HostedApp, app: ASGIApp, scope: Scope, request: LocalRequest, timeout_s: float, url: str
) -> LocalResponse:
    loop = asyncio.get_running_loop()
    exchange = _Exchange(loop, request, current_settings().max_response_bytes)
    task = _spawn(loop, _serve(hosted, app, scope, exchange))
    timer = loop.call_later(timeout_s, exchange.give_up)
    try:
        await exchange.answered
    except (asyncio.CancelledError, TimeoutError):
        if not exchange.complete and without_rollout_prefix(request.path) in hosted.cancellable_paths:
            exchange.disconnect()
            task.cancel()
        raise
    finally:
        timer.cancel()
    return exchange.response(url)


class _Exchange:
    """One request and the answer it gets: the `receive` and `send` of an ASGI call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request: LocalRequest, max_bytes: int) -> None:
        self.answered: asyncio.Future[None] = loop.create_future()
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

    def give_up(self) -> None:
        self._settle(TimeoutError())

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

    def response(self, url: str) -> LocalResponse:
        assert self._status is not None
        request = self._request
        body = b"" if request.method == "HEAD" else b"".join(self._chunks)
        return LocalResponse(request.method, url, self._status, self._headers, body, broken=not self.complete)


async def _serve(hosted: HostedApp, app: ASGIApp, scope: Scope, exchange: _Exchange) -> None:
    try:
        await app(scope, exchange.receive, exchange.send)
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        exchange.stop()
        raise
    except BaseException as error:  # also SystemExit: a handler must not end the process that hosts it
        logger.error("Server %r failed at %s %s", hosted.name, scope["method"], scope["path"], exc_info=error)
    exchange.fail()
