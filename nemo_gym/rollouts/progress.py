"""How far a run is: counts, rate, time left, what is in flight, what failed, and the score so far.

    with Progress(plan.total, finished_before=plan.done, in_flight=lambda: attempts.in_flight) as progress:
        progress.add(row, record, outcome, is_final=True)

Rollouts finished by an earlier run count as done and in the total. A rollout that failed for good is done
too and counted as failed; one that is to be tried again is neither; a discarded one is not done.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.rollouts.means import REWARD, AgentMeans
from nemo_gym.rollouts.progress_state import ProgressState
from nemo_gym.rollouts.progress_view import Snapshot, View, view_for
from nemo_gym.rollouts.record import Outcome, Result, Row, agent_name_of, outcome_of
from nemo_gym.terminal import shown

_TICK_S = 1.0
_THRESHOLDS = (20, 40, 60, 80, 90, 95, 98, 99)
_AGENTS_LISTED = 5


class Progress:
    """The progress of one run, shown on stderr while the block lasts."""

    def __init__(
        self,
        total: int | None,
        *,
        finished_before: int = 0,
        given_up_before: int = 0,
        owed_by_agent: Mapping[str, int] | None = None,
        in_flight: Callable[[], int] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` covers the whole run, with what an earlier one finished or gave up; None means unknown.

        With `owed_by_agent` the agents that have most left are listed now and then, if there are several.
        """
        self.total = total
        self.finished_before = finished_before
        self.given_up_before = given_up_before
        self.counts: Counter[Outcome] = Counter()
        """Rollouts of this run by outcome."""
        self.retries = 0
        """Attempts that failed and did not count for good."""
        self.means = AgentMeans()
        """Of this run; what an earlier one finished enters only if somebody adds it."""
        self._left = Counter(owed_by_agent or {})
        self._thresholds = list(_THRESHOLDS)
        self._in_flight = in_flight
        self._stream = stream
        self._clock = clock
        self._started_s = clock()
        self._due_s = 0.0
        self._view: View | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def done(self) -> int:
        """Rollouts that need no more work."""
        before = self.finished_before + self.given_up_before
        return before + self.counts[Outcome.SUCCESS] + self.counts[Outcome.FAILURE]

    @property
    def elapsed_s(self) -> float:
        """Since this run started, or was resumed."""
        return self._clock() - self._started_s

    def __enter__(self) -> "Progress":
        self._started_s = self._clock()
        self._view = view_for(self._stream or sys.stderr, self._snapshot())
        self._show()
        self._drop_reached_thresholds()
        try:
            self._schedule_tick(asyncio.get_running_loop())
        except RuntimeError:  # without an event loop it moves only with the rollouts
            self._timer = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, row: Row, record: Mapping[str, Any], outcome: Outcome, *, is_final: bool = True) -> None:
        """Count one attempt and show it, though not more often than eyes can follow."""
        if not is_final:
            self.retries += 1
        else:
            self.counts[outcome] += 1
            agent = agent_name_of(row) or ""
            if agent in self._left:
                self._left[agent] -= 1
            if outcome is Outcome.SUCCESS:
                self.means.add(agent, row.get(TASK_INDEX_KEY_NAME), record.get(REWARD))
            elif outcome is Outcome.FAILURE:
                self.means.add_failure(agent)
            self._list_what_is_left()
        if self._clock() >= self._due_s:
            self._show()

    def finished(self, row: Row, result: Result | None) -> None:
        """Count a rollout of `run_examples`, of which None is a failed one."""
        if self._view is None:
            self.__enter__()
        self.add(row, result or {}, Outcome.FAILURE if result is None else outcome_of(result))

    def state(self) -> ProgressState:
        """The numbers so far."""
        return ProgressState(
            finished=self.finished_before + self.counts[Outcome.SUCCESS],
            failed=self.counts[Outcome.FAILURE],
            given_up_before=self.given_up_before,
            discarded=self.counts[Outcome.DISCARDED],
            retries=self.retries,
            in_flight=0 if self._in_flight is None else self._in_flight(),
            rewards=self.means.totals(),
        )

    def take_over(self, state: ProgressState) -> None:
        """Show numbers that were counted elsewhere."""
        self.counts[Outcome.SUCCESS] = state.finished - self.finished_before
        self.counts[Outcome.FAILURE] = state.failed
        self.counts[Outcome.DISCARDED] = state.discarded
        self.given_up_before, self.retries = state.given_up_before, state.retries
        self.means = AgentMeans.of_totals(state.rewards)
        if self._clock() >= self._due_s:
            self._show()

    def close(self) -> None:
        """Show the last state; nothing is shown after that."""
        if self._timer is not None:
            self._timer.cancel()
        if self._view is not None:
            self._view.close(self._snapshot())
        self._view = None

    def _schedule_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._clock() >= self._due_s:
            self._show()
        self._schedule_tick(loop)

    def _show(self) -> None:
        if self._view is not None:
            self._view.show(self._snapshot())
            self._due_s = self._clock() + self._view.pause_s(self.elapsed_s)

    def _snapshot(self) -> Snapshot:
        total = None if self.total is None else max(self.total, self.done)
        return Snapshot(self.done, total, self._tail(total))

    def _tail(self, total: int | None) -> str:
        new = self.done - self.finished_before - self.given_up_before
        rate = new / self.elapsed_s if self.elapsed_s > 0 else 0.0
        times = _clock_text(self.elapsed_s)
        if total is not None:
            times += f"<{_clock_text((total - self.done) / rate) if rate else '?'}"
        facts = [times, _rate_text(rate)]
        if self._in_flight is not None:
            facts.append(f"{self._in_flight()} in flight")
        facts.append(f"{self.counts[Outcome.FAILURE]} failed")
        for count, what in (
            (self.retries, "retried"),
            (self.counts[Outcome.DISCARDED], "discarded"),
            (self.finished_before, "from before"),
            (self.given_up_before, "given up before"),
        ):
            if count:
                facts.append(f"{count} {what}")
        means = self.means.text()
        reward = f" reward{' since resuming' if self.finished_before else ''}: {means}" if means else ""
        return f"{self.done}{'' if total is None else f'/{total}'} [{', '.join(facts)}]{reward}"

    def _list_what_is_left(self) -> None:
        if len(self._left) < 2 or not self._drop_reached_thresholds() or self._view is None:
            return
        most = [(agent, left) for agent, left in self._left.most_common(_AGENTS_LISTED) if left > 0]
        if most:
            lines = [f"{place}. {shown(agent)}: {left}" for place, (agent, left) in enumerate(most, 1)]
            self._view.write("\n".join(["Examples left", *lines]))

    def _drop_reached_thresholds(self) -> bool:
        """Whether another share of the run is done."""
        percent = 100 * self.done / self.total if self.total else 0.0
        remaining = [threshold for threshold in self._thresholds if threshold > percent]
        is_new = len(remaining) < len(self._thresholds)
        self._thresholds = remaining
        return is_new


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _rate_text(rate: float) -> str:
    return f"{rate:.1f}/s" if rate >= 1 else f"{rate * 60:.1f}/min"
