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
from typing import Any, NamedTuple

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_ID_KEY = "session_id"
SESSION_RETURNS_KEY = "nemo_gym_session_returns"
"""In the ASGI scope: whether the caller brought a cookie of ours, and so expects to be known."""
MAX_AGE_S = 14 * 24 * 60 * 60
_REMEMBERED_COOKIES = 16_384
_ATTRIBUTES = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax"


class Session(NamedTuple):
    """The session of one request."""

    data: dict[str, Any]
    """What handlers see, and may change."""
    as_read: str | None
    """Its JSON as it came in, None when it is new; a session that leaves as it came keeps its cookie."""
    cookie: str


class Sessions:
    """Reads and writes the session cookies of one server."""

    def __init__(self, cookie_name: str, secret: str | None = None) -> None:
        self.cookie_name = cookie_name
        self._marker = f"{cookie_name}=".encode("latin-1", "replace")
        self._key = hmac.digest((secret or secrets.token_hex(32)).encode(), cookie_name.encode(), "sha256")
        # A rollout brings the same cookie several times: its signature is computed once.
        self._known: dict[str, str] = {}

    def open(self, scope: Scope) -> Session:
        """The session a request belongs to, a new one when it brings none of ours; handlers find it in `scope`."""
        cookie = self._cookie(scope)
        text = self._known.get(cookie) or self._read(cookie) if cookie else None
        data: dict[str, Any] = json.loads(text) if text else {}
        if SESSION_ID_KEY not in data:
            data[SESSION_ID_KEY] = _new_id()
        scope["session"] = data
        scope[SESSION_RETURNS_KEY] = text is not None
        return Session(data, text, cookie or "")

    def header(self, session: Session) -> tuple[bytes, bytes]:
        """The header of an answer that brings the session back."""
        text = json.dumps(session.data)
        cookie = session.cookie if text == session.as_read else self._write(text)
        return b"set-cookie", f"{self.cookie_name}={cookie}; {_ATTRIBUTES}".encode("latin-1")

    def _cookie(self, scope: Scope) -> str | None:
        for name, value in scope["headers"]:
            if name == b"cookie" and self._marker in value:
                return cookie_parser(value.decode("latin-1")).get(self.cookie_name)
        return None

    def _read(self, cookie: str) -> str | None:
        """The JSON in a cookie, or None when we did not sign it."""
        payload, _, signature = cookie.encode().partition(b".")
        if not hmac.compare_digest(signature, self._signature(payload)):
            return None
        text = urlsafe_b64decode(payload).decode()
        self._remember(cookie, text)
        return text

    def _write(self, text: str) -> str:
        payload = urlsafe_b64encode(text.encode())
        cookie = f"{payload.decode()}.{self._signature(payload).decode()}"
        self._remember(cookie, text)
        return cookie

    def _signature(self, payload: bytes) -> bytes:
        return urlsafe_b64encode(hmac.digest(self._key, payload, "sha256"))

    def _remember(self, cookie: str, text: str) -> None:
        if len(self._known) >= _REMEMBERED_COOKIES:
            del self._known[next(iter(self._known))]
        self._known[cookie] = text


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
