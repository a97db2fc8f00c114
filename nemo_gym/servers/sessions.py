"""Sessions: which of a server's callers is which, kept in a signed cookie.

The cookie is named after class and instance and signed with the run's `session_secret`, so that
every worker, replica and restarted server reads it and nobody else can make one up. Every
answer carries it, error answers too: a caller that keeps the latest cookies never loses its session.
"""

import json
import secrets
from base64 import b64decode, b64encode
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import uuid4

from itsdangerous import BadSignature, TimestampSigner
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_ID_KEY = "session_id"
MAX_AGE_S = 14 * 24 * 60 * 60
_REMEMBERED_COOKIES = 4096


class Session(NamedTuple):
    """The session of one request."""

    data: dict[str, Any]
    """What handlers see, and may change."""
    as_read: str
    """Its JSON as it came in; a session that leaves like this keeps its cookie."""
    cookie: str | None


class Sessions:
    """Reads and writes the session cookies of one server."""

    def __init__(self, cookie_name: str, secret: str | None = None) -> None:
        self.cookie_name = cookie_name
        self._marker = f"{cookie_name}=".encode("latin-1", "replace")
        self._signer = _Signer(secret or secrets.token_hex(32), salt=cookie_name)
        # A rollout brings the same cookie several times; checking its signature once is enough.
        self._checked = lru_cache(_REMEMBERED_COOKIES)(self._check)

    def open(self, scope: Scope) -> Session:
        """The session a request belongs to, a new one when it brings none of ours."""
        cookie = self._cookie(scope)
        text = self._checked(cookie) if cookie else None
        if text is None:
            return Session({SESSION_ID_KEY: str(uuid4())}, "", None)
        data = json.loads(text)
        data.setdefault(SESSION_ID_KEY, str(uuid4()))
        return Session(data, text, cookie)

    def header(self, session: Session) -> tuple[bytes, bytes]:
        """The header of an answer that brings the session back."""
        text = json.dumps(session.data)
        cookie = session.cookie
        if cookie is None or text != session.as_read:
            cookie = self._signer.sign(b64encode(text.encode())).decode()
        attributes = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax"
        return b"set-cookie", f"{self.cookie_name}={cookie}; {attributes}".encode("latin-1")

    def _cookie(self, scope: Scope) -> str | None:
        for name, value in scope["headers"]:
            if name == b"cookie" and self._marker in value:
                return cookie_parser(value.decode("latin-1")).get(self.cookie_name)
        return None

    def _check(self, cookie: str) -> str | None:
        """The JSON in a cookie, or None when we did not sign it or it is too old."""
        try:
            text = b64decode(self._signer.unsign(cookie.encode(), max_age=MAX_AGE_S)).decode()
            return text if isinstance(json.loads(text), dict) else None
        except (BadSignature, ValueError):
            return None


class _Signer(TimestampSigner):
    """Derives its key once; the library does it anew for every signature."""

    def __init__(self, secret: str, salt: str) -> None:
        super().__init__(secret, salt=salt)
        self._derived = super().derive_key()

    def derive_key(self, secret_key: str | bytes | None = None) -> bytes:
        return self._derived


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
        scope["session"] = session.data

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self.sessions.header(session)]
            await send(message)

        await self.app(scope, receive, send_with_cookie)
