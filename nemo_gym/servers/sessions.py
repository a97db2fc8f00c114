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
import os
import re
import secrets
import time
import weakref
from base64 import urlsafe_b64decode
from binascii import b2a_base64
from collections.abc import Awaitable, Callable
from copy import deepcopy
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.errors import GymError
from nemo_gym.http.request import json_bytes
from nemo_gym.keys import END_SESSION_HEADER
from nemo_gym.workers.cores import WORKS_FOR

logger = logging.getLogger(__name__)

SESSION_ID_KEY = "session_id"
SESSION_RETURNS_KEY = "nemo_gym_session_returns"
"""In the ASGI scope: whether the caller brought a cookie of ours, and so expects to be known."""
MAX_AGE_S = 14 * 24 * 60 * 60
REMEMBERED_COOKIES = 512
"""How many cookies a server remembers at first; one that comes back and was forgotten makes room for one more."""
MOST_REMEMBERED_COOKIES = 16_384
_ATTRIBUTES = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax".encode()
_SIGNATURE_BYTES = 24
_FOR_URLS = bytes.maketrans(b"+/", b"-_")
_DRAWN_AT_ONCE = 64
_END_SESSION_HEADER_BYTES = END_SESSION_HEADER.encode()
_SWEEP_EVERY_S = 30.0
_OVER_MCP = re.compile(r"/mcp(/|\Z)")
"""Calls that say in themselves whose session they are made in; the tool's own request is the one that counts."""
_NEEDS_NO_SESSION = frozenset({"/seed_session", "/end_session", "/aggregate_metrics"})


class _Kept:
    """A session between two requests."""

    __slots__ = ("cookie", "data", "header")

    def __init__(self, data: dict[str, Any], cookie: bytes, header: tuple[bytes, bytes]) -> None:
        """`data` is never handed out itself: requests get copies. `header` brings `cookie` back to the caller."""
        self.data, self.cookie, self.header = data, cookie, header


class _Drawn(list[_Kept]):
    """Sessions that nobody has begun yet: to make many at once takes half as long for each.

    A copy of this process must not begin the same ones.
    """

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        _ALL_DRAWN.append(weakref.ref(self, _ALL_DRAWN.remove))


_ALL_DRAWN: list[weakref.ref[_Drawn]] = []


def _draw_no_more() -> None:
    for reference in _ALL_DRAWN:
        drawn = reference()
        if drawn is not None:
            drawn.clear()


os.register_at_fork(after_in_child=_draw_no_more)

Session = tuple[dict[str, Any], _Kept, bool]
"""The session of one request: what handlers see and may change, how it began, and whether that was with this request.

One that leaves as it came, or as it was made, needs no other cookie.
"""


class Sessions:
    """Reads and writes the session cookies of one server."""

    def __init__(self, cookie_name: str, secret: str | None = None, *, take_turns: bool = False) -> None:
        """`take_turns` says that work of this server waits for a processor, one of its sessions after the other."""
        self.cookie_name = cookie_name
        self._take_turns = take_turns
        self._marker = f"{cookie_name}=".encode("latin-1", "replace")
        secret = secret or secrets.token_hex(32)
        self._key = blake2b(f"{cookie_name}\0{secret}".encode(), digest_size=blake2b.MAX_KEY_SIZE).digest()
        # A rollout brings the same cookie several times: it is read once, however many rollouts are under way.
        self._known: dict[bytes, _Kept] = {}
        self._known_before: dict[bytes, _Kept] = {}
        self._room = REMEMBERED_COOKIES
        self._drawn = _Drawn()

    def open(self, scope: Scope) -> Session:
        """The session a request belongs to, a new one when it brings none of ours; handlers find it in `scope`."""
        kept = None
        for name, value in scope["headers"]:
            if name == b"cookie" and value.find(self._marker) >= 0:
                cookie = self._cookie(value)
                if cookie is not None:
                    kept = self._known.get(cookie) or self._known_before.get(cookie) or self._read(cookie)
                break
        is_new = kept is None
        if kept is None:
            if not self._drawn:
                self._draw()
            kept = self._drawn.pop()
        data = kept.data
        data = data.copy() if len(data) == 1 else deepcopy(data)  # one entry is the id, which is text
        if SESSION_ID_KEY not in data:
            data[SESSION_ID_KEY] = _as_uuid(os.urandom(16).hex())
        scope["session"] = data
        scope[SESSION_RETURNS_KEY] = not is_new
        if self._take_turns:
            WORKS_FOR.set((self.cookie_name, data[SESSION_ID_KEY]))
        return data, kept, is_new

    def header(self, session: Session) -> tuple[bytes, bytes]:
        """The header of an answer that brings the session back."""
        data, kept, is_new = session
        if data != kept.data:
            text = json_bytes(data)
            kept = self._made(text, data.copy() if len(data) == 1 else json.loads(text))
        elif not is_new:
            return kept.header
        self._keep(kept)
        return kept.header

    def _cookie(self, header: bytes) -> bytes | None:
        """The session's cookie among those of a header."""
        if header.startswith(self._marker) and b";" not in header:  # as colocated agents send it
            return header[len(self._marker) :]
        found = cookie_parser(header.decode("latin-1")).get(self.cookie_name)
        return None if found is None else found.encode("latin-1", "replace")

    def _read(self, cookie: bytes) -> _Kept | None:
        """The session in a cookie, or None when we did not sign it."""
        payload, _, signature = cookie.partition(b".")
        if not hmac.compare_digest(signature, self._signature(payload)):
            return None
        self._room = min(self._room + 1, MOST_REMEMBERED_COOKIES)
        kept = self._kept(cookie, json.loads(urlsafe_b64decode(payload)))
        self._keep(kept)
        return kept

    def _draw(self) -> None:
        """Make new sessions; asking the system for randomness takes as long for many as for one."""
        digits = os.urandom(16 * _DRAWN_AT_ONCE).hex()
        for start in range(0, len(digits), 32):
            data = {SESSION_ID_KEY: _as_uuid(digits[start : start + 32])}
            self._drawn.append(self._made(json_bytes(data), data))

    def _made(self, text: bytes, data: dict[str, Any]) -> _Kept:
        """A session with a cookie that holds `text`, the JSON of `data`."""
        payload = b2a_base64(text, newline=False).translate(_FOR_URLS)
        return self._kept(b"%b.%b" % (payload, self._signature(payload)), data)

    def _signature(self, payload: bytes) -> bytes:
        return blake2b(payload, key=self._key, digest_size=_SIGNATURE_BYTES).hexdigest().encode()

    def _kept(self, cookie: bytes, data: dict[str, Any]) -> _Kept:
        return _Kept(data, cookie, (b"set-cookie", b"%b%b; %b" % (self._marker, cookie, _ATTRIBUTES)))

    def _keep(self, kept: _Kept) -> None:
        if 2 * len(self._known) >= self._room:  # half of them at once: finding the oldest takes longer every time
            self._known_before, self._known = self._known, {}
        self._known[kept.cookie] = kept


def _as_uuid(digits: str) -> str:
    """A random UUID, without the class around it."""
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


class SessionLifetimeMiddleware:
    """Tells `SessionLifetimes` what comes and goes. Belongs inside the session layer."""

    def __init__(self, app: ASGIApp, lifetimes: SessionLifetimes) -> None:
        self.app = app
        self.lifetimes = lifetimes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or _OVER_MCP.match(scope["path"]):
            await self.app(scope, receive, send)
            return
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self.lifetimes.request_came(scope)
        await self.app(scope, receive, noting_send)
        await self.lifetimes.request_answered(scope, status)


def _refuse_unless_it_needs_none(scope: Scope) -> None:
    if scope["method"] == "POST" and scope["path"] not in _NEEDS_NO_SESSION:
        raise SessionLostError(
            f"{scope['path']} was called in a session that this server does not have: it was restarted since, or the "
            "session is over. The rollout has to begin anew"
        )


def _says_it_is_over(scope: Scope) -> bool:
    return any(name == _END_SESSION_HEADER_BYTES for name, _ in scope["headers"])
