"""A mean of rewards and the 95 % interval around it, honest about rollouts of one task resembling each other.

The tasks are regarded as a sample of those one could have asked: the interval says where the mean over more tasks of
this kind would lie. The mean is over all rollouts.

Rewards within [0, 1] get the exact binomial interval (Clopper and Pearson's) for the number of *independent attempts*
that the rollouts are worth: their number divided by the design effect, which is how much more the sums of tasks scatter
than independent rollouts would. Sixteen attempts at a task thus count as sixteen only as far as they differ. Few
failures say little about that, and none say nothing, so the design effect is measured as if half a task that always
passes and half a task that never does had been seen besides: in doubt rollouts of a task are taken to be alike, and
every failure more shifts the weight to what was observed. Attempts are never fewer than tasks (for uneven tasks: than
as many even ones as they are worth), since a mean cannot vary more than if each task were passed wholly or not at all.
So n tasks that all passed have the interval of n passed attempts, [0.478, 1] for five, and one failure makes it a
little narrower or wider, never much. Simulated runs (`tests/metrics/simulation.py`) are covered in 94.5 % or more,
whatever the number of tasks and repeats, the rate and the likeness of a task's rollouts; the score interval (Wilson's)
of the same attempts would cover 86 % for five tasks, wholly passed or not, with a rate of 0.97.

Other rewards get mean ± t·s, with t for tasks - 1 degrees of freedom and s from leaving out one task at a time (the
delete-one-group jackknife): for tasks of equal size the usual variance of the task means.

Coverage says how much of a run a mean rests on: what was expected, what was scored, and what failures would make of it.
"""

import math
from array import array
from collections.abc import Collection, Iterable, Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_gym.metrics.columns import REWARD, RolloutTable, SortedRollouts
from nemo_gym.metrics.pass_at_k import average_curve, pass_curve

Floats = NDArray[np.float64]

_IMAGINED = 0.5
"""How much of a task that always passes, and of one that never does, the design effect is measured with."""
_MANY = 10_000
"""Passes and failures from which on the binomial is as good as normal."""
_NONE = 1e-9
"""Passes or failures below which there are as good as none."""
_LEAST = 1e-300
_T_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
"""For 1 to 9 degrees of freedom, where the expansion is not good enough."""
Key = tuple[int, int]
"""Task index and rollout index."""


class Estimate(NamedTuple):
    """A mean over `rollouts` rollouts of `tasks` tasks."""

    mean: float | None
    """None when there are no rollouts."""
    ci95: tuple[float, float] | None
    """Low and high end; None for fewer than two tasks, which say nothing about other tasks."""
    rollouts: int
    tasks: int

    @property
    def half_width(self) -> float | None:
        """Half the interval's width, for showing it as ±; intervals within [0, 1] are not symmetric about the mean."""
        return None if self.ci95 is None else (self.ci95[1] - self.ci95[0]) / 2


class RunningMean:
    """A mean and its interval that can be asked for at any time while values arrive.

    Memory grows with the number of tasks, not of rollouts; the result equals that of all values at once.
    """

    def __init__(self) -> None:
        self._place_of: dict[int, int] = {}
        self._sums = array("d")
        self._counts = array("d")
        self._within_unit = True

    def add(self, task: int, value: float) -> None:
        """Count one rollout of `task`; a value that is not finite is left out."""
        if not math.isfinite(value):
            return
        place = self._place_of.get(task)
        if place is None:
            self._place_of[task] = len(self._sums)
            self._sums.append(value)
            self._counts.append(1)
        else:
            self._sums[place] += value
            self._counts[place] += 1
        self._within_unit = self._within_unit and 0 <= value <= 1

    def total(self) -> tuple[float, int]:
        """The sum of all values, and how many there are."""
        return float(sum(self._sums)), int(sum(self._counts))

    @classmethod
    def of_total(cls, value: float, rollouts: int) -> "RunningMean":
        """A mean of which only the sum and the number are known, so it has no interval."""
        mean = cls()
        mean._place_of[0] = 0
        mean._sums.append(value)
        mean._counts.append(rollouts)
        return mean

    def estimate(self) -> Estimate:
        """The mean so far, with its interval."""
        return _estimate(np.array(self._sums), np.array(self._counts), within_unit=self._within_unit)


def clustered_mean(values: ArrayLike, tasks: ArrayLike) -> Estimate:
    """The mean of `values`, of which `values[i]` belongs to a rollout of `tasks[i]`; what is not finite is left out."""
    numbers = np.asarray(values, np.float64)
    finite = np.isfinite(numbers)
    numbers = numbers[finite]
    distinct, places = np.unique(np.asarray(tasks, np.int64)[finite], return_inverse=True)
    sums = np.asarray(np.bincount(places, numbers, len(distinct)), np.float64)
    counts = np.bincount(places, minlength=len(distinct)).astype(np.float64)
    return _estimate(sums, counts, within_unit=bool(np.all((numbers >= 0) & (numbers <= 1))))


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, good to five digits."""
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
    # The asymptotic expansion about the normal quantile.
    z, n = NormalDist().inv_cdf(0.975), degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def _estimate(sums: Floats, counts: Floats, *, within_unit: bool) -> Estimate:
    tasks, rollouts = len(sums), int(counts.sum())
    if not tasks:
        return Estimate(None, None, 0, 0)
    mean = float(sums.sum() / rollouts)
    if tasks == 1:
        return Estimate(mean, None, rollouts, tasks)
    if within_unit:
        return Estimate(mean, binomial_interval(mean, _independent_attempts(sums, counts)), rollouts, tasks)
    shifts = (sums - counts * mean) / (rollouts - counts)
    half = t_quantile(tasks - 1) * math.sqrt(float((shifts * shifts).sum()) * (tasks - 1) / tasks)
    return Estimate(mean, (mean - half, mean + half), rollouts, tasks)


def _independent_attempts(sums: Floats, counts: Floats) -> float:
    """How many independent attempts tell as much about the mean as these tasks do, at least one per task."""
    rollouts = float(counts.sum())
    size = float((counts * counts).sum()) / rollouts
    among = rollouts + 2 * _IMAGINED * size
    rate = (float(sums.sum()) + _IMAGINED * size) / among
    misses = sums - counts * rate
    scatter = float((misses * misses).sum()) + _IMAGINED * size**2 * (rate**2 + (1 - rate) ** 2)
    design_effect = scatter / (among * rate * (1 - rate))
    return rollouts / min(design_effect, size)


def binomial_interval(mean: float, attempts: float) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval for a share of `attempts`, neither of which need be whole."""
    mean = min(max(mean, 0.0), 1.0)
    passes, failures = mean * attempts, (1 - mean) * attempts
    if min(passes, failures) > _MANY:
        half = NormalDist().inv_cdf(0.975) * math.sqrt(mean * (1 - mean) / attempts)
        return mean - half, mean + half
    low = beta_quantile(0.025, passes, failures + 1) if passes > _NONE else 0.0
    high = 1 - beta_quantile(0.025, failures, passes + 1) if failures > _NONE else 1.0
    return min(low, mean), max(high, mean)


def beta_quantile(share: float, a: float, b: float) -> float:
    """Where the beta distribution has `share` of its weight below: Newton's steps, halving where they lead astray."""
    low, high = 0.0, 1.0
    at = a / (a + b)
    for _ in range(100):
        below, density = _beta_weight_and_density(at, a, b)
        low, high = (at, high) if below < share else (low, at)
        after = at - (below - share) / density if density > 0 else low
        if not low < after < high:
            after = (low + high) / 2
        if abs(after - at) <= 1e-12 * at:
            break
        at = after
    return at


def beta_weight(x: float, a: float, b: float) -> float:
    """The weight of the beta distribution below `x`, which lies between 0 and 1."""
    return _beta_weight_and_density(x, a, b)[0]


def _beta_weight_and_density(x: float, a: float, b: float) -> tuple[float, float]:
    """The weight of the beta distribution below `x`, and its density there."""
    logs = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    factor = math.exp(logs)
    if x < (a + 1) / (a + b + 2):
        weight = factor * _beta_fraction(x, a, b) / a
    else:
        weight = 1 - factor * _beta_fraction(1 - x, b, a) / b
    return weight, factor / (x * (1 - x))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method; it converges for small `x`."""
    above, below = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or _LEAST)
    result = below
    for step in range(1, 10 * _MANY):
        twice = a + 2 * step
        even = step * (b - step) * x / ((twice - 1) * twice)
        odd = -(a + step) * (a + b + step) * x / (twice * (twice + 1))
        change = 1.0
        for term in (even, odd):
            below = 1 / ((1 + term * below) or _LEAST)
            above = (1 + term / above) or _LEAST
            change = above * below
            result *= change
        if abs(change - 1) < 1e-13:
            break
    return result


def compute_coverage(
    scored: RolloutTable | Iterable[Mapping[str, Any]],
    failed: Iterable[Key] = (),
    expected_rollouts: int | None = None,
    expected_tasks: int | None = None,
    repeats: int | None = None,
    *,
    stragglers: Collection[Key] = (),
    not_needed: Collection[Key] | None = None,
) -> dict[str, Any]:
    """The `coverage` entry of one agent.

    `scored` are the agent's results, `failed` the keys of rollouts whose last attempt failed; a key that is in both
    counts as scored. The numbers expected are None when unknown, and so is then what is missing.

    * `expected`, `scored`, `failed`, `missing`: each `{"rollouts": …, "tasks": …}`; the last three add up to the first.
      A rollout is scored when its reward is a finite number and missing when it is neither scored nor failed. A task is
      scored when any of its rollouts is, else failed when any of them is, else missing.
    * `mean_excluding_failures` is over the scored rollouts, `mean_failures_as_zero` over these and the failed ones.
    * `ci95` holds `[low, high]` for each of the two means, null for fewer than two tasks.
    * `tasks_per_k`: for each k (as text) how many tasks have at least k scored rollouts.
    * `repeats`: how many rollouts of a row were asked for; only where that is known. Equal rows make tasks with more.
    * `pass_at_k`: where rewards are 0 or 1 and `k` (the `repeats`, else how many scored rollouts most tasks have) is
      more than 1, `k`, `pass@k` and `pass@1[avg-of-k]` as percentages, and the `tasks` that have at least k; else null.

    Only where there are any, `stragglers`: those of the failed that were too slow for the run, with
    `mean_stragglers_as_zero`. Only where repeats stop when a task is decided (`not_needed` is given, the keys of those
    that were not made): `not_needed`, which then are not missing; both means are means of the tasks' means, since tasks
    have different numbers of repeats; and `pass_at_k` has no k beyond the smallest of these.
    """
    rewards, tasks, numbers = _scores(scored if isinstance(scored, RolloutTable) else _read(scored))
    failures = set(failed) - set(not_needed or ())
    if failures:
        failures.difference_update(zip(tasks.tolist(), numbers.tolist(), strict=True))
    is_uneven = not_needed is not None
    scored_alone = _mean_of(rewards, tasks, (), is_uneven)
    with_failures = _mean_of(rewards, tasks, failures, is_uneven)
    per_task = np.unique(tasks, return_counts=True)[1]
    left_out = len(set(not_needed or ()))
    if is_uneven and len(per_task):
        repeats = int(per_task.min()) if repeats is None else min(repeats, int(per_task.min()))
    return {
        "expected": {"rollouts": expected_rollouts, "tasks": expected_tasks},
        "scored": {"rollouts": len(rewards), "tasks": len(per_task)},
        "failed": {"rollouts": len(failures), "tasks": with_failures.tasks - len(per_task)},
        "missing": {
            "rollouts": _missing(expected_rollouts, len(rewards) + len(failures) + left_out),
            "tasks": _missing(expected_tasks, with_failures.tasks),
        },
        "mean_excluding_failures": scored_alone.mean,
        "mean_failures_as_zero": with_failures.mean,
        "ci95": {"mean_excluding_failures": _ends(scored_alone), "mean_failures_as_zero": _ends(with_failures)},
        "tasks_per_k": {str(k): int(np.sum(per_task >= k)) for k in range(1, int(per_task.max(initial=0)) + 1)},
        **({} if repeats is None or is_uneven else {"repeats": repeats}),
        "pass_at_k": pass_at_k(rewards, per_task, repeats),
        **_of_stragglers(rewards, tasks, failures & set(stragglers), is_uneven),
        **({} if not_needed is None else {"not_needed": _counted(not_needed), "least_repeats": repeats}),
    }


def _mean_of(rewards: Floats, tasks: NDArray[np.int64], zeros: Collection[Key], is_uneven: bool) -> Estimate:
    """The mean with zeros for these rollouts; of the tasks' means where tasks differ in their number of rollouts."""
    values = np.append(rewards, np.zeros(len(zeros)))
    of_tasks = np.append(tasks, np.array([task for task, _ in zeros], np.int64))
    if is_uneven and len(values):
        of_tasks, places = np.unique(of_tasks, return_inverse=True)
        values = np.bincount(places, values) / np.bincount(places)
    return clustered_mean(values, of_tasks)


def _of_stragglers(
    rewards: Floats, tasks: NDArray[np.int64], stragglers: Collection[Key], is_uneven: bool
) -> dict[str, Any]:
    if not stragglers:
        return {}
    mean = _mean_of(rewards, tasks, stragglers, is_uneven).mean
    return {"stragglers": _counted(stragglers), "mean_stragglers_as_zero": mean}


def _counted(keys: Collection[Key]) -> dict[str, int]:
    return {"rollouts": len(set(keys)), "tasks": len({task for task, _ in keys})}


def pass_at_k(rewards: Floats, per_task: NDArray[np.int64], repeats: int | None) -> dict[str, Any] | None:
    """pass@k where rewards are 0 or 1 and tasks were repeated, else None.

    The rewards are in key order: the first `per_task[0]` of them belong to the first task.
    """
    if not len(per_task):
        return None
    k = int(np.bincount(per_task).argmax()) if repeats is None else min(repeats, int(per_task.max()))
    if k < 2 or not np.all((rewards == 0) | (rewards == 1)):
        return None
    starts = np.cumsum(per_task) - per_task
    lengths = np.flatnonzero(np.bincount(per_task)).tolist()
    blocks = [rewards[starts[per_task == length][:, np.newaxis] + np.arange(length)] for length in lengths]
    longest = int(per_task.max())
    passed, average = (curve(blocks, longest).means()[k - 1] or 0.0 for curve in (pass_curve, average_curve))
    tasks = int(np.sum(per_task >= k))
    return {"k": k, "tasks": tasks, "pass@k": 100.0 * passed, "pass@1[avg-of-k]": 100.0 * average}


def _read(records: Iterable[Mapping[str, Any]]) -> RolloutTable:
    table = RolloutTable()
    for record in records:
        table.add(record)
    return table


def _scores(table: RolloutTable) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The usable rewards, and the task and rollout index of each."""
    rollouts = SortedRollouts(table)
    for column in rollouts.columns:
        if column.name == REWARD:
            usable = np.isfinite(column.values)
            ranks = column.ranks[usable]
            return column.values[usable], rollouts.tasks[ranks], rollouts.rollouts[ranks]
    return np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64)


def _missing(expected: int | None, seen: int) -> int | None:
    return None if expected is None else max(0, expected - seen)


def _ends(estimate: Estimate) -> list[float] | None:
    return None if estimate.ci95 is None else list(estimate.ci95)
