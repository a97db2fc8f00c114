"""What is tried again, how often and after which pauses: every wait is bounded, every try counted.

`Backoff` is the one formula of pauses that double up to a bound; who uses it says how much of a pause is left to
chance. A `RetryPolicy` is a value; `Tries` counts one call's failures against it. Between calls the whole pause is
drawn ("full jitter"), so that a thousand callers who failed together do not come back together.
"""

import logging
import random
import time
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_QUIET_S = 30.0
_MOST_DOUBLINGS = 64
_last_warning: dict[str, float] = {}


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from one failure to the next, up to a bound."""

    first_s: float
    longest_s: float
    certain: float = 1.0
    """The part of a pause that is not left to chance: 1 is the whole of it, 0 draws it from zero up."""

    def after(self, failures: int) -> float:
        """Seconds to wait after that many failures."""
        whole = min(self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), self.longest_s)
        return float(whole if self.certain == 1 else whole * random.uniform(self.certain, 1.0))  # noqa: S311, RUF100


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
        return Backoff(self.first_delay_s, self.max_delay_s, certain=0.0).after(failures)


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

    def excuse(self, seconds: float) -> None:
        """Do not count time that the call has spent on something else than its failures."""
        if self._first_failure_s is not None:
            self._first_failure_s += seconds

    def warn_of_first(self, place: str, what: str) -> None:
        """Log a call's first failure; about one place at most once in a while, however many calls fail."""
        now = time.monotonic()
        if self.failures != 1 or now - _last_warning.get(place, -_QUIET_S) < _QUIET_S:
            return
        _last_warning[place] = now
        policy = self.policy
        logger.warning("%s. Trying again, up to %d times within %g s", what, policy.max_tries - 1, policy.max_elapsed_s)
