"""Who may call a server: not a web page from elsewhere, and, if the run has a token, nobody without it.

A browser sends requests to whatever address a page names, from inside the network its user sits in. It says so:
`Origin` and `Sec-Fetch-Site` tell that a page of somebody else is asking, and a body that is not JSON is all that
such a page can send without asking us first, which we never grant. A page whose own name was made to point here (DNS
rebinding) gives itself away by that name in `Host`; with a token it gets nowhere, so only without one names matter.

`GET /` and `GET /health` need no token: they say that the server is up. Nor does asking the server to prove that it
knows the token, which our clients do before they show it. Calls in memory come from the process itself and are not
checked.
"""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from hmac import compare_digest
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.routing import Match, Mount, compile_path
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.config.hosts import is_address, machine_names, names_in_config, plain_name
from nemo_gym.config.secrets import CHALLENGE_HEADER, PROOF_PATH, auth_token, proof_of
from nemo_gym.http.errors import ERROR_CLASS_HEADER, ERROR_SERVER_HEADER, ERROR_STATUS_HEADER
from nemo_gym.keys import ALLOWED_HOSTS_KEY_NAME, AUTH_TOKEN_KEY_NAME
from nemo_gym.servers.failures import json_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", PROOF_PATH})
_SCHEME = b"bearer "
_OWN_PAGES = frozenset({b"same-origin", b"none"})
"""`Sec-Fetch-Site` of what a page of this very server sends, or a user who typed the address."""
_JSON = b"application/json"
_SENT_WITHOUT_ASKING = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Types of bodies that a browser sends to other origins without a preflight."""
_MOST_HOSTS_REMEMBERED = 256
_LONGEST_WAIT_FOR_NAME_S = 5.0
_POLICY_VIOLATION = 1008


class Refusal(NamedTuple):
    """Why a call is turned away."""

    status: HTTPStatus
    text: str
    headers: Mapping[str, str] = {}


class CallerCheck:
    """Decides which requests a server answers."""

    def __init__(self, config: Mapping[Any, Any], instance_name: str, described_by: FastAPI) -> None:
        """`config` is the run's, `described_by` knows which bodies the endpoints take."""
        token = auth_token(config)
        self._token = None if token is None else token.encode()
        self._instance_name = instance_name
        self._hosts = KnownHosts(config)
        self._bodies = DeclaredBodies(described_by)
        self._refused = 0

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """Return how to receive the body of a request that may be made; None if it has been answered here."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._foreign_page(headers)
        if refusal is None and self._token is None and headers.get(b"host") not in self._hosts.seen:
            refusal = await self._unknown_host(headers[b"host"], scope)
        if refusal is None and self._token is not None and not self._carries_token(headers):
            if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN_PATHS:
                if scope["path"] != PROOF_PATH:
                    return receive
                await self._prove(scope, receive, send)
                return None
            refusal = self._no_token()
        if refusal is None and headers.get(b"content-type") != _JSON and scope["type"] == "http":
            receive, is_empty = await _look_at_body(headers, receive)
            refusal = None if is_empty else self._other_body(headers, scope)
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)
            return None
        return receive

    def _foreign_page(self, headers: dict[bytes, bytes]) -> Refusal | None:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is None and site is None:
            return None
        authority = None if origin is None else origin.lower().partition(b"://")[2] or b"null"
        if authority in (None, headers.get(b"host", b"").lower()) and (site is None or site in _OWN_PAGES):
            return None
        return Refusal(
            HTTPStatus.FORBIDDEN,
            f"{self._instance_name} does not answer to pages of other web sites: this request came from a browser, on "
            f"behalf of {_shown(origin) if origin else 'another site'}. Programs send no `Origin` and no "
            "`Sec-Fetch-Site`; to look at an address, type it",
        )

    async def _unknown_host(self, host: bytes, scope: Scope) -> Refusal | None:
        if await self._hosts.is_known(host, scope):
            return None
        return Refusal(
            HTTPStatus.FORBIDDEN,
            f"{self._instance_name} is not known as {_shown(host)}, and without a token it answers only to names that "
            "it knows: call it by its address, as localhost, by the name of its machine or by a `host` of its config, "
            f"or list the name in `{ALLOWED_HOSTS_KEY_NAME}` of the config that it is started with",
        )

    def _carries_token(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        assert self._token is not None
        return given[: len(_SCHEME)].lower() == _SCHEME and compare_digest(given[len(_SCHEME) :], self._token)

    async def _prove(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._token is not None
        challenge = dict(scope["headers"]).get(CHALLENGE_HEADER.encode(), b"").decode("latin-1")
        port = (scope.get("server") or ("", None))[1] or 0
        answer = {"proof": proof_of(self._token.decode(), challenge, port), "port": port}
        await json_response(answer, HTTPStatus.OK)(scope, receive, send)

    def _no_token(self) -> Refusal:
        return Refusal(
            HTTPStatus.UNAUTHORIZED,
            f"{self._instance_name} answers only to callers with the token of its run: send `Authorization: Bearer "
            f"<token>`; commands and clients of nemo_gym take it from `{AUTH_TOKEN_KEY_NAME}` in their config",
            {"WWW-Authenticate": 'Bearer realm="nemo_gym"'},
        )

    def _other_body(self, headers: dict[bytes, bytes], scope: Scope) -> Refusal | None:
        given = headers.get(b"content-type", b"").decode("latin-1")
        kind = given.partition(";")[0].strip().lower()
        if not kind and not any(name == b"origin" or name.startswith(b"sec-fetch-") for name in headers):
            return None
        if kind == _JSON.decode() or kind.endswith("+json") or (kind and self._bodies.take(scope, kind)):
            return None
        return Refusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"{self._instance_name}: {scope['path']} takes JSON, and the body is "
            f"{f'said to be {_shown(given)}' if kind else 'of no type'}: send `Content-Type: application/json`",
        )

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused += 1
        if str(self._refused).strip("0") == "1":  # the first, tenth, hundredth...: a flood must not fill the log
            logger.warning(
                "a call to %s was refused with %d (%d so far): %s",
                scope["path"],
                refusal.status,
                self._refused,
                refusal.text,
            )
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal.status.phrase})
            return
        headers = {
            **refusal.headers,
            ERROR_STATUS_HEADER: str(int(refusal.status)),
            ERROR_SERVER_HEADER: self._instance_name.encode("ascii", "replace").decode(),
            ERROR_CLASS_HEADER: "HTTPException",
        }
        await json_response({"detail": refusal.text}, refusal.status, headers)(scope, receive, send)


class KnownHosts:
    """The names by which a server may be called while it has no token."""

    def __init__(self, config: Mapping[Any, Any]) -> None:
        self._config = config
        self._names: frozenset[str] | None = None
        self.seen: set[bytes | None] = {None, b""}
        """Values of `Host` that were found to be fine; so is none at all, which no browser sends."""

    async def is_known(self, host: bytes, scope: Scope) -> bool:
        """Whether `host` is an address or a known name; waits a moment for the full name of this machine."""
        name = _host_of(host)
        if not is_address(name) and name != "localhost":
            if name == (scope.get("server") or ("",))[0]:  # a socket has an address: this is a call in memory
                return True
            if not await self._is_configured_or_ours(name):
                return False
        if len(self.seen) < _MOST_HOSTS_REMEMBERED:
            self.seen.add(host)
        return True

    async def _is_configured_or_ours(self, name: str) -> bool:
        if self._names is None:
            self._names = names_in_config(self._config)
        machine = machine_names()
        deadline_s = asyncio.get_running_loop().time() + _LONGEST_WAIT_FOR_NAME_S
        while name not in self._names and name not in machine.names:
            if machine.are_complete or asyncio.get_running_loop().time() > deadline_s:
                return name in machine.names
            await asyncio.sleep(0.01)
        return True


class DeclaredBodies:
    """Which bodies other than JSON the endpoints of an app take, as its OpenAPI description says.

    An endpoint declares them with `Form`, `File`, `Body(media_type=...)` or `openapi_extra`. One that declares no body
    at all may read it itself: it gets whatever a page of somebody else cannot send. So does an app mounted in this one.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._declared: list[tuple[str, re.Pattern[str], frozenset[str]]] | None = None

    def take(self, scope: Scope, kind: str) -> bool:
        """Whether the endpoint that a request is for takes a body of this type."""
        if any(isinstance(route, Mount) and route.matches(scope)[0] is Match.FULL for route in self._app.routes):
            return True
        if self._declared is None:
            self._declared = list(_declared_in(self._app))
        for method, path, kinds in self._declared:
            if method == scope["method"] and path.fullmatch(scope["path"]):
                return kind in kinds
        return kind not in _SENT_WITHOUT_ASKING


def _declared_in(app: FastAPI) -> Iterator[tuple[str, re.Pattern[str], frozenset[str]]]:
    try:
        paths: dict[str, dict[str, Any]] = app.openapi()["paths"]
    except Exception as error:  # noqa: BLE001 - an author's types may be beyond description; the endpoints work
        logger.warning("%s cannot be described, so its endpoints take JSON only: %s", app.title, error)
        return
    for path, operations in paths.items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content") if isinstance(operation, dict) else None
            if content:
                yield method.upper(), compile_path(path)[0], frozenset(map(str.lower, content))


async def _look_at_body(headers: dict[bytes, bytes], receive: Receive) -> tuple[Receive, bool]:
    """Whether a request has no body; what had to be received to find out is received again by the app."""
    if b"transfer-encoding" not in headers:
        return receive, headers.get(b"content-length", b"0").strip(b"0 ") == b""
    first: list[Message] = [await receive()]
    is_empty = not first[0].get("body") and not first[0].get("more_body", False)

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again, is_empty


def _host_of(value: bytes) -> str:
    """The host in a `Host` header, without port and brackets."""
    text = value.decode("latin-1").strip()
    if bracketed := re.fullmatch(r"\[([^\]]*)\](:[0-9]*)?", text):
        return bracketed[1]
    return plain_name(text if text.count(":") > 1 else text.partition(":")[0])


def _shown(value: bytes | str) -> str:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    return repr(text[:100])
