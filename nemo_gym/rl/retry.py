"""How often a group is tried again, how long its parts may take, and how often that happened."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.rl.failures import FailureClass

_BUDGETS = ("max_infra_attempts", "max_data_attempts", "max_gym_row_attempts")


@dataclass(frozen=True)
class RolloutRetryPolicy:
    """Budgets of one group; those for infrastructure and data failures are used up independently."""

    max_infra_attempts: int
    """Attempts at a group that may end in an infrastructure failure, the last one included."""
    max_data_attempts: int
    """The same for data failures."""
    max_gym_row_attempts: int
    """How often one row is sent to the servers within one attempt at its group."""
    backoff_base_s: float = 1.0
    """Pause after the first infrastructure failure; each later one is twice as long."""
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        for name in _BUDGETS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; there must be at least 1 attempt")

    @classmethod
    def single_attempt(cls, **overrides: Any) -> "RolloutRetryPolicy":
        """No second attempt at anything, but for what `overrides` say."""
        return cls(**{**dict.fromkeys(_BUDGETS, 1), **overrides})

    def backoff_s(self, failures: int) -> float:
        """The pause after that many infrastructure failures."""
        return float(min(self.backoff_base_s * 2.0 ** min(failures - 1, 64), self.max_backoff_s))


@dataclass(frozen=True)
class RolloutTimeouts:
    """How long things may take, in seconds; None sets no limit beyond those of the HTTP client."""

    rollout_s: float | None = None
    """One group on the servers' path, all its dispatches together."""
    generation_s: float | None = None
    """One turn of the policy on the native path."""
    env_s: float | None = None
    """One step of the environment on the native path."""


@dataclass
class RolloutStats:
    """What became of the groups so far; counters by exception class beside the totals."""

    completed: int = 0
    gym_row_redispatches: int = 0
    retries: dict[FailureClass, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in FailureClass}
    )
    given_up: dict[FailureClass, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in FailureClass}
    )

    def as_metrics(self) -> dict[str, float]:
        """The counters under the names that go to a tracker."""
        metrics = {
            "rollout/completed_total": float(self.completed),
            "rollout/gym_row_redispatch_total": float(self.gym_row_redispatches),
        }
        for family, counter in self._families():
            metrics[f"rollout/{family}"] = float(counter.total())
            metrics.update({f"rollout/{family}/{name}": float(count) for name, count in sorted(counter.items())})
        return metrics

    def _families(self) -> list[tuple[str, Counter[str]]]:
        return [
            ("redispatch_total", self.retries[FailureClass.INFRA]),
            ("data_retry_total", self.retries[FailureClass.DATA]),
            ("infra_failures_total", self.given_up[FailureClass.INFRA]),
            ("data_failures_total", self.given_up[FailureClass.DATA]),
        ]


@dataclass
class Budget:
    """The attempts at one group, counted against a policy."""

    policy: RolloutRetryPolicy
    used: Counter[FailureClass] = field(default_factory=Counter)

    def pause_after(self, kind: FailureClass) -> float | None:
        """Count a failure; the seconds to wait before the next attempt, or None when there is none."""
        self.used[kind] += 1
        if kind is FailureClass.DATA:
            return 0.0 if self.used[kind] < self.policy.max_data_attempts else None
        if self.used[kind] >= self.policy.max_infra_attempts:
            return None
        return self.policy.backoff_s(self.used[kind])
