"""Turning away who does not have the run's token.

`GET /` and `GET /health` are open to everybody: they say that the server is up. A call in memory comes from the
process itself and is admitted by its transport, with a mark in the ASGI scope that no HTTP request can set.
"""

import logging
from hmac import compare_digest
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.http.errors import ERROR_CLASS_HEADER, ERROR_SERVER_HEADER, ERROR_STATUS_HEADER
from nemo_gym.http.local import ADMITTED
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME
from nemo_gym.servers.middleware import json_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health"})
_SCHEME = b"bearer "


def guarded(app: ASGIApp, token: str | None, instance_name: str) -> ASGIApp:
    """`app` behind the token, if there is one; for what listens on a socket, before any of the body is read."""
    return app if token is None else AuthMiddleware(app, token, instance_name)


class AuthMiddleware:
    """Lets calls through that carry the token."""

    def __init__(self, app: ASGIApp, token: str, instance_name: str) -> None:
        self.app = app
        self._token = token.encode()
        self._instance_name = instance_name
        self._refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or ADMITTED in scope:
            await self.app(scope, receive, send)
            return
        if self._carries_token(scope):
            scope[ADMITTED] = True
        elif scope["method"] not in ("GET", "HEAD") or scope["path"] not in OPEN_PATHS:
            await self._refuse(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _carries_token(self, scope: Scope) -> bool:
        given: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return given[: len(_SCHEME)].lower() == _SCHEME and compare_digest(given[len(_SCHEME) :], self._token)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused += 1
        if str(self._refused).strip("0") == "1":  # the first, tenth, hundredth...: a flood must not fill the log
            logger.warning(
                "%s: a call to %s without the token of this run was refused (%d so far)",
                self._instance_name,
                scope["path"],
                self._refused,
            )
        text = (
            f"{self._instance_name} answers only to callers with the token of its run: send `Authorization: Bearer "
            f"<token>`; commands and clients of nemo_gym take it from `{AUTH_TOKEN_KEY_NAME}` in their config"
        )
        headers = {
            "WWW-Authenticate": 'Bearer realm="nemo_gym"',
            ERROR_STATUS_HEADER: str(int(HTTPStatus.UNAUTHORIZED)),
            ERROR_SERVER_HEADER: self._instance_name.encode("ascii", "replace").decode(),
            ERROR_CLASS_HEADER: "HTTPException",
        }
        await json_response({"detail": text}, HTTPStatus.UNAUTHORIZED, headers)(scope, receive, send)
