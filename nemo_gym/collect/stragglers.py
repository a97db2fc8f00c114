"""What ends the tail of a run, and its repeats: rollouts that are too slow, and tasks that are decided.

`finish_at` is about the last of a run: when that fraction is done and nothing is left to start, those still in flight
get a grace and then end as stragglers, without a score. `stop_repeats_when` leaves out repeats of tasks that are
decided (`runs.repeats` knows when).
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from nemo_gym.collect.failures import Attempt, PendingAttempt
from nemo_gym.collect.policies import Policy
from nemo_gym.collect.stopping import Stop
from nemo_gym.runs.manifest import RunManifest
from nemo_gym.runs.record import Failure, FailureClass, Outcome, Row, agent_name_of, key_or_none, outcome_of
from nemo_gym.runs.repeats import NotNeeded, RepeatRule, told_of

if TYPE_CHECKING:
    from nemo_gym.collect.dispatch import Dispatch

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25


class FinishAt(Policy):
    """Gives up on what is still in flight some time after a fraction of the run is done."""

    def __init__(self, fraction: float, grace_s: float, total: int, done: int) -> None:
        """Of `total` rollouts `done` need no more work when the run begins."""
        self._fraction, self._grace_s, self._total, self._done = fraction, grace_s, total, done
        self._ends_s: float | None = None

    def begin(self, dispatch: "Dispatch") -> None:
        """Look at what `dispatch` has in flight."""
        self._dispatch = dispatch

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """Count what needs no more work."""
        self._done += attempt.is_final
        return None

    async def act(self) -> None:
        """Wait for the fraction, then for the grace, then give up on what is in flight, also what is tried again."""
        loop = asyncio.get_running_loop()
        while not self._is_reached():  # noqa: ASYNC110 - what it depends on changes with every rollout
            await asyncio.sleep(_LOOK_EVERY_S)
        self._ends_s = loop.time() + self._grace_s
        if self._dispatch.in_flight:
            logger.info(
                "finish_at=%g is reached: the %d rollouts in flight get %g s",
                self._fraction,
                self._dispatch.in_flight,
                self._grace_s,
            )
        await asyncio.sleep(self._grace_s)
        while True:
            for pending in self._dispatch.attempts_in_flight:
                self._dispatch.give_up(pending, self._failure(pending.agent))
            await asyncio.sleep(_LOOK_EVERY_S)

    def notice(self) -> str:
        """How long what is in flight has left."""
        if self._ends_s is None:
            return ""
        left_s = max(0.0, self._ends_s - asyncio.get_running_loop().time())
        return f"finish_at={self._fraction:g} is reached, {left_s:.0f} s left"

    def _is_reached(self) -> bool:
        done = self._done + self._dispatch.left_out
        return done >= self._fraction * self._total and self._dispatch.is_draining

    def _failure(self, agent: str) -> Failure:
        return Failure(
            FailureClass.STRAGGLER,
            f"still in flight straggler_grace_s={self._grace_s:g} after finish_at={self._fraction:g} of the run was "
            "done; it is not scored, and +resume_from_cache=true without +finish_at makes it again",
            server=agent,
        )


class StopRepeats(Policy):
    """Leaves out the repeats of tasks that are decided."""

    def __init__(self, rule: RepeatRule, not_needed: NotNeeded, manifest: RunManifest | None) -> None:
        """`rule` knows what earlier rollouts of the run were; `not_needed` is added to, and told to the manifest."""
        self._rule, self._not_needed, self._manifest = rule, not_needed, manifest

    def leaves_out(self, row: Row) -> bool:
        """Whether the task of a row is decided."""
        key = key_or_none(row)
        if key is None or key.task_index not in self._rule.decided:
            return False
        tasks = self._not_needed.setdefault(agent_name_of(row) or "", {})
        tasks.setdefault(key.task_index, []).append(key.rollout_index)
        return True

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """Count a rollout that ended well."""
        key = key_or_none(attempt.row)
        if key is not None and attempt.result is not None and outcome_of(attempt.result) is Outcome.SUCCESS:
            self._rule.add(key.task_index, attempt.result)
        return None

    async def act(self) -> None:
        """When the run is over, say what was not needed."""
        try:
            await asyncio.Event().wait()
        finally:
            if self._manifest is not None:
                self._manifest.not_needed = told_of(self._not_needed, self._rule)
