"""Sessions: which of a server's callers is which, kept in a signed cookie.

The cookie is named after class and instance and signed with the run's `session_secret`, so that
every worker, replica and restarted server reads it and nobody else can make one up. Every
answer carries it, error answers too: a caller that keeps the latest cookies never loses its session. It
holds no date: a clock that is set forward or back must not take a rollout out of its session.
"""

import hmac
import json
import os
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from copy import deepcopy
from hashlib import blake2b
from typing import Any, NamedTuple

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.http.request import json_bytes

SESSION_ID_KEY = "session_id"
SESSION_RETURNS_KEY = "nemo_gym_session_returns"
"""In the ASGI scope: whether the caller brought a cookie of ours, and so expects to be known."""
MAX_AGE_S = 14 * 24 * 60 * 60
_REMEMBERED_COOKIES = 16_384
_ATTRIBUTES = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax".encode()
_SIGNATURE_BYTES = 24


class _Kept(NamedTuple):
    """A session between two requests."""

    data: dict[str, Any]
    """Never handed out itself: requests get copies."""
    header: tuple[bytes, bytes]
    """What brings it back to the caller."""

    def copy(self) -> dict[str, Any]:
        return self.data.copy() if len(self.data) == 1 else deepcopy(self.data)  # one entry is the id, which is text


class Session(NamedTuple):
    """The session of one request."""

    data: dict[str, Any]
    """What handlers see, and may change."""
    kept: _Kept | None
    """As it came in, None when it is new; a session that leaves as it came keeps its cookie."""


class Sessions:
    """Reads and writes the session cookies of one server."""

    def __init__(self, cookie_name: str, secret: str | None = None) -> None:
        self.cookie_name = cookie_name
        self._marker = f"{cookie_name}=".encode("latin-1", "replace")
        secret = secret or secrets.token_hex(32)
        self._key = blake2b(f"{cookie_name}\0{secret}".encode(), digest_size=blake2b.MAX_KEY_SIZE).digest()
        # A rollout brings the same cookie several times: it is read once.
        self._known: dict[bytes, _Kept] = {}

    def open(self, scope: Scope) -> Session:
        """The session a request belongs to, a new one when it brings none of ours; handlers find it in `scope`."""
        cookie = self._cookie(scope)
        kept = None if cookie is None else self._known.get(cookie) or self._read(cookie)
        data: dict[str, Any] = {} if kept is None else kept.copy()
        if SESSION_ID_KEY not in data:
            data[SESSION_ID_KEY] = _new_id()
        scope["session"] = data
        scope[SESSION_RETURNS_KEY] = kept is not None
        return Session(data, kept)

    def header(self, session: Session) -> tuple[bytes, bytes]:
        """The header of an answer that brings the session back."""
        data, kept = session
        return kept.header if kept is not None and data == kept.data else self._write(data)

    def _cookie(self, scope: Scope) -> bytes | None:
        marker = self._marker
        for name, value in scope["headers"]:
            if name == b"cookie" and marker in value:
                if value.startswith(marker) and b";" not in value:  # as colocated agents send it
                    return bytes(value[len(marker) :])
                found = cookie_parser(value.decode("latin-1")).get(self.cookie_name)
                return None if found is None else found.encode("latin-1", "replace")
        return None

    def _read(self, cookie: bytes) -> _Kept | None:
        """The session in a cookie, or None when we did not sign it."""
        payload, _, signature = cookie.partition(b".")
        if not hmac.compare_digest(signature, self._signature(payload)):
            return None
        return self._keep(cookie, json.loads(urlsafe_b64decode(payload)))

    def _write(self, data: dict[str, Any]) -> tuple[bytes, bytes]:
        text = json_bytes(data)
        payload = urlsafe_b64encode(text)
        kept = data.copy() if len(data) == 1 else json.loads(text)
        return self._keep(b"%b.%b" % (payload, self._signature(payload)), kept).header

    def _signature(self, payload: bytes) -> bytes:
        return blake2b(payload, key=self._key, digest_size=_SIGNATURE_BYTES).hexdigest().encode()

    def _keep(self, cookie: bytes, data: dict[str, Any]) -> _Kept:
        if len(self._known) >= _REMEMBERED_COOKIES:
            del self._known[next(iter(self._known))]
        header = b"%b%b; %b" % (self._marker, cookie, _ATTRIBUTES)
        kept = self._known[cookie] = _Kept(data, (b"set-cookie", header))
        return kept


def _new_id() -> str:
    """A random UUID, without the class around it."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


class SessionMiddleware:
    """Gives every request a `session` with a `session_id`, and every answer the cookie that brings it back."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self.app = app
        self.sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or "session" in scope:  # installed twice: the outer one has done it
            await self.app(scope, receive, send)
            return
        session = self.sessions.open(scope)

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self.sessions.header(session)]
            await send(message)

        await self.app(scope, receive, send_with_cookie)
