"""What every request passes on its way into a server's routes and back: one ASGI middleware.

It turns away who may not call, finds the rollout and the session that a request belongs to, and puts into the headers
of the answer what callers want to know of it. Errors become JSON inside the session, so that a 500 still carries the
session cookie. A caller that vanished cancels long work (`cancellable_paths`) and never a tool, whose effects must not
stop half way.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.http.in_memory import ADMITTED
from nemo_gym.http.run_answers import ASKED, CALL_LOG, CallLog, usage_header
from nemo_gym.process_inputs import running_as
from nemo_gym.rollout_correlation import (
    RolloutPrefix,
    execution_in,
    rollout_context,
    rollout_of_caller,
    without_rollout_prefix,
)
from nemo_gym.servers.auth import CallerCheck
from nemo_gym.servers.failures import Failures
from nemo_gym.servers.sessions import SessionLifetimes, Sessions, is_over_mcp
from nemo_gym.servers.usage import usage_of_call

if TYPE_CHECKING:
    from nemo_gym.servers.capture import ModelCallCapture, TokenPaths

logger = logging.getLogger(__name__)

_RUN_PATH = "/run"


@dataclass
class Duties:
    """What the gateway of one server does for each request; what is None or False is left out."""

    instance_name: str
    """The server, as its config names it."""
    callers: CallerCheck | None = None
    """Decides whether a request from outside the process may be made."""
    sessions: Sessions | None = None
    lifetimes: SessionLifetimes | None = None
    failures: Failures | None = None
    """Turns exceptions into answers."""
    cancellable_paths: frozenset[str] = frozenset()
    """Paths of work that nobody but its caller has a use for."""
    reads_rollout_header: bool = False
    """Whether headers may name the rollout of a request."""
    rollout_prefix: RolloutPrefix | None = None
    """How a path may name the rollout of a request."""
    logs_calls: bool = False
    """Whether the answer to `/run` tells which calls were made for it."""
    tells_usage: bool = False
    """Whether answers tell the tokens that they took."""
    token_paths: "TokenPaths | None" = None
    """Notes the calls whose token ids are kept."""
    capture: "ModelCallCapture | None" = None
    """Writes model calls down."""


def duties_of(app: FastAPI) -> Duties | None:
    """Return what the gateway in `app` does; None if it has none."""
    for layer in app.user_middleware:
        duties = layer.kwargs.get("duties")
        if isinstance(duties, Duties):
            return duties
    return None


class Gateway:
    """The middleware of one server."""

    def __init__(self, app: ASGIApp, duties: Duties) -> None:
        self.app = app
        self.duties = duties

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        duties = self.duties
        is_from_outside = ADMITTED not in scope
        if is_from_outside and duties.callers is not None:
            admitted = await duties.callers.admit(scope, receive, send)
            if admitted is None:
                return
            receive = admitted
        with running_as(duties.instance_name):
            if scope["type"] != "http":
                await self.app(scope, receive, send)
            elif is_from_outside and without_rollout_prefix(scope["path"]) in duties.cancellable_paths:
                await _cancelled_when_caller_goes(self._serve, scope, receive, send)
            else:
                await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request in its rollout and its session."""
        duties = self.duties
        with ExitStack() as stack:
            scope = await self._enter_rollout(scope, stack)
            log = stack.enter_context(_call_log(scope, duties.instance_name)) if duties.logs_calls else None
            usage = stack.enter_context(usage_of_call()) if duties.tells_usage else None
            session = None
            if duties.sessions is not None and "session" not in scope:
                session = duties.sessions.open(scope)

            def add_headers(status: int, headers: list[tuple[bytes, bytes]]) -> None:
                if duties.failures is not None and status >= HTTPStatus.BAD_REQUEST:
                    headers += duties.failures.origin_headers(status, headers)
                if duties.sessions is not None and session is not None:
                    headers.append(duties.sessions.header(session))
                if log is not None:
                    headers += log.headers()
                if usage is not None and usage.tokens is not None:
                    headers.append(usage_header(usage.tokens))

            answer = _Answer(send, add_headers)
            await self._answer(scope, receive, answer)
            if duties.lifetimes is not None and not is_over_mcp(scope):
                await duties.lifetimes.request_answered(scope, answer.status or HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _enter_rollout(self, scope: Scope, stack: ExitStack) -> Scope:
        """Begin to work for the rollout that a request names; return its scope, without the prefix of its path."""
        duties = self.duties
        if duties.reads_rollout_header and rollout_of_caller() is None:  # a caller in this process has set it
            named = execution_in(scope["headers"])
            if named is not None:
                stack.enter_context(rollout_context(*named))
        found = None if duties.rollout_prefix is None else duties.rollout_prefix.match(scope["path"])
        if found is None or duties.rollout_prefix is None:
            return scope
        if duties.token_paths is not None:
            await duties.token_paths.note_missed(found, scope["method"])
        scope = duties.rollout_prefix.taken_off(found, scope)
        stack.enter_context(duties.rollout_prefix.context(found, scope))
        if duties.token_paths is not None:
            stack.enter_context(duties.token_paths.call(found, scope))
        return scope

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        duties = self.duties
        app = self.app if duties.capture is None else duties.capture.around(self.app)
        try:
            if duties.lifetimes is not None and not is_over_mcp(scope):
                await duties.lifetimes.request_came(scope)
            await app(scope, receive, answer.send)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the one place that turns failures into answers
            if duties.failures is None:
                raise
            if answer.status is not None:
                logger.exception("%s failed after it began to answer %s", duties.instance_name, scope["path"])
                raise
            await duties.failures.answer(error, scope)(scope, receive, answer.send)


class _Answer:
    """Sends an answer, with further headers, and remembers its status."""

    def __init__(self, send: Send, add_headers: Any) -> None:
        self._send = send
        self._add_headers = add_headers
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            self._add_headers(self.status, headers)
            message = {**message, "headers": headers}
        await self._send(message)


@contextmanager
def _call_log(scope: Scope, instance_name: str) -> Iterator[CallLog | None]:
    """Note the calls that are made for a rollout, if its caller asks for them."""
    if scope["path"] != _RUN_PATH or ASKED not in scope["headers"]:
        yield None
        return
    log = CallLog(scope["headers"], instance_name)
    token = CALL_LOG.set(log)
    try:
        yield log
    finally:
        CALL_LOG.reset(token)
        if log.name:
            log.close()


async def _cancelled_when_caller_goes(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request; cancel the work for it if its caller goes away before it is answered."""
    work = asyncio.current_task()
    assert work is not None
    body, is_complete = await read_body(receive)
    if not is_complete:
        return
    is_answered = is_gone = False

    async def send_and_note(message: Message) -> None:
        nonlocal is_answered
        is_answered |= message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)

    async def cancel_when_gone() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not is_answered:
            is_gone = True
            work.cancel()

    watcher = asyncio.create_task(cancel_when_gone())
    try:
        await app(scope, _received(body), send_and_note)
    except asyncio.CancelledError:
        if not is_gone:
            raise
        work.uncancel()
        logger.info("the caller of %s has gone: its work is cancelled", scope["path"])
    finally:
        watcher.cancel()


async def read_body(receive: Receive) -> tuple[bytes, bool]:
    """Return the body of a request, and whether all of it came before the caller went."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"", False
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks), True


def _received(body: bytes) -> Receive:
    is_delivered = False

    async def receive() -> Message:
        nonlocal is_delivered
        if is_delivered:
            await asyncio.Event().wait()  # only the watcher listens to the connection; it cancels the work
        is_delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
