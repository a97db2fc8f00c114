"""Which of several endpoints a session talks to.

A session stays where it began, so that the endpoint finds the conversation's beginning in its prefix
cache. A new one goes to the endpoint with the fewest requests under way, and among equals to the one with
the fewest sessions. Several processes do not see each other's load: there, a hash of the session
decides, the same in all of them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from nemo_gym.server_utils import num_serving_processes


def runs_in_several_processes() -> bool:
    """Whether this process is one of several workers or replicas of its server."""
    return num_serving_processes() > 1


class _Home(NamedTuple):
    endpoint: int
    last_used_s: float


@dataclass
class SessionAffinity:
    """Remembers where sessions live, and forgets those nobody has heard of for `ttl_s` seconds."""

    ttl_s: float | None = None
    by_hash: bool = field(default_factory=runs_in_several_processes)
    clock: Callable[[], float] = time.monotonic
    _homes: dict[str, _Home] = field(default_factory=dict)
    """The longest unused in front."""
    _sessions: Counter[int] = field(default_factory=Counter)
    _under_way: Counter[int] = field(default_factory=Counter)

    @contextmanager
    def endpoint_for(self, session_id: str, num_endpoints: int) -> Iterator[int]:
        """The number of the session's endpoint, which counts as busy within the block."""
        endpoint = self._chosen(session_id, num_endpoints)
        self._under_way[endpoint] += 1
        try:
            yield endpoint
        finally:
            self._under_way[endpoint] -= 1

    @property
    def num_sessions(self) -> int:
        """How many sessions are remembered."""
        return len(self._homes)

    def _chosen(self, session_id: str, num_endpoints: int) -> int:
        if num_endpoints == 1:
            return 0
        if self.by_hash:
            return int.from_bytes(sha256(str(session_id).encode()).digest()[:8], "big") % num_endpoints
        now = self.clock()
        self._forget_unused(now)
        home = self._homes.pop(session_id, None)
        if home is None or home.endpoint >= num_endpoints:
            endpoint = min(range(num_endpoints), key=lambda i: (self._under_way[i], self._sessions[i], i))
            self._sessions[endpoint] += 1
        else:
            endpoint = home.endpoint
        self._homes[session_id] = _Home(endpoint, now)
        return endpoint

    def _forget_unused(self, now: float) -> None:
        if self.ttl_s is None:
            return
        while self._homes:
            session_id, home = next(iter(self._homes.items()))
            if now - home.last_used_s <= self.ttl_s:
                return
            del self._homes[session_id]
            self._sessions[home.endpoint] -= 1
