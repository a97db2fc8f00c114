"""What is tried again, how often and how long: every wait is bounded, every try counted.

A policy is a value; `Tries` counts one call's failures against it. The pause before the next try is
drawn between zero and a bound that doubles ("full jitter"), so that a thousand callers who failed
together do not come back together.
"""

import logging
import random
import time
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_QUIET_S = 30.0
_last_warning: dict[str, float] = {}


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and how patiently, a call is tried again."""

    max_tries: int = 200
    first_delay_s: float = 0.25
    max_delay_s: float = 10.0
    max_elapsed_s: float = 600.0
    """No try starts later than this after the first failure: a slow call that fails gets its second chance."""

    def delay_s(self, failures: int) -> float:
        """A random pause after that many failures."""
        bound = min(self.first_delay_s * 2.0 ** min(failures - 1, 64), self.max_delay_s)
        return random.uniform(0, bound)  # noqa: S311, RUF100


@dataclass
class Tries:
    """The tries of one call."""

    policy: RetryPolicy
    failures: int = 0
    started_s: float = field(default_factory=time.monotonic)
    _first_failure_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.started_s

    def pause_after_failure(self, at_least_s: float = 0.0) -> float | None:
        """Count a failure and say how long to wait before the next try; None when there is none.

        `at_least_s` is what the peer asked for. It is granted as far as the remaining time allows.
        """
        now = time.monotonic()
        self.failures += 1
        if self._first_failure_s is None:
            self._first_failure_s = now
        remaining_s = self.policy.max_elapsed_s - (now - self._first_failure_s)
        if self.failures >= self.policy.max_tries or remaining_s <= 0:
            return None
        wanted_s = self.policy.delay_s(self.failures)
        if at_least_s > 0:
            wanted_s = max(wanted_s, at_least_s + random.uniform(0, self.policy.first_delay_s))  # noqa: S311, RUF100
        return min(wanted_s, remaining_s)

    def warn_of_first(self, place: str, what: str) -> None:
        """Log a call's first failure; about one place at most once in a while, however many calls fail."""
        now = time.monotonic()
        if self.failures != 1 or now - _last_warning.get(place, -_QUIET_S) < _QUIET_S:
            return
        _last_warning[place] = now
        policy = self.policy
        logger.warning("%s. Trying again, up to %d times within %g s", what, policy.max_tries - 1, policy.max_elapsed_s)
