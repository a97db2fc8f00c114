"""The short way into a server: its plain JSON endpoints, without the framework's layers around each call.

A request meets the same things on either way: the instance's name, its session, errors as JSON, the end
of its session. The short way is open as long as these are all there is: an app with middleware of its
own, and every endpoint that asks for more than one JSON body, is served by the framework. So is a caller
of whom nobody has found out yet that he may call.
"""

import asyncio
from http import HTTPStatus
from inspect import isawaitable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from nemo_gym.http.run_answers import CALL_LOG, CallLog
from nemo_gym.http.transports.memory import ADMITTED, Answer
from nemo_gym.process_inputs import RUNNING_INSTANCE, running_as
from nemo_gym.rollout_correlation import (
    ROLLOUT_PATH_START,
    ModelPathMiddleware,
    RolloutContextMiddleware,
    RolloutHeaderMiddleware,
    enter_rollout,
    execution_in,
    leave_rollout,
    rollout_of_caller,
)
from nemo_gym.servers.auth import AuthMiddleware
from nemo_gym.servers.capture import ModelCallCapture, ModelCallCaptureMiddleware, TokenPathMiddleware
from nemo_gym.servers.middleware import (
    CallLogMiddleware,
    ErrorMiddleware,
    Failures,
    read_body,
    wants_calls,
)
from nemo_gym.servers.routes import DirectCall, DirectRoute
from nemo_gym.servers.sessions import Session, SessionLifetimeMiddleware, SessionLifetimes, SessionMiddleware, Sessions
from nemo_gym.servers.usage import UsageMiddleware, header_of_call

_AT_ONCE_BYTES = 4_000_000
_BAD_REQUEST = int(HTTPStatus.BAD_REQUEST)
KNOWN_LAYERS: set[Any] = {
    CallLogMiddleware,
    AuthMiddleware,
    SessionMiddleware,
    ErrorMiddleware,
    SessionLifetimeMiddleware,
    RolloutHeaderMiddleware,
    RolloutContextMiddleware,
    ModelPathMiddleware,
    TokenPathMiddleware,
    ModelCallCaptureMiddleware,
    UsageMiddleware,
}
"""Paths with the prefix of a rollout, which concern three of them, no endpoint has: here they are stripped first."""

_STRIPPING: tuple[Any, ...] = (TokenPathMiddleware, ModelPathMiddleware, RolloutContextMiddleware)


class DirectLane:
    """An app as it is served under an instance's name: the short way where it is open, else the app."""

    def __init__(self, app: FastAPI, instance_name: str) -> None:
        self._app = app
        self._instance_name = instance_name
        self._calls: dict[tuple[str, str], DirectCall] = {}
        self._routes_seen = -1
        layers: dict[Any, dict[str, Any]] = {layer.cls: layer.kwargs for layer in app.user_middleware}
        self._is_locked = AuthMiddleware in layers
        self._can_log_calls = CallLogMiddleware in layers
        self._knows_rollouts = RolloutHeaderMiddleware in layers
        self._open = set(layers) <= KNOWN_LAYERS and {SessionMiddleware, ErrorMiddleware} <= set(layers)
        strips = next((layer for layer in _STRIPPING if layer in layers), None)
        self._stripped = strips(self._serve, **layers[strips]) if self._open and strips is not None else None
        """Serves paths with the prefix of a rollout, which it takes off."""
        if self._open:
            self._sessions: Sessions = layers[SessionMiddleware]["sessions"]
            self._failures: Failures = layers[ErrorMiddleware]["failures"]
            self._lifetimes: SessionLifetimes | None = layers.get(SessionLifetimeMiddleware, {}).get("lifetimes")
            self._tells_usage = UsageMiddleware in layers
            self._capture: ModelCallCapture | None = layers.get(ModelCallCaptureMiddleware, {}).get("capture")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if self._stripped is not None and scope["type"] == "http" and scope["path"].startswith(ROLLOUT_PATH_START):
            await self._stripped(dict(scope), receive, send)
            return
        await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if call is None or scope.get("root_path") or (self._is_locked and ADMITTED not in scope):
            with running_as(self._instance_name):
                await self._app(scope, receive, send)
            return
        whole, is_complete = await read_body(receive)
        if not is_complete:
            return
        answer = await self.answer(call, scope, whole, receive)
        if isinstance(answer, Answer):
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            body = answer.body
            if len(body) > _AT_ONCE_BYTES:  # so that others get their turn, and the caller keeps pace
                for start in range(0, len(body) - _AT_ONCE_BYTES, _AT_ONCE_BYTES):
                    piece = body[start : start + _AT_ONCE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                body = body[start + _AT_ONCE_BYTES :]
            await send({"type": "http.response.body", "body": body})
        else:
            with running_as(self._instance_name):
                await answer(scope, receive, send)

    def find(self, method: str, path: str) -> DirectCall | None:
        """The endpoint that answers, if the short way leads to it."""
        routes = self._app.router.routes
        if len(routes) != self._routes_seen:
            self._calls = _direct_calls(routes) if self._open else {}
            self._routes_seen = len(routes)
        return self._calls.get((method, path))

    def never_waits(self, call: DirectCall) -> bool:
        """Whether `answer` has its result at once, so that nothing can come in between."""
        return call.never_waits and self._lifetimes is None

    async def answer(
        self, call: DirectCall, scope: Scope, body: bytes, receive: Receive, content: Any = None
    ) -> Answer | Response:
        """What an endpoint found by `find` answers, its failures included; `content` is instead of `body`, if given."""
        log = CallLog(scope["headers"], self._instance_name) if self._can_log_calls and wants_calls(scope) else None
        log_token = None if log is None else CALL_LOG.set(log)
        named = None
        if self._knows_rollouts and rollout_of_caller() is None:  # a caller in this process has set it
            named = execution_in(scope["headers"])
        rollout = None if named is None else enter_rollout(*named)
        token = RUNNING_INSTANCE.set(self._instance_name)
        try:
            session = self._sessions.open(scope)
            scope["app"], scope["path_params"] = self._app, {}
            try:
                if self._lifetimes is not None:
                    await self._lifetimes.request_came(scope)
                if self._capture is None:
                    answer = await call.answer(scope, body, receive, content)
                else:
                    answer = await self._capture.answered(call, scope, body, receive, content)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - the one place on this way that turns failures into answers
                answer = await self._failed(error, scope, receive)
            answer = self._with_headers(answer, session, log)
            if self._lifetimes is not None:
                status = answer.status if isinstance(answer, Answer) else answer.status_code
                await self._lifetimes.request_answered(scope, status)
            return answer
        finally:
            RUNNING_INSTANCE.reset(token)
            if log is not None and log_token is not None:
                CALL_LOG.reset(log_token)
                if log.name:
                    log.close()
            if rollout is not None:
                leave_rollout(rollout)

    def _with_headers(self, answer: Answer | Response, session: Session, log: CallLog | None) -> Answer | Response:
        """The answer with its session, the calls it took and, if it is an error, where that happened."""
        if isinstance(answer, Answer):
            status, headers, _, _ = answer
        else:
            status, headers = answer.status_code, list(answer.raw_headers)
        if status >= _BAD_REQUEST:
            headers += self._failures.origin_headers(status, headers)
        headers.append(self._sessions.header(session))
        if log is not None:
            headers += log.headers()
        if self._tells_usage and (usage := header_of_call()) is not None:
            headers.append(usage)
        if isinstance(answer, Answer):
            return answer
        if _is_plain(answer):
            return Answer(status, headers, bytes(answer.body))
        answer.raw_headers = headers
        return answer

    async def _failed(self, error: BaseException, scope: Scope, receive: Receive) -> Response:
        handler = self._handler(error)
        if handler is None:
            return self._failures.answer(error, scope)
        try:
            answered = handler(Request(scope, receive), error)
            response: Response = await answered if isawaitable(answered) else answered
        except Exception as raised:  # noqa: BLE001 - a handler of the author's own
            return self._failures.answer(raised, scope)
        return response

    def _handler(self, error: BaseException) -> Any:
        """The app's own handler for an error, chosen as the framework chooses."""
        handlers = self._app.exception_handlers
        if isinstance(error, HTTPException) and error.status_code in handlers:
            return handlers[error.status_code]
        kinds = (kind for kind in type(error).__mro__ if kind not in (Exception, BaseException, object))
        return next((handlers[kind] for kind in kinds if kind in handlers), None)


def _is_plain(response: Response) -> bool:
    """Whether status, headers and body are all there is to an answer, so that it needs no ASGI to be sent."""
    sends_itself = type(response).__call__ is not Response.__call__
    return not sends_itself and response.background is None and isinstance(getattr(response, "body", None), bytes)


def _direct_calls(routes: list[BaseRoute]) -> dict[tuple[str, str], DirectCall]:
    calls: dict[tuple[str, str], DirectCall] = {}
    others: list[BaseRoute] = []
    for route in routes:
        if not isinstance(route, DirectRoute) or not isinstance(route.app, DirectCall) or route.param_convertors:
            others.append(route)
            continue
        for method in route.methods or ():
            asked: Scope = {"type": "http", "method": method, "path": route.path, "headers": []}
            if not any(other.matches(asked)[0] is Match.FULL for other in others):
                calls.setdefault((method, route.path), route.app)
    return calls
