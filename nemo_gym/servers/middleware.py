"""What every request passes on its way in and out, as plain ASGI.

Errors become JSON inside the session layer, so that a 500 still carries the session cookie, and
say in headers where the innermost failure happened. A caller that vanished cancels long work
(`CANCELLABLE_PATHS`) and never a tool, whose effects must not stop half way.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from io import BytesIO
from pathlib import PurePath
from typing import Any

import aiohttp
import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.errors import GymError
from nemo_gym.http import run_answers
from nemo_gym.http.errors import (
    ERROR_CLASS_HEADER,
    ERROR_SERVER_HEADER,
    ERROR_STATUS_HEADER,
    ServerResponseError,
    excerpt,
    failure_headers,
    place_of,
    raised_in,
    unwrapped,
)
from nemo_gym.http.run_answers import ASKED, CALL_LOG, CallLog
from nemo_gym.http.transports.memory import CANCELLABLE_PATHS
from nemo_gym.log import SAME_AS
from nemo_gym.process_inputs import RUNNING_INSTANCE
from nemo_gym.rollout_correlation import without_rollout_prefix
from nemo_gym.terminal import without_numbers

logger = logging.getLogger(__name__)

_ERROR_SERVER_HEADER = ERROR_SERVER_HEADER.encode()
_RUN_PATH = "/run"


def json_response(content: Any, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; what JSON cannot hold is shown as text."""
    body = orjson.dumps(content, default=repr, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers=headers, media_type="application/json")


class Failures:
    """What a server says when something in it failed."""

    def __init__(self, server_key: str, instance_name: str, log_folder: object = None) -> None:
        """Name the server's log in messages if it is in a `log_folder`; otherwise it is what the launcher prints."""
        self.server_key = server_key
        self.instance_name = instance_name
        self._log = f"{PurePath(str(log_folder), instance_name)}.log" if log_folder else "its log"

    def origin_headers(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """What an error answer of this server's own needs in addition, to say that it failed here."""
        if any(name.lower() == _ERROR_SERVER_HEADER for name, _ in headers):
            return []
        return [
            (ERROR_STATUS_HEADER.encode(), str(status).encode()),
            (_ERROR_SERVER_HEADER, self.instance_name.encode("ascii", "replace")),
            (ERROR_CLASS_HEADER.encode(), b"HTTPException"),
        ]

    def answer(self, error: BaseException, scope: Scope) -> Response:
        """The 500 that callers, and models reading a tool's output, know."""
        path = without_rollout_prefix(scope["path"])
        content = getattr(error, "response_content", None)
        if isinstance(content, bytes):
            text = f"Hit an exception in {self.server_key} calling an inner server: {unwrapped(content)!r}"
        else:
            text = repr(error) if isinstance(error, Exception) else "An unknown error occurred"
        headers = failure_headers(error, self.instance_name, self._line(error, path), _raised(error, path))
        partial_response = run_answers.partial_of(error)
        if partial_response is not None and run_answers.partial_is_wanted(scope["headers"]):
            kept = run_answers.bounded_response(partial_response)
            if kept is not None:
                both: dict[str, Any] = {"error": text, "partial_response": kept}
                both |= run_answers.told_of_call(run_answers.failed_in(error))
                return json_response(
                    both, HTTPStatus.INTERNAL_SERVER_ERROR, {**headers, run_answers.HAS_PARTIAL: "true"}
                )
        return json_response(text, HTTPStatus.INTERNAL_SERVER_ERROR, headers)

    def _line(self, error: BaseException, path: str) -> str:
        """The failure on one line; it is logged where it began, and there once for all that are alike."""
        kind = _raised(error, path)
        if kind:
            line = raised_in(error, path, self._log)
            logger.error(
                "%s: %s raised %s",
                self.instance_name,
                path,
                type(error).__name__,
                exc_info=error,
                extra={SAME_AS: f"{self.instance_name} {kind}"},
            )
            return line
        line = str(error)
        logger.log(
            logging.DEBUG if _is_told_elsewhere(error) else logging.WARNING,
            "%s: %s failed: %s",
            self.instance_name,
            path,
            line,
            extra={SAME_AS: f"{self.instance_name} {path} {without_numbers(line)}"},
        )
        return line


def _raised(error: BaseException, path: str) -> str:
    """Return path, class and line of code of an exception that nobody expected; empty for one that is expected."""
    if isinstance(error, GymError | aiohttp.ClientResponseError):
        return ""
    return f"{path} {type(error).__name__} {place_of(error)}"


def _is_told_elsewhere(error: BaseException) -> bool:
    """Whether the server where a failure began has logged it, or the first that was told of it.

    What an author's code refuses with an `HTTPException` is often part of the play, such as a tool's answer to a model,
    and becomes worth a line only when it makes a caller fail. A body that is not understood is logged where it came.
    """
    if not isinstance(error, ServerResponseError) or error.error_server is None:
        return False
    is_refusal = error.error_class == "HTTPException" and error.error_status != HTTPStatus.UNPROCESSABLE_ENTITY
    return not is_refusal or error.status != error.error_status


class ErrorMiddleware:
    """Turns an exception into an answer."""

    def __init__(self, app: ASGIApp, failures: Failures) -> None:
        self.app = app
        self.failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
                headers = message.get("headers", ())
                message["headers"] = [*headers, *self.failures.origin_headers(message["status"], headers)]
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the one place that turns failures into answers
            if started:
                name = self.failures.instance_name
                logger.exception("%s failed after it began to answer %s", name, scope["path"])
                raise
            await self.failures.answer(error, scope)(scope, receive, send)


class CallLogMiddleware:
    """Tells whoever asks an agent for a rollout which calls were made for it, and how long they took."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if not wants_calls(scope):
            await self.app(scope, receive, send)
            return
        log = CallLog(scope["headers"], RUNNING_INSTANCE.get())

        async def send_with_calls(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *log.headers()]
            await send(message)

        token = CALL_LOG.set(log)
        try:
            await self.app(scope, receive, send_with_calls)
        finally:
            CALL_LOG.reset(token)
            if log.name:
                log.close()


def wants_calls(scope: Scope) -> bool:
    """Whether a request is one for a rollout, and for the calls that it takes."""
    return scope["type"] == "http" and scope["path"] == _RUN_PATH and ASKED in scope["headers"]


class DisconnectMiddleware:
    """Cancels long work whose caller has gone.

    It belongs around an app that listens on a socket; in memory the transport itself does this.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str] = CANCELLABLE_PATHS) -> None:
        self.app = app
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or without_rollout_prefix(scope["path"]) not in self.paths:
            await self.app(scope, receive, send)
            return
        work = asyncio.current_task()
        assert work is not None
        body, is_complete = await read_body(receive)
        if not is_complete:
            return
        watch = _Watch(work, send)
        watcher = asyncio.create_task(watch.cancel_when_gone(receive))
        try:
            await self.app(scope, _replay(body), watch.send)
        except asyncio.CancelledError:
            if not watch.is_gone:
                raise
            work.uncancel()
            logger.info("the caller of %s has gone: its work is cancelled", scope["path"])
        finally:
            watcher.cancel()


class _Watch:
    """Waits for a caller to go away before it has its answer."""

    def __init__(self, work: asyncio.Task[Any], send: Send) -> None:
        self.is_gone = False
        self._work = work
        self._send = send
        self._is_answered = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True
        await self._send(message)

    async def cancel_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered:
            self.is_gone = True
            self._work.cancel()


async def read_body(receive: Receive) -> tuple[bytes, bool]:
    """The body of a request, and whether all of it came before the caller went."""
    whole: BytesIO | None = None
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"", False
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if whole is None:
            if is_last:
                return body, True
            whole = BytesIO()
        whole.write(body)
        if is_last:
            return whole.getvalue(), True  # which is no copy


def _replay(body: bytes) -> Receive:
    delivered = False

    async def replayed() -> Message:
        nonlocal delivered
        if delivered:
            await asyncio.Event().wait()  # the watcher alone listens to the connection; it cancels us
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def answer_validation_error(request: Request, error: Exception) -> Response:
    """422 in FastAPI's shape, whatever the validator raised; the log gets the places, not the body."""
    errors: Sequence[Any] = error.errors() if isinstance(error, RequestValidationError) else [{"msg": str(error)}]
    shown = [{key: value for key, value in item.items() if key not in ("input", "url")} for item in errors]
    logger.warning("%s refused: %s", request.url.path, excerpt(orjson.dumps(shown, default=repr)))
    for item in shown:
        if isinstance(item.get("ctx"), dict):
            item["ctx"] = {key: str(value) for key, value in item["ctx"].items()}
    return json_response({"detail": shown}, HTTPStatus.UNPROCESSABLE_ENTITY)
