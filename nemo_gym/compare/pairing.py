"""Which tasks of two runs are the same, and what each of them gave."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_gym.compare.fields import pairing_advice
from nemo_gym.compare.measure import CONTENT, Floats, MeasuredRun, Places
from nemo_gym.errors import ConfigError
from nemo_gym.metrics.pass_at_k import majority_votes

_LEAST_MATCHED = 0.5
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TaskValues:
    """What the tasks of a run gave for one metric."""

    means: Floats
    """One per task of the run; NaN where it has no value."""
    counts: Places
    """On how many rollouts each rests."""
    values: Floats
    """Those of the rollouts themselves."""


def task_values(run: MeasuredRun, metric: str, *, failures_as_zero: bool = False) -> TaskValues:
    """One value per task: the mean of its rollouts, or the share of k of them that pass."""
    name, _, k = metric.partition("@")
    values, places = run.column("reward" if k else metric)
    if failures_as_zero:
        failed = np.array(list(run.failed.elements()), np.int64)
        values, places = np.append(values, np.zeros(len(failed))), np.append(places, failed)
    size = len(run.tasks)
    counts = np.bincount(places, minlength=size)
    if not k:
        sums = np.asarray(np.bincount(places, values, size), np.float64)
        return TaskValues(_divided(sums, counts), counts, values)
    if name == "majority":
        means = _majority(run, int(k))
        return TaskValues(means, counts, means[np.isfinite(means)])
    passed = np.bincount(places[values >= 1], minlength=size)
    means = _pass_chance(counts, passed, int(k))
    return TaskValues(means, counts, means[np.isfinite(means)])


def _divided(sums: Floats, counts: Places) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Floats = sums / counts
    return means


def _pass_chance(counts: Places, passed: Places, k: int) -> Floats:
    """The chance that k rollouts drawn from a task's contain one that passed; NaN for fewer than k."""
    none_passes = np.ones(len(counts))
    for taken in range(k):
        none_passes *= np.maximum(counts - passed - taken, 0) / np.maximum(counts - taken, 1)
    return np.where(counts >= k, 1 - none_passes, np.nan)


def _majority(run: MeasuredRun, k: int) -> Floats:
    """The score of what most of a task's first k rollouts answered; NaN for fewer than k."""
    rewards, answers = run.columns["reward"], run.answers
    rollouts: dict[int, list[int]] = {}
    for number, place in enumerate(run.of_rollout):
        rollouts.setdefault(place, []).append(number)
    means = np.full(len(run.tasks), np.nan)
    for place, numbers in rollouts.items():
        first = numbers[:k]
        if len(first) == k:
            scores = [None if np.isnan(rewards[number]) else rewards[number] for number in first]
            means[place] = majority_votes(scores, [answers[number] for number in first])[-1]
    return means


@dataclass(frozen=True)
class Matched:
    """The tasks that two runs have in common, and those that only one has."""

    base: Places
    new: Places
    """Where each common task is in either run."""
    only_base: int
    only_new: int

    def __len__(self) -> int:
        return len(self.base)


def match(base: MeasuredRun, new: MeasuredRun) -> Matched:
    """Find the common tasks of two runs."""
    common = [(place, new.place_of[key]) for key, place in base.place_of.items() if key in new.place_of]
    places = np.array(common, np.int64).reshape(-1, 2)
    return Matched(places[:, 0], places[:, 1], len(base.tasks) - len(common), len(new.tasks) - len(common))


def refuse_unmatched(base: MeasuredRun, new: MeasuredRun, matched: Matched, pair_by: str) -> None:
    """Refuse runs of which fewer than half of the tasks are the same.

    Raises:
        ConfigError: with what probably differs, and the field by which tasks would match.
    """
    fewest = min(len(base.tasks), len(new.tasks))
    if fewest and len(matched) >= _LEAST_MATCHED * fewest:
        return
    if pair_by != CONTENT:
        how = f"have the same {pair_by}"
        remedy = "leave +pair_by out to match what was asked"
    else:
        how = "ask the same"
        advice = pairing_advice(base, new)
        if advice is not None:
            remedy = f"the prompt seems to differ: {advice}"
        elif all(run.reads_rows for run in (base, new)):
            remedy = "another data set? +pair_by=<field of the rows> matches tasks by a field, +pair_by=index by number"
        else:
            remedy = "the materialized inputs beside the rollouts, which say more about tasks, are missing"
    raise ConfigError(
        f"{base.name} and {new.name} cannot be compared: only {len(matched):,} of {len(base.tasks):,} and "
        f"{len(new.tasks):,} tasks {how}; {remedy}. +allow_unmatched=true compares what there is"
    )


@dataclass(frozen=True)
class Pairs:
    """Values of the same tasks in two runs, for those that have them in both."""

    base: Floats
    new: Floats
    where: Places
    """Which of the matched tasks these are."""
    rollouts: Floats
    """All values of rollouts that these rest on, of both runs."""
    is_single: bool
    """Whether each task has exactly one rollout in each run."""


def pair_values(matched: Matched, base: TaskValues, new: TaskValues, among: Mask | None = None) -> Pairs:
    """The values of tasks that both runs have scored; `among` leaves out some of the matched ones."""
    ours, theirs = base.means[matched.base], new.means[matched.new]
    usable = np.isfinite(ours) & np.isfinite(theirs)
    if among is not None:
        usable &= among
    where = np.flatnonzero(usable)
    counts = np.append(base.counts[matched.base[where]], new.counts[matched.new[where]])
    return Pairs(ours[where], theirs[where], where, np.append(base.values, new.values), bool(np.all(counts == 1)))


def say_what_was_pooled(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return a note for each run that counts several rows as one task."""
    return [
        f"{run.name}: {run.equal_rows:,} rows {_same(run.pair_by)} others; their rollouts count as repeats of one task"
        for run in runs
        if run.equal_rows
    ]


def _same(pair_by: str) -> str:
    return "repeat the content of" if pair_by == CONTENT else f"have the same {pair_by} as"
