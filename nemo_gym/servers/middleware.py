"""What every request passes on its way in and out, as plain ASGI.

Errors become JSON inside the session layer, so that a 500 still carries the session cookie, and
say in headers where the innermost failure happened. A caller that vanished cancels long work
(`CANCELLABLE_PATHS`) and never a tool, whose effects must not stop half way.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.errors import GymError
from nemo_gym.http.errors import (
    ERROR_CLASS_HEADER,
    ERROR_SERVER_HEADER,
    ERROR_STATUS_HEADER,
    excerpt,
    failure_headers,
)
from nemo_gym.http.local import CANCELLABLE_PATHS
from nemo_gym.servers.context import running_as

logger = logging.getLogger(__name__)

_ERROR_SERVER_HEADER = ERROR_SERVER_HEADER.encode()


def json_response(content: Any, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; what JSON cannot hold is shown as text."""
    body = orjson.dumps(content, default=repr, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers=headers, media_type="application/json")


class InstanceMiddleware:
    """Lets everything that happens during a request happen as this instance."""

    def __init__(self, app: ASGIApp, instance_name: str) -> None:
        self.app = app
        self.instance_name = instance_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        with running_as(self.instance_name):
            await self.app(scope, receive, send)


class ErrorMiddleware:
    """Turns an exception into the 500 that callers, and models reading a tool's output, know."""

    def __init__(self, app: ASGIApp, server_key: str, instance_name: str) -> None:
        self.app = app
        self.server_key = server_key
        self.instance_name = instance_name

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
                self._name_origin(message)
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the one place that turns failures into answers
            if started:
                logger.exception("%s failed after it began to answer %s", self.instance_name, scope["path"])
                raise
            await self._answer(error, scope["path"])(scope, receive, send)

    def _name_origin(self, message: Message) -> None:
        """Say in an error answer of this server's own that it failed here."""
        headers = message.setdefault("headers", [])
        if not any(name.lower() == _ERROR_SERVER_HEADER for name, _ in headers):
            message["headers"] = [
                *headers,
                (ERROR_STATUS_HEADER.encode(), str(message["status"]).encode()),
                (_ERROR_SERVER_HEADER, self.instance_name.encode("ascii", "replace")),
                (ERROR_CLASS_HEADER.encode(), b"HTTPException"),
            ]

    def _answer(self, error: BaseException, path: str) -> Response:
        content = getattr(error, "response_content", None)
        if isinstance(content, bytes):
            text = f"Hit an exception in {self.server_key} calling an inner server: {content!r}"
            logger.warning("%s: %s failed: %s", self.instance_name, path, error)
        elif isinstance(error, GymError):  # it says where, what and why itself; a dead server makes for hundreds of it
            text = repr(error)
            logger.warning("%s: %s failed: %s", self.instance_name, path, error)
        elif isinstance(error, Exception):
            text = repr(error)
            logger.error("%s: %s raised %s", self.instance_name, path, type(error).__name__, exc_info=error)
        else:
            text = "An unknown error occurred"
            logger.error("%s: %s raised %s", self.instance_name, path, type(error).__name__, exc_info=error)
        return json_response(text, HTTPStatus.INTERNAL_SERVER_ERROR, failure_headers(error, self.instance_name))


class DisconnectMiddleware:
    """Cancels long work whose caller has gone.

    It belongs around an app that listens on a socket; in memory the transport itself does this.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str] = CANCELLABLE_PATHS) -> None:
        self.app = app
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] not in self.paths:
            await self.app(scope, receive, send)
            return
        body, complete = await _read_body(receive)
        if not complete:
            return
        work = asyncio.ensure_future(self.app(scope, _replay(body, receive), send))
        gone = asyncio.ensure_future(_until_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                logger.info("the caller of %s has gone: its work is cancelled", scope["path"])
        finally:
            gone.cancel()
            work.cancel()  # does nothing to work that is done
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()


async def _read_body(receive: Receive) -> tuple[bytes, bool]:
    chunks = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"", False
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks), True


def _replay(body: bytes, receive: Receive) -> Receive:
    delivered = False

    async def replayed() -> Message:
        nonlocal delivered
        if delivered:
            await asyncio.Event().wait()  # the watcher alone listens to the connection; it cancels us
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_validation_error(request: Request, error: Exception) -> Response:
    """422 in FastAPI's shape, whatever the validator raised; the log gets the places, not the body."""
    errors: Sequence[Any] = error.errors() if isinstance(error, RequestValidationError) else [{"msg": str(error)}]
    shown = [{key: value for key, value in item.items() if key not in ("input", "url")} for item in errors]
    logger.warning("%s refused: %s", request.url.path, excerpt(orjson.dumps(shown, default=repr)))
    for item in shown:
        if isinstance(item.get("ctx"), dict):
            item["ctx"] = {key: str(value) for key, value in item["ctx"].items()}
    return json_response({"detail": shown}, HTTPStatus.UNPROCESSABLE_ENTITY)
