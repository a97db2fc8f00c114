"""When sessions end: after the episode's `/verify`, when somebody says so, or when nobody comes back.

Only servers that keep something per session, and therefore override `end_session`, are watched. A caller
who comes back to a session that such a server does not have (it was restarted, or the session is over) is
refused: what it would be told, and above all the verdict, would be about a session that never was.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.errors import GymError
from nemo_gym.servers.sessions import SESSION_ID_KEY, SESSION_RETURNS_KEY

logger = logging.getLogger(__name__)

END_SESSION_HEADER = "x-nemo-gym-end-session"
"""An agent sends it with `/verify` to say that the episode is over."""

_END_SESSION_HEADER_BYTES = END_SESSION_HEADER.encode()
_SWEEP_EVERY_S = 30.0
_NEEDS_NO_SESSION = frozenset({"/seed_session", "/end_session", "/aggregate_metrics"})


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

    async def request_answered(self, scope: Scope) -> None:
        """End the session if this was its last request."""
        if scope["path"] == "/end_session" or (scope["path"] == "/verify" and _says_it_is_over(scope)):
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


class SessionLifetimeMiddleware:
    """Tells `SessionLifetimes` what comes and goes. Belongs inside the session layer."""

    def __init__(self, app: ASGIApp, lifetimes: SessionLifetimes) -> None:
        self.app = app
        self.lifetimes = lifetimes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self.lifetimes.request_came(scope)
        await self.app(scope, receive, send)
        await self.lifetimes.request_answered(scope)


def _refuse_unless_it_needs_none(scope: Scope) -> None:
    if scope["method"] == "POST" and scope["path"] not in _NEEDS_NO_SESSION:
        raise SessionLostError(
            f"{scope['path']} was called in a session that this server does not have: it was restarted since, or the "
            "session is over. The rollout has to begin anew"
        )


def _says_it_is_over(scope: Scope) -> bool:
    return any(name == _END_SESSION_HEADER_BYTES for name, _ in scope["headers"])
