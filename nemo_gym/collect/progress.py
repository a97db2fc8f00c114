"""How far a run is: counts, rate, time left, what is in flight, what failed, and the score so far.

    with Progress(plan.total, finished_before=plan.done, in_flight=lambda: attempts.in_flight) as progress:
        progress.add(row, record, outcome, is_final=True)

Rollouts finished by an earlier run count as done and in the total. A rollout that failed for good is done
too and counted as failed; one that is to be tried again is neither; a discarded one is not done.

How that looks is for `line`. A failure does not enter the mean reward of its agent; what
the mean would be if failures were worth 0 is shown beside it.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from nemo_gym.collect.line import COLLECTING, Snapshot, View, view_for
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.metrics.intervals import Estimate, RunningMean
from nemo_gym.runs.record import Outcome, Result, Row, agent_name_of, outcome_of
from nemo_gym.runs.spending import Meter, money
from nemo_gym.terminal import shown

REWARD = "reward"
_NAME_LENGTH = 40
_TICK_S = 1.0
_THRESHOLDS = (20, 40, 60, 80, 90, 95, 98, 99)
_AGENTS_LISTED = 5


class RewardTotal(NamedTuple):
    """What one agent's rollouts of a run come to."""

    reward: float
    rollouts: int
    failures: int


@dataclass(frozen=True)
class ProgressState:
    """The numbers of one run, or of several together."""

    finished: int = 0
    """Rollouts in the file, earlier ones included."""
    failed: int = 0
    given_up_before: int = 0
    discarded: int = 0
    retries: int = 0
    in_flight: int = 0
    rewards: Mapping[str, RewardTotal] = field(default_factory=dict)
    """By agent, of the rollouts since the run was started or resumed."""
    cost_usd: float | None = None
    """Since then, too; None when nobody has said what tokens cost."""
    not_needed: int = 0
    """Rollouts that are not made because their tasks are decided."""

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> "ProgressState":
        """What `dataclasses.asdict` made of one, after a journey as JSON."""
        rewards = {agent: RewardTotal(*total) for agent, total in data["rewards"].items()}
        return cls(**{**data, "rewards": rewards})


def total_of(states: Iterable[ProgressState]) -> ProgressState:
    """The numbers of all of them together."""
    listed = list(states)
    rewards: dict[str, RewardTotal] = {}
    for state in listed:
        for agent, total in state.rewards.items():
            so_far = rewards.get(agent, RewardTotal(0.0, 0, 0))
            rewards[agent] = RewardTotal(
                so_far.reward + total.reward, so_far.rollouts + total.rollouts, so_far.failures + total.failures
            )
    return ProgressState(
        finished=sum(state.finished for state in listed),
        failed=sum(state.failed for state in listed),
        given_up_before=sum(state.given_up_before for state in listed),
        discarded=sum(state.discarded for state in listed),
        retries=sum(state.retries for state in listed),
        in_flight=sum(state.in_flight for state in listed),
        not_needed=sum(state.not_needed for state in listed),
        rewards=rewards,
        cost_usd=sum(state.cost_usd or 0.0 for state in listed)
        if any(it.cost_usd is not None for it in listed)
        else None,
    )


class AgentMeans:
    """Rewards as they come in; memory grows with the number of tasks, not of rollouts."""

    def __init__(self) -> None:
        self._means: dict[str, RunningMean] = {}
        self._rollouts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def add(self, agent: str, task: object, reward: object) -> None:
        """Count a successful rollout; one whose reward is no number is left out."""
        if not isinstance(reward, int | float):
            return
        self._rollouts[agent] += 1
        if agent not in self._means:
            self._means[agent] = RunningMean()
        # A rollout that belongs to no task counts as one of its own.
        number = task if isinstance(task, int) else -self._rollouts[agent]
        self._means[agent].add(number, float(reward))

    def add_failure(self, agent: str, count: int = 1) -> None:
        """Count a rollout that failed for good."""
        self._failures[agent] += count

    def totals(self) -> dict[str, RewardTotal]:
        """What the means of several runs can be added up from."""
        return {agent: RewardTotal(*mean.total(), self._failures[agent]) for agent, mean in sorted(self._means.items())}

    @classmethod
    def of_totals(cls, totals: Mapping[str, RewardTotal]) -> "AgentMeans":
        """The means that totals come to; they have no intervals."""
        means = cls()
        for agent, total in totals.items():
            means._means[agent] = RunningMean.of_total(total.reward, total.rollouts)
            means._rollouts[agent], means._failures[agent] = total.rollouts, total.failures
        return means

    def estimates(self, count: int) -> dict[str, Estimate]:
        """The means of the agents with most rollouts, by name."""
        most = sorted(agent for agent, _ in self._rollouts.most_common(count))
        return {agent: self._means[agent].estimate() for agent in most}

    def text(self, count: int = 3) -> str:
        """`a 0.61 [0.52, 0.7] (0.55 if failures were 0), b 0.4, 2 more; 95 % interval`; empty without rewards."""
        estimates = self.estimates(count)
        parts = [f"{shown(name, _NAME_LENGTH)} {_numbers(it, self._failures[name])}" for name, it in estimates.items()]
        if len(self._means) > count:
            parts.append(f"{len(self._means) - count} more")
        has_interval = any(it.ci95 is not None for it in estimates.values())
        return ", ".join(parts) + ("; 95 % interval" if has_interval else "")


def _numbers(estimate: Estimate, failures: int) -> str:
    if estimate.mean is None:
        return "?"
    text = f"{estimate.mean:.3g}"
    if estimate.ci95 is not None:
        text += f" [{estimate.ci95[0]:.3g}, {estimate.ci95[1]:.3g}]"
    if failures:
        text += f" ({estimate.mean * estimate.rollouts / (estimate.rollouts + failures):.3g} if failures were 0)"
    return text


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
        notice: Callable[[], str] | None = None,
        meter: Meter | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` covers the whole run, with what an earlier one finished or gave up; None means unknown.

        With `owed_by_agent` the agents that have most left are listed now and then, if there are several. `notice`
        says in a few words what is wrong at the moment, if anything is. `meter` knows what the rollouts have cost.
        """
        self.total = total
        self.title = COLLECTING
        self.finished_before = finished_before
        self.given_up_before = given_up_before
        self.counts: Counter[Outcome] = Counter()
        """Rollouts of this run by outcome."""
        self.retries = 0
        """Attempts that failed and did not count for good."""
        self.not_needed: Callable[[], int] = lambda: 0
        """Says how many rollouts are not made because their tasks are decided; they are done."""
        self.means = AgentMeans()
        """Of this run; what an earlier one finished enters only if somebody adds it."""
        self._left = Counter(owed_by_agent or {})
        self._thresholds = list(_THRESHOLDS)
        self._in_flight = in_flight
        self._notice = notice
        self._meter = meter
        self._cost_usd: float | None = None
        """As it was counted elsewhere."""
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
        return before + self.not_needed() + self.counts[Outcome.SUCCESS] + self.counts[Outcome.FAILURE]

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

    def reopen(self, agent: str, *, was_given_up_before: bool = False) -> None:
        """A rollout that was given up is tried again after all."""
        if was_given_up_before:
            self.given_up_before -= 1
        else:
            self.counts[Outcome.FAILURE] -= 1
            self.retries += 1
            self.means.add_failure(agent, -1)
        if agent in self._left:
            self._left[agent] += 1

    @property
    def rate_per_s(self) -> float:
        """How many rollouts a second were done since this run started, or was resumed."""
        new = self.done - self.finished_before - self.given_up_before - self.not_needed()
        return new / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def snapshot(self) -> Snapshot:
        """The numbers that the progress line shows now."""
        return self._snapshot()

    @property
    def cost_usd(self) -> float | None:
        """What it has cost since it was started or resumed; None when nobody has said what tokens cost."""
        return self._cost_usd if self._meter is None else self._meter.cost_or_none

    def state(self) -> ProgressState:
        """The numbers so far."""
        return ProgressState(
            finished=self.finished_before + self.counts[Outcome.SUCCESS],
            failed=self.counts[Outcome.FAILURE],
            given_up_before=self.given_up_before,
            discarded=self.counts[Outcome.DISCARDED],
            retries=self.retries,
            in_flight=0 if self._in_flight is None else self._in_flight(),
            not_needed=self.not_needed(),
            rewards=self.means.totals(),
            cost_usd=self.cost_usd,
        )

    def take_over(self, state: ProgressState) -> None:
        """Show numbers that were counted elsewhere."""
        self.counts[Outcome.SUCCESS] = state.finished - self.finished_before
        self.counts[Outcome.FAILURE] = state.failed
        self.counts[Outcome.DISCARDED] = state.discarded
        self.given_up_before, self.retries = state.given_up_before, state.retries
        self.not_needed = lambda: state.not_needed
        self.means = AgentMeans.of_totals(state.rewards)
        self._cost_usd = state.cost_usd
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
        return Snapshot(self.done, total, self._tail(total), self.title)

    def _tail(self, total: int | None) -> str:
        rate = self.rate_per_s
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
            (self.not_needed(), "not needed"),
        ):
            if count:
                facts.append(f"{count} {what}")
        if (cost_usd := self.cost_usd) is not None:
            facts.append(money(cost_usd))
        if self._notice is not None and (wrong := self._notice()):
            facts.insert(0, wrong)
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
