"""A mean of rewards and the 95 % interval around it, honest about rollouts of one task resembling each other.

The mean is over all rollouts. Its variance comes from leaving out one *task* at a time (the delete-one-group
jackknife), so sixteen attempts at a task count as sixteen only as far as they differ; for tasks of equal size this is
the usual variance of the task means, and for unequal ones it errs on the wide side. The tasks are regarded as a sample
of those one could have asked: the interval says where the mean over more tasks of this kind would lie.

The quantile is Student's t with tasks - 1 degrees of freedom, which a handful of tasks needs. Rewards within [0, 1] get
a score interval (Wilson's) for the number of independent attempts that would explain that variance: the plain
mean ± t·s is then far too narrow near 0 and 1 (ten tasks with a pass rate of 0.95 covered it in 41 % of simulated runs
instead of 95 %; the score interval in 99 %), and claims certainty when all rewards are equal. When they are all 0 or
all 1, each task counts as one attempt. Other rewards get mean ± t·s.
"""

import math
from array import array
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_T_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
"""For 1 to 9 degrees of freedom, where the expansion is not good enough."""


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
        """Half the interval's width, for showing it as ±; score intervals are not symmetric about the mean."""
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
    sums, counts = np.zeros(len(distinct)), np.zeros(len(distinct))
    np.add.at(sums, places, numbers)
    np.add.at(counts, places, 1)
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
    shifts = (sums - counts * mean) / (rollouts - counts)
    variance = float((shifts * shifts).sum()) * (tasks - 1) / tasks
    t = t_quantile(tasks - 1)
    interval = _score_interval(mean, variance, tasks, t) if within_unit else _plain_interval(mean, variance, t)
    return Estimate(mean, interval, rollouts, tasks)


def _plain_interval(mean: float, variance: float, t: float) -> tuple[float, float]:
    half = t * math.sqrt(variance)
    return mean - half, mean + half


def _score_interval(mean: float, variance: float, tasks: int, t: float) -> tuple[float, float]:
    largest_variance = mean * (1 - mean)
    if largest_variance <= 0:
        attempts = float(tasks)
    elif variance > 0:
        attempts = largest_variance / variance
    else:
        return mean, mean
    weight = t * t / attempts
    middle = (mean + weight / 2) / (1 + weight)
    half = t * math.sqrt(max(largest_variance, 0.0) / attempts + weight / (4 * attempts)) / (1 + weight)
    return max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))
