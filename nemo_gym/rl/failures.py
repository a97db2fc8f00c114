"""Why a group of rollouts could not be had, in two classes, and how often it is tried again.

INFRA failures say nothing about the prompt: the same request may succeed later, elsewhere. DATA failures come
from the prompt, the policy's answer or a bug: trying the same again helps only by chance. The two are counted,
and tried again, separately.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from nemo_gym.errors import GymError
from nemo_gym.http.errors import ServerCallError, ServerResponseError
from nemo_gym.retry import Backoff

_MAX_CAUSES = 8
_RETRYABLE_STATUSES = (408, 429)
_RAY_INFRASTRUCTURE = frozenset(
    {
        "RayActorError",
        "ActorDiedError",
        "ActorUnavailableError",
        "WorkerCrashedError",
        "LocalRayletDiedError",
        "NodeDiedError",
        "ObjectLostError",
        "ObjectStoreFullError",
        "OutOfMemoryError",
        "OwnerDiedError",
        "GetTimeoutError",
        "RaySystemError",
        "RpcError",
    }
)
_BUDGETS = ("max_infra_attempts", "max_data_attempts", "max_gym_row_attempts")


class RolloutFailure(GymError):  # noqa: N818
    """No group came about."""


class RolloutInfraFailure(RolloutFailure):
    """Something between the trainer and the completions failed; the prompt is not at fault."""


class RolloutTimeout(RolloutInfraFailure):
    """A generation or an environment step took longer than allowed."""


class GenerationUnavailable(RolloutInfraFailure):
    """The generator could not be reached, or broke."""


class NoHealthyShards(RolloutInfraFailure):
    """No part of the generator that could take a request is left; for generators to raise."""


class GymTransportError(RolloutInfraFailure):
    """Rows were sent to the servers and never came back."""


class RolloutDataFailure(RolloutFailure):
    """This prompt, or what was generated for it, cannot be trained on."""


class NonContiguousTokensError(RolloutDataFailure, AssertionError):
    """The prompt of a turn does not begin with the tokens of the turns before it."""


class NoGenerationDataError(RolloutDataFailure, ValueError):
    """A result without a single token of the policy, as an over-long prompt gives."""


class IncompleteTokenDataError(RolloutDataFailure, KeyError):
    """An item has part of its token ids and log-probs only."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class RolloutRedispatchExhausted(RuntimeError):  # noqa: N818
    """Prompt after prompt was dropped for failures of the infrastructure: going on would only drop more."""


class RolloutStall(RuntimeError):  # noqa: N818
    """No group has come for too long."""


class RolloutOutcome(StrEnum):
    """What became of a prompt that was to fill a place in a buffer."""

    COMMITTED = "committed"
    SKIPPED = "skipped"


class FailureClass(StrEnum):
    """Which budget a failure uses up."""

    INFRA = "infra"
    DATA = "data"


def classify_rollout_failure(error: BaseException) -> FailureClass:
    """Whether `error`, or what caused it, is one of the infrastructure; whatever is unknown counts as DATA."""
    if isinstance(error, RolloutDataFailure):
        return FailureClass.DATA
    for link in _causes(error):
        if isinstance(link, aiohttp.ClientResponseError):
            return FailureClass.INFRA if is_retryable_status(innermost_status(link)) else FailureClass.DATA
        if _is_infrastructure(link):
            return FailureClass.INFRA
    return FailureClass.DATA


def innermost_status(error: aiohttp.ClientResponseError) -> int:
    """The status that the failure began with, however many servers passed it on."""
    return error.error_status if isinstance(error, ServerResponseError) else error.status


def is_retryable_status(status: int) -> bool:
    """Whether an answer with this status may turn out well another time."""
    return status >= 500 or status in _RETRYABLE_STATUSES


def is_ray_error(error: BaseException) -> bool:
    """Whether Ray itself raised it."""
    return any(kind.__module__.split(".")[0] == "ray" for kind in type(error).__mro__)


def _is_infrastructure(error: BaseException) -> bool:
    known = (
        RolloutInfraFailure,
        ServerCallError,
        TimeoutError,
        ConnectionError,
        aiohttp.ClientConnectionError,
        aiohttp.ClientPayloadError,
    )
    if isinstance(error, known):
        return True
    return is_ray_error(error) and any(kind.__name__ in _RAY_INFRASTRUCTURE for kind in type(error).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _MAX_CAUSES:
        seen.add(id(link))
        yield link
        link = link.__cause__


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
    max_skipped_prompts: int = 0
    """Prompts that may be left out for data failures over the life of a manager, when groups go to a buffer."""
    max_consecutive_dropped_prompts: int = 0
    """Prompts in a row that may be left out for infrastructure failures, when groups go to a buffer."""

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
        return Backoff(self.backoff_base_s, self.max_backoff_s).after(failures)


@dataclass(frozen=True)
class RolloutTimeouts:
    """How long things may take, in seconds; None sets no limit beyond those of the HTTP client."""

    rollout_s: float | None = None
    """One row on the servers' path, all its dispatches together; the rows of a group begin at the same time."""
    generation_s: float | None = None
    """One turn of the policy on the native path."""
    env_s: float | None = None
    """One step of the environment on the native path."""


@dataclass
class RolloutStats:
    """What became of the groups so far; counters by exception class beside the totals."""

    completed: int = 0
    committed: int = 0
    """Groups that went to a buffer."""
    skipped: int = 0
    """Prompts left out for data failures."""
    consecutive_drops: int = 0
    """Prompts left out for infrastructure failures since the last group that was committed."""
    most_consecutive_drops: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    """Prompts left out for infrastructure failures, by the exception's class."""
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
            "rollout/committed_total": float(self.committed),
            "rollout/skipped_total": float(self.skipped),
            "rollout/max_consecutive_infra_drops": float(self.most_consecutive_drops),
            "rollout/gym_row_redispatch_total": float(self.gym_row_redispatches),
        }
        for family, counter in self._families():
            metrics[f"rollout/{family}"] = float(counter.total())
            metrics.update({f"rollout/{family}/{name}": float(count) for name, count in sorted(counter.items())})
        return metrics

    def drop(self, error: Exception) -> None:
        """Count a prompt that is left out because of the infrastructure."""
        self.drops[type(error).__name__] += 1
        self.consecutive_drops += 1
        self.most_consecutive_drops = max(self.most_consecutive_drops, self.consecutive_drops)

    def commit(self) -> None:
        """Count a group that went to a buffer."""
        self.committed += 1
        self.consecutive_drops = 0

    def _families(self) -> list[tuple[str, Counter[str]]]:
        return [
            ("redispatch_total", self.retries[FailureClass.INFRA]),
            ("data_retry_total", self.retries[FailureClass.DATA]),
            ("infra_failures_total", self.given_up[FailureClass.INFRA]),
            ("data_failures_total", self.given_up[FailureClass.DATA]),
            ("infra_drops_total", self.drops),
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
