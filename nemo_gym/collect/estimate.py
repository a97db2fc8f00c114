"""What a run will take: tokens, US dollars and time, with a range that comes from how much tasks differ.

A task that was tried before, in this run or an earlier one, is taken to use what it used then, give or take what its
rollouts differ by. Tasks that nobody has tried are taken to be like those that were: their mean has an interval, which
widens with the spread over tasks, not over rollouts, since rollouts of one task resemble each other.

Lengths are skewed: most tasks are short, and a few make up much of the total. An interval of the mean ± t·s is then too
low. The one used here is the wider, at each end, of two: Hall's, in which t is transformed by the skewness, and one
around the mean whose width is that of Cox's interval for data whose logarithms are normal. Simulated pilots of 20 out
of 500 tasks (`tests/rollouts/test_estimate.py`) have the truth inside in 92 to 96 % for log-normal lengths, whose
logarithms deviate by 0.3 to 1.5, and more for exponential ones; of single tasks that are many times as long as all
others no pilot can know.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.errors import ConfigError
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.metrics.intervals import t_quantile
from nemo_gym.runs.files import RolloutPaths, require_rollouts
from nemo_gym.runs.read import records
from nemo_gym.runs.record import Row, agent_name_of
from nemo_gym.runs.rows import content_key
from nemo_gym.runs.spending import Meter, Prices, Samples, money

Floats = NDArray[np.float64]
_Z = 1.959964
_OF_AGENT = 5
"""Tasks of one agent that tell more about its others than tasks of all agents do."""
_SMALLEST = 0.1
"""Of the mean: shorter tasks are taken to be as long as that where logarithms count."""
_COLUMN_OF = {"input_tokens": "input", "output_tokens": "output", "total_tokens": "total", "cost_usd": "cost"}


class Range(NamedTuple):
    """An amount, and between what it lies with a probability of 95 %."""

    low: float
    value: float
    high: float

    def plus(self, amount: float) -> "Range":
        """The same with something added that is known."""
        return Range(self.low + amount, self.value + amount, self.high + amount)

    def as_json(self) -> dict[str, float]:
        """`low`, `value` and `high`, for programs."""
        return {"low": self.low, "value": self.value, "high": self.high}


@dataclass
class OwedTask:
    """A task with rollouts that are still to be made."""

    agent: str
    rollouts: int = 0
    content: bytes | None = None
    """By which the same task of another run is known."""


OwedTasks = dict[Any, OwedTask]


def owed_tasks(rows: Iterable[Row], *, with_content: bool = False) -> OwedTasks:
    """The tasks of rows that are to be sent, by their index."""
    tasks: OwedTasks = {}
    for row in rows:
        index = row.get(TASK_INDEX_KEY_NAME)
        task = tasks.get(index)
        if task is None:
            content = content_key(row) if with_content else None
            task = tasks[index] = OwedTask(agent_name_of(row) or "", content=content)
        task.rollouts += 1
    return tasks


@dataclass
class Source:
    """What an estimate rests on."""

    samples: Samples
    text: str
    keys: Mapping[Any, Any] | None = None
    """Where tasks are known by something else there: how those of this run are called; None when it is this run."""
    is_priced: bool = True
    """False when rollouts were made by models without a price."""

    def place(self, index: Any) -> int | None:
        """Where a task of this run is among the samples."""
        key = index if self.keys is None else self.keys.get(index)
        return None if key is None else self.samples.place_of.get(key)


def own_part(samples: Samples, *meters: Meter | None) -> Source:
    """What this run has made so far, as `meters` have counted it."""
    is_priced = not any(meter is not None and meter.unpriced for meter in meters)
    return Source(samples, "this run's finished part", is_priced=is_priced)


def earlier_run(path: Path, owed: OwedTasks, prices: Prices | None) -> Source:
    """The rollouts of an earlier run; its tasks are matched by what was asked or, if none is the same, by index.

    Raises:
        ConfigError: there is no such file, or it holds no rollouts.
    """
    if not path.is_file():
        raise ConfigError(f"+estimate_from={path} is not there; name the rollouts of an earlier run")
    require_rollouts(path, "estimate_from")
    paths, meter = RolloutPaths(path), Meter(None if prices is None else prices.for_this_run, Samples())
    for key, _, record in records(path, "skip"):
        meter.add(record, key.task_index, agent_name_of(record) or "")
    for found, _, record in records(paths.failures, "skip", may_lack_key=True):
        if found is not None:
            meter.add(record, found.task_index, agent_name_of(record) or "", success=False)
    assert meter.samples is not None
    index_of: dict[bytes, Any] = {}
    for key, _, row in records(paths.materialized_inputs, "skip"):
        if key.rollout_index == 0:
            index_of.setdefault(content_key(row), key.task_index)
    by_content = {index: index_of[task.content] for index, task in owed.items() if task.content in index_of}
    by_index = {index: index for index in owed if index in meter.samples.place_of}
    keys, how = (by_content, "what was asked") if by_content else (by_index, "their number in the input")
    matched = f"{len(keys):,} of {len(owed):,} tasks matched by {how}" if keys else "none of its tasks is the same"
    return Source(meter.samples, f"{path}, {matched}", keys, is_priced=not meter.unpriced)


@dataclass
class Forecast:
    """What is still to be spent, and what the whole run will have taken."""

    source: str
    tasks_seen: int
    rollouts: int
    """Still to be made."""
    amounts: dict[str, Range] = field(default_factory=dict)
    """Of the whole run, with what has been used so far: tokens by kind and, with prices, US dollars."""
    still: dict[str, Range] = field(default_factory=dict)
    """Of what is still to be made."""
    seconds: Range | None = None
    """Still to come, if the endpoint keeps up; None when nobody has told how long rollouts take."""
    in_parallel: int = 1

    def lines(self) -> list[str]:
        """The estimate as lines of text, for a terminal."""
        seen = "1 task" if self.tasks_seen == 1 else f"{self.tasks_seen:,} tasks"
        told = [f"Estimate for the whole run, 95 % range, from {self.source} ({seen} seen):"]
        for name, title in (("input_tokens", "Input tokens"), ("output_tokens", "Output tokens")):
            told.append(f"  {title}: {_tokens(self.amounts[name])}")
        told.append(f"  Tokens: {_tokens(self.amounts['total_tokens'])}")
        if "cost_usd" in self.amounts:
            low, value, high = self.amounts["cost_usd"]
            told.append(f"  Cost: {money(value)} ({money(low)} to {money(high)})")
        if self.seconds is not None:
            low, value, high = self.seconds
            told.append(
                f"  Time still to come: {_duration(value)} ({_duration(low)} to {_duration(high)}), {self.rollouts:,} "
                f"rollouts with {self.in_parallel:,} in parallel, if the endpoint keeps up"
            )
        return told

    def as_json(self) -> dict[str, Any]:
        """The estimate as one object, for programs."""
        return {
            "source": self.source,
            "tasks_seen": self.tasks_seen,
            "rollouts_owed": self.rollouts,
            "whole_run": {name: amount.as_json() for name, amount in self.amounts.items()},
            "still_to_come": {name: amount.as_json() for name, amount in self.still.items()},
            "time_s": None if self.seconds is None else self.seconds.as_json(),
            "in_parallel": self.in_parallel,
        }


def forecast(
    source: Source, owed: OwedTasks, spent: Mapping[str, float], in_parallel: int | None, *, has_prices: bool
) -> Forecast | None:
    """What the tasks that are owed will take; None when too little is known: fewer than two tasks.

    `spent` is what the run has used so far, by the names of `_COLUMN_OF`.
    """
    tasks = _Tasks(source)
    if len(tasks.known) < 2 or not np.any(tasks.values["total"]):
        return None
    rollouts = sum(task.rollouts for task in owed.values())
    lanes = max(1, min(in_parallel or rollouts, rollouts))
    made = Forecast(source.text, len(tasks.known), rollouts, in_parallel=lanes)
    for name, column in _COLUMN_OF.items():
        if name != "cost_usd" or (has_prices and source.is_priced):
            made.still[name] = tasks.predict(column, owed)
            made.amounts[name] = made.still[name].plus(spent.get(name, 0))
    if np.any(tasks.values["took_s"]):
        longest = float(tasks.values["took_s"].max()) if rollouts else 0.0
        made.seconds = Range(*(max(end / lanes, longest) for end in tasks.predict("took_s", owed)))
    return made


class _Tasks:
    """The tasks of a source: what a rollout of each takes, failed attempts included."""

    def __init__(self, source: Source) -> None:
        samples = source.samples
        self._source = source
        places = np.array(samples.tasks, np.int64)
        finished = np.array(samples.finished, bool)
        count = len(samples.agents)
        self._rollouts = np.bincount(places[finished], minlength=count).astype(np.float64)
        self.known = np.flatnonzero(self._rollouts)
        self._agents = samples.agents
        self.values: dict[str, Floats] = {}
        """Of each column: per rollout, by place."""
        self._noise: dict[str, float] = {}
        """Of each column: the variance among rollouts of one task."""
        for name, column in samples.columns.items():
            numbers = np.array(column, np.float64)
            sums = np.bincount(places, numbers, count)
            self.values[name] = np.divide(sums, self._rollouts, out=np.zeros(count), where=self._rollouts > 0)
            self._noise[name] = self._variance_within(numbers[finished], places[finished], name)

    def _variance_within(self, numbers: Floats, places: NDArray[np.int64], name: str) -> float:
        degrees = float(np.maximum(self._rollouts - 1, 0).sum())
        if degrees < 1:  # nothing was tried twice, so in doubt rollouts of a task differ as tasks do
            of_tasks = self.values[name][self.known]
            return float(of_tasks.var(ddof=1)) if len(of_tasks) > 1 else 0.0
        count = len(self._rollouts)
        means = np.bincount(places, numbers, count) / np.maximum(self._rollouts, 1)
        return float(((numbers - means[places]) ** 2).sum()) / degrees

    def predict(self, name: str, owed: OwedTasks) -> Range:
        """What all that is owed will take of one thing."""
        value = noise = 0.0
        unseen: dict[str, tuple[int, int]] = {}
        for index, task in owed.items():
            place = self._source.place(index)
            if place is not None and self._rollouts[place]:
                value += task.rollouts * float(self.values[name][place])
                noise += task.rollouts + task.rollouts**2 / float(self._rollouts[place])
            else:
                tasks, rollouts = unseen.get(task.agent, (0, 0))
                unseen[task.agent] = tasks + 1, rollouts + task.rollouts
        below = above = noise * self._noise[name] * _Z**2
        for agent, (tasks, rollouts) in unseen.items():
            low, mean, high = skewed_mean(self._like(agent, name), tasks)
            value += rollouts * mean
            below += (rollouts * (mean - low)) ** 2
            above += (rollouts * (high - mean)) ** 2
        return Range(max(0.0, value - math.sqrt(below)), value, value + math.sqrt(above))

    def _like(self, agent: str, name: str) -> Floats:
        """What tasks took that tell about others of an agent."""
        own = [place for place in self.known.tolist() if self._agents[place] == agent]
        return self.values[name][own if len(own) >= _OF_AGENT else self.known]


def skewed_mean(values: Sequence[float] | Floats, others: int) -> Range:
    """The mean of `others` more values like these, of which there are at least two; see above."""
    seen = np.asarray(values, np.float64)
    count, mean, deviation = len(seen), float(seen.mean()), float(seen.std(ddof=1))
    if not mean or not deviation:
        return Range(mean, mean, mean)
    t, of_others = t_quantile(count - 1), math.sqrt(1 + count / max(others, 1))
    error = deviation / math.sqrt(count) * of_others
    skewness = max(0.0, float(((seen - mean) ** 3).mean()) / float(seen.std()) ** 3) / math.sqrt(count)
    logs = np.log(np.maximum(seen, _SMALLEST * mean))
    spread = float(logs.var(ddof=1))
    factor = math.exp(t * math.sqrt(spread / count + spread**2 / (2 * (count - 1))) * of_others)
    low = min(mean - _transformed(t, skewness) * error, mean / factor)
    high = max(mean - _transformed(-t, skewness) * error, mean * factor)
    return Range(max(0.0, low), mean, high)


def _transformed(t: float, skewness: float) -> float:
    """Hall's cubic transformation, inverted."""
    if skewness < 1e-6:
        return t
    return 3 / skewness * (math.cbrt(1 + skewness * (t - skewness / 6)) - 1)


def _tokens(amount: Range) -> str:
    return f"{amount.value:,.0f} ({amount.low:,.0f} to {amount.high:,.0f})"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
