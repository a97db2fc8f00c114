"""Sessions: which of a server's callers is which, kept in a signed cookie, and when that ends.

The cookie is named after class and instance and signed with the run's `session_secret`, so that
every worker, replica and restarted server reads it and nobody else can make one up. Every
answer carries it, error answers too: a caller that keeps the latest cookies never loses its session. It
holds no date: a clock that is set forward or back must not take a rollout out of its session.

A session ends after the episode's `/verify`, when somebody says so, or when nobody comes back. Only servers that keep
something per session, and therefore override `end_session`, are watched. A caller
who comes back to a session that such a server does not have (it was restarted, or the session is over) is
refused: what it would be told, and above all the verdict, would be about a session that never was.
"""

import hmac
import json
import logging
import re
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from starlette.requests import cookie_parser
from starlette.types import Scope

from nemo_gym.errors import GymError
from nemo_gym.http.request import json_bytes
from nemo_gym.keys import END_SESSION_HEADER
from nemo_gym.workers.cores import WORKS_FOR

logger = logging.getLogger(__name__)

SESSION_ID_KEY = "session_id"
SESSION_RETURNS_KEY = "nemo_gym_session_returns"
"""In the ASGI scope: whether the caller brought a cookie of ours, and so expects to be known."""
MAX_AGE_S = 14 * 24 * 60 * 60
_ATTRIBUTES = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax".encode()
_SIGNATURE_BYTES = 24
_END_SESSION_HEADER_BYTES = END_SESSION_HEADER.encode()
_SWEEP_EVERY_S = 30.0
_OVER_MCP = re.compile(r"/mcp(/|\Z)")
_NEEDS_NO_SESSION = frozenset({"/seed_session", "/end_session", "/aggregate_metrics"})


class Sessions:
    """Reads and writes the session cookies of one server."""

    def __init__(self, cookie_name: str, secret: str | None = None, *, take_turns: bool = False) -> None:
        """`take_turns` says that work of this server waits for a processor, one of its sessions after the other."""
        self.cookie_name = cookie_name
        self._take_turns = take_turns
        secret = secret or secrets.token_hex(32)
        self._key = blake2b(f"{cookie_name}\0{secret}".encode(), digest_size=blake2b.MAX_KEY_SIZE).digest()

    def open(self, scope: Scope) -> dict[str, Any]:
        """Return the session that a request belongs to, a new one when it brings none; handlers find it in `scope`."""
        known = self._read(scope)
        data = {} if known is None else known
        data.setdefault(SESSION_ID_KEY, str(uuid4()))
        scope["session"] = data
        scope[SESSION_RETURNS_KEY] = known is not None
        if self._take_turns:
            WORKS_FOR.set((self.cookie_name, data[SESSION_ID_KEY]))
        return data

    def header(self, session: dict[str, Any]) -> tuple[bytes, bytes]:
        """Return the header of an answer that brings the session back."""
        payload = urlsafe_b64encode(json_bytes(session))
        name = self.cookie_name.encode("latin-1", "replace")
        return b"set-cookie", b"%b=%b.%b; %b" % (name, payload, self._signature(payload), _ATTRIBUTES)

    def _read(self, scope: Scope) -> dict[str, Any] | None:
        """Return the session in the cookies of a request; None when they hold none that we signed."""
        for name, value in scope["headers"]:
            cookie = cookie_parser(value.decode("latin-1")).get(self.cookie_name) if name == b"cookie" else None
            if cookie is None:
                continue
            payload, _, signature = cookie.encode("latin-1", "replace").partition(b".")
            if hmac.compare_digest(signature, self._signature(payload)):
                data: dict[str, Any] = json.loads(urlsafe_b64decode(payload))
                return data
        return None

    def _signature(self, payload: bytes) -> bytes:
        return blake2b(payload, key=self._key, digest_size=_SIGNATURE_BYTES).hexdigest().encode()


class SessionLostError(GymError):
    """A session that this server does not have, or no longer."""


class SessionLifetimes:
    """Calls `end_session` once for every session that is over."""

    def __init__(
        self,
        end_session: Callable[[str], Awaitable[None]],
        ttl_s: float | None,
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_shared` says that several processes serve the same sessions, so that a strange one may be another's."""
        self._is_shared = is_shared
        self._end_session = end_session
        self._ttl_s = ttl_s
        self._last_seen: dict[str, float] = {}
        self._next_sweep = time.monotonic()

    async def request_came(self, scope: Scope) -> None:
        """Note that a session is in use, and end those that nobody has used for too long."""
        session_id = scope["session"][SESSION_ID_KEY]
        is_known = self._last_seen.pop(session_id, None) is not None
        if scope[SESSION_RETURNS_KEY] and not is_known and not self._is_shared:
            _refuse_unless_it_needs_none(scope)
        self._last_seen[session_id] = time.monotonic()  # the longest unseen stay in front
        await self._end_idle_sessions()

    async def request_answered(self, scope: Scope, status: int) -> None:
        """End the session if this was its last request; a `/verify` that failed can be asked again."""
        is_verified = scope["path"] == "/verify" and status < HTTPStatus.BAD_REQUEST
        if scope["path"] == "/end_session" or (is_verified and _says_it_is_over(scope)):
            await self._end(scope["session"][SESSION_ID_KEY])

    async def _end_idle_sessions(self) -> None:
        now = time.monotonic()
        if self._ttl_s is None or now < self._next_sweep:
            return
        self._next_sweep = now + min(_SWEEP_EVERY_S, self._ttl_s / 2)
        idle = []
        for session_id, seen in self._last_seen.items():
            if now - seen <= self._ttl_s:
                break
            idle.append(session_id)
        for session_id in idle:
            await self._end(session_id)

    async def _end(self, session_id: str) -> None:
        if self._last_seen.pop(session_id, None) is None:
            return
        try:
            await self._end_session(session_id)
        except Exception:  # the answer has been sent; what failed is the tidying up
            logger.exception("end_session failed for session %s", session_id)


def is_over_mcp(scope: Scope) -> bool:
    """Return whether a request is for MCP: it names its session itself, and the request for the tool is what counts."""
    return _OVER_MCP.match(scope["path"]) is not None


def _refuse_unless_it_needs_none(scope: Scope) -> None:
    if scope["method"] == "POST" and scope["path"] not in _NEEDS_NO_SESSION:
        raise SessionLostError(
            f"{scope['path']} was called in a session that this server does not have: it was restarted since, or the "
            "session is over. The rollout has to begin anew"
        )


def _says_it_is_over(scope: Scope) -> bool:
    return any(name == _END_SESSION_HEADER_BYTES for name, _ in scope["headers"])
