"""When a run ends before all of its rollouts were tried.

One failure never ends a run. What ends it is the user, the clock, or failures that show that going on
would only waste time; what was not finished is then left to be resumed.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from nemo_gym.rollouts.record import FailureClass, Outcome, RolloutKey
from nemo_gym.terminal import shown

JUDGED_FROM = 20
"""Finished rollouts below which the fraction of failures says too little."""
DOOMED_AFTER = 3
"""Different rollouts of an agent that must fail for want of a key or a model."""

_SETTING_AT_FAULT = tuple(kind for kind in FailureClass if kind.dooms_agent)
_SHOWN_LENGTH = 1_000


class StopKind(StrEnum):
    """Why a run ended early."""

    INTERRUPTED = "interrupted"
    RUN_TIMEOUT = "run_timeout"
    DOOMED_AGENT = "doomed_agent"
    FAIL_FAST = "fail_fast"
    TOO_MANY_FAILURES = "too_many_failures"
    SERVER_DOWN = "server_down"


class Stop(NamedTuple):
    """A reason to end the run, and the same in words."""

    kind: StopKind
    message: str


class Verdict(NamedTuple):
    """What the rules look at: one attempt at a rollout."""

    agent: str
    key: RolloutKey | None
    """None for a row without indices, which then counts as a rollout of its own."""
    outcome: Outcome
    is_final: bool
    """False when the rollout will be tried again in this run."""
    failure_class: object = None
    message: str = ""


@dataclass
class StopRules:
    """Watches the attempts of one run."""

    fail_fast: bool = False
    max_failure_fraction: float | None = None
    finished: int = 0
    """Rollouts that succeeded, or failed for good."""
    failed: int = 0
    _proven: set[str] = field(default_factory=set)
    _doomed: dict[str, list[RolloutKey | None]] = field(default_factory=dict)
    _last_failure: str = ""

    def after(self, verdict: Verdict) -> Stop | None:
        """Count one attempt; the reason to stop now, if there is one."""
        if verdict.outcome is Outcome.DISCARDED:
            return None
        self.finished += verdict.is_final
        if verdict.outcome is Outcome.SUCCESS:
            self._proven.add(verdict.agent)
            return self._if_too_many_failed()
        self.failed += verdict.is_final
        self._last_failure = verdict.message
        return self._if_doomed(verdict) or self._if_failing_fast(verdict) or self._if_too_many_failed()

    def _if_doomed(self, verdict: Verdict) -> Stop | None:
        is_setting = isinstance(verdict.failure_class, str) and verdict.failure_class in _SETTING_AT_FAULT
        if not is_setting or verdict.agent in self._proven:
            return None
        keys = self._doomed.setdefault(verdict.agent, [])
        if verdict.key is None or verdict.key not in keys:
            keys.append(verdict.key)
        if len(keys) < DOOMED_AFTER:
            return None
        what = "the key was refused" if verdict.failure_class == FailureClass.AUTH else "the model was not found"
        return Stop(
            StopKind.DOOMED_AGENT,
            f"{what} in {len(keys)} rollouts of agent {shown(verdict.agent)!r} and none succeeded, so none will: "
            f"{shown(verdict.message, _SHOWN_LENGTH)}",
        )

    def _if_failing_fast(self, verdict: Verdict) -> Stop | None:
        if not (self.fail_fast and verdict.is_final):
            return None
        return Stop(
            StopKind.FAIL_FAST, f"a rollout failed and fail_fast is on: {shown(verdict.message, _SHOWN_LENGTH)}"
        )

    def _if_too_many_failed(self) -> Stop | None:
        allowed = self.max_failure_fraction
        if allowed is None or self.finished < JUDGED_FROM or self.failed <= allowed * self.finished:
            return None
        return Stop(
            StopKind.TOO_MANY_FAILURES,
            f"{self.failed} of {self.finished} finished rollouts failed, more than max_failure_fraction={allowed:g} "
            f"allows; the last failure: {shown(self._last_failure, _SHOWN_LENGTH)}",
        )
