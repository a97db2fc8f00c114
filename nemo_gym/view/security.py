"""Who may ask: whoever has the token, and no page of somebody else.

The address that `ng_view` prints carries a random token, which becomes a cookie; scripts send it as a bearer token. A
browser that was led here under a foreign name (DNS rebinding) gives itself away by `Host`, a page of another site by
`Origin` or `Sec-Fetch-Site`. Answers forbid whatever the pages do not need: nothing in a record can become a script.
"""

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import orjson

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets nobody else through to an app."""

    def __init__(self, app: App, token: str, host: str, port: int) -> None:
        self._app = app
        self._token = token
        self._host = host
        self._cookie = f"ng_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        answering = _with_headers(send)
        problem = self._problem(scope, headers)
        if problem is not None:
            await _answer(answering, 403, problem)
        elif self._has_token_in_address(scope):
            cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax; Path=/"
            await _redirect(answering, cookie)
        elif not self._is_known(headers):
            await _answer(answering, 401, "open the address that ng_view has printed: it carries the token")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(answering, 405, "this API only reads: GET")
        else:
            await self._app(scope, receive, answering)

    def _problem(self, scope: Scope, headers: dict[str, str]) -> str | None:
        host = headers.get("host", "")
        if not self._is_ours(_name_in(host)):
            return f"this server is not known as {host[:200]!r}"
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            return "pages of other sites may not ask"
        is_visit = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_visit:
            return "pages of other sites may not ask"
        return None

    def _is_ours(self, name: str) -> bool:
        if name in _LOOPBACK_NAMES or name == self._host:
            return True
        if is_loopback(self._host):
            return is_loopback(name)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in (socket.gethostname(), socket.getfqdn())
        return True

    def _has_token_in_address(self, scope: Scope) -> bool:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        return scope["path"] == "/" and self._is_token(given)

    def _is_known(self, headers: dict[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())


def _name_in(host: str) -> str:
    """The host in a `Host` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _with_headers(send: Send) -> Send:
    async def answering(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(header for header in HEADERS if header[0] not in own)]
        await send(message)

    return answering


async def _answer(send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps({"error": {"message": message}})})


async def _redirect(send: Send, cookie: str) -> None:
    headers = [(b"location", b"/"), (b"set-cookie", cookie.encode())]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
