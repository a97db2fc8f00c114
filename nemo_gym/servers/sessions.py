"""Sessions: which of a server's callers is which, kept in a signed cookie.

The cookie is named after class and instance and signed with the run's `session_secret`, so that
every worker, replica and restarted server reads it and nobody else can make one up. Every
answer carries it, error answers too: a caller that keeps the latest cookies never loses its session. Its
age is not looked at: a clock that is set forward or back must not take a rollout out of its session.
"""

import json
import secrets
from base64 import b64decode, b64encode
from typing import Any
from uuid import uuid4

from itsdangerous import BadSignature, TimestampSigner
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_ID_KEY = "session_id"
SESSION_RETURNS_KEY = "nemo_gym_session_returns"
"""In the ASGI scope: whether the caller brought a cookie of ours, and so expects to be known."""
MAX_AGE_S = 14 * 24 * 60 * 60


class SessionMiddleware:
    """Gives every request a `session` with a `session_id`, and every answer the cookie that brings it back."""

    def __init__(self, app: ASGIApp, cookie_name: str, secret: str | None = None) -> None:
        self.app = app
        self.cookie_name = cookie_name
        self._signer = TimestampSigner(secret or secrets.token_hex(32), salt=cookie_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or "session" in scope:  # installed twice: the outer one has done it
            await self.app(scope, receive, send)
            return
        cookie = HTTPConnection(scope).cookies.get(self.cookie_name)
        known = self._read(cookie) if cookie else None
        session: dict[str, Any] = dict(known or {})
        session.setdefault(SESSION_ID_KEY, str(uuid4()))
        scope["session"] = session
        scope[SESSION_RETURNS_KEY] = known is not None

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                value = cookie if cookie and session == known else self._write(session)
                message["headers"] = [*message.get("headers", ()), (b"set-cookie", self._set_cookie(value))]
            await send(message)

        await self.app(scope, receive, send_with_cookie)

    def _read(self, cookie: str) -> dict[str, Any] | None:
        """The session in a cookie, or None when we did not sign it."""
        try:
            payload = self._signer.unsign(cookie.encode())
            session = json.loads(b64decode(payload))
        except (BadSignature, ValueError):
            return None
        return session if isinstance(session, dict) else None

    def _write(self, session: dict[str, Any]) -> str:
        return self._signer.sign(b64encode(json.dumps(session).encode())).decode()

    def _set_cookie(self, value: str) -> bytes:
        return f"{self.cookie_name}={value}; path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax".encode("latin-1")
