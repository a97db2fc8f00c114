"""What may go along with the rollouts of a run and steer them: budgets, caps that adapt, stragglers, repeats, a person.

A policy sees every attempt start and end. It may hold back what has not started, leave out rollouts that are not needed
any more, ask for the run to end, and act in the meantime: through the dispatcher it can change caps and give up on
rollouts in flight. None of them knows of the others; the dispatcher asks them one after another.

The short ones are here. `FinishAt` is about the last of a run: when that fraction is done and nothing is left to start,
those still in flight get a grace and then end as stragglers, without a score. `StopRepeats` leaves out repeats of tasks
that are decided (`runs.repeats` knows when). `RowOrder` is for runs whose order is not that of the input: what takes
longest goes first, so that the end of a run does not wait for it alone. How long a task takes is known from an earlier
run, or from its repeats that have ended; of tasks of which nothing is known one repeat goes before all else, and the
others wait until it has ended, or has taken longer than any task that is known. Where tasks may be decided before all
of their repeats are made, each task's first repeat goes first, then each one's second. Rows stay in their file until it
is their turn: kept of each are the place where it is and which comes next, 16 bytes.
"""

import asyncio
import heapq
import logging
import math
from array import array
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING

from nemo_gym.collect.failures import Attempt, PendingAttempt
from nemo_gym.collect.stopping import Stop
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.runs.manifest import RunManifest
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.record import Failure, FailureClass, Outcome, Row, agent_name_of, key_or_none, outcome_of
from nemo_gym.runs.repeats import NotNeeded, RepeatRule, told_of
from nemo_gym.runs.resume import Plan

if TYPE_CHECKING:
    from nemo_gym.collect.dispatch import Dispatch
    from nemo_gym.collect.progress import Progress

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_NONE = -1


class Policy:
    """Goes along with one run; every method may be left as it is, and then has no effect."""

    options: frozenset[str] = frozenset()
    """Names of options that it obeys and that may be changed while it goes along."""

    def follow(self, progress: "Progress") -> None:
        """What shows how the run is doing; told before the run begins."""

    def begin(self, dispatch: "Dispatch") -> None:
        """The run begins, steered through `dispatch`, whose event loop runs."""

    async def act(self) -> None:
        """Runs beside the rollouts, and is cancelled when they have ended."""
        await asyncio.Event().wait()

    def holds_back(self) -> bool:
        """Whether nothing may start now; `Dispatch.look_again` says that this may have changed.

        A policy that holds back while nothing is in flight has to see to it that the run goes on, or ends.
        """
        return False

    def leaves_out(self, row: Row) -> bool:
        """Whether a rollout that would start now is not needed any more; then it is not sent, and not recorded."""
        return False

    def started(self, pending: PendingAttempt) -> None:
        """An attempt was sent."""

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """An attempt ended, well or not; a reason to start no more, if there is one. What is in flight then ends."""
        return None

    def change(self, config: RolloutCollectionConfig, changed: Collection[str]) -> None:
        """A person has changed options of the run: those named in `changed`, at least one of them in `options`.

        Raises:
            ConfigError: that cannot be done now; nothing has changed then.
        """

    def notice(self) -> str:
        """A few words for the progress line; empty for nothing."""
        return ""


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


class OwedTasks:
    """The rows that a plan owes, task by task."""

    def __init__(self, plan: Plan) -> None:
        self.ordinals: dict[Hashable, int] = {}
        """The tasks, numbered as they come."""
        self._first, self._last = array("q"), array("q")
        self._place, self._after = array("q"), array("q")
        for place, row in plan.places():
            task = row.get(TASK_INDEX_KEY_NAME)
            number = len(self._place)
            self._place.append(place)
            self._after.append(_NONE)
            ordinal = self.ordinals.setdefault(task, len(self.ordinals))
            if ordinal == len(self._first):
                self._first.append(number)
                self._last.append(number)
            else:
                self._after[self._last[ordinal]] = number
                self._last[ordinal] = number

    def take(self, ordinal: int) -> int:
        """The place of the next row of a task, which then is taken."""
        number = self._first[ordinal]
        self._first[ordinal] = self._after[number]
        return self._place[number]

    def has_more(self, ordinal: int) -> bool:
        """Whether rows of a task are left."""
        return self._first[ordinal] != _NONE


class RowOrder(Policy):
    """The rows of a plan in another order, which it learns as attempts end."""

    def __init__(
        self, plan: Plan, *, longest_first: bool, in_waves: bool, durations: Mapping[Hashable, float] | None = None
    ) -> None:
        """`in_waves`: one repeat of each task after the other; `durations` are what tasks took earlier, in seconds."""
        self._plan, self._longest_first, self._in_waves = plan, longest_first, in_waves
        self._owed = OwedTasks(plan)
        ordinals = self._owed.ordinals
        self._took: dict[int, tuple[float, int]] = {
            ordinals[task]: (seconds, 1) for task, seconds in (durations or {}).items() if task in ordinals
        }
        self._fresh = array("q", sorted(range(len(ordinals)), key=lambda number: (-self._expected_s(number), number)))
        self._next_fresh = 0
        self._wave: dict[int, int] = {}
        self._ready: list[tuple[int, float, int]] = []
        self._unknown: dict[int, float] = {}
        """Tasks of which one repeat is out and nothing known, with when it started."""

    def __iter__(self) -> Iterator[Row]:
        with self._plan.reading() as row_at:
            while (ordinal := self._next()) is not None:
                row = row_at(self._owed.take(ordinal))
                if self._owed.has_more(ordinal):
                    self._put_back(ordinal)
                yield row

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """Learn how long its task takes."""
        ordinal = self._owed.ordinals.get(pending.row.get(TASK_INDEX_KEY_NAME))
        if ordinal is not None and self._longest_first and attempt.failure is None:
            seconds, count = self._took.get(ordinal, (0.0, 0))
            took_s = asyncio.get_running_loop().time() - pending.started_s
            self._took[ordinal] = (seconds + took_s, count + 1)
            if self._unknown.pop(ordinal, None) is not None:
                self._put_back(ordinal)
        return None

    def _expected_s(self, ordinal: int) -> float:
        if not self._longest_first:
            return 0.0
        seconds, count = self._took.get(ordinal, (math.inf, 1))
        return seconds / count

    def _put_back(self, ordinal: int) -> None:
        expected_s = self._expected_s(ordinal)
        if self._in_waves:
            self._wave[ordinal] = wave = self._wave.get(ordinal, 0) + 1
            heapq.heappush(self._ready, (wave, -expected_s, ordinal))
        elif expected_s == math.inf:
            self._unknown.setdefault(ordinal, asyncio.get_running_loop().time())
        else:
            heapq.heappush(self._ready, (0, -expected_s, ordinal))

    def _next(self) -> int | None:
        fresh = self._fresh[self._next_fresh] if self._next_fresh < len(self._fresh) else None
        ready_s = -self._ready[0][1] if self._ready else -math.inf
        if fresh is not None and (self._in_waves or self._expected_s(fresh) >= ready_s):
            self._next_fresh += 1
            return fresh
        oldest = next(iter(self._unknown), None)
        if oldest is not None:
            started_s = self._unknown[oldest]
            if not self._ready or asyncio.get_running_loop().time() - started_s >= ready_s:
                del self._unknown[oldest]
                return oldest
        return heapq.heappop(self._ready)[2] if self._ready else None
