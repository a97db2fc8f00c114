"""How much two runs differ over the tasks that both have, and how sure that is.

A task is asked of both runs, so the two are compared task by task: what one task's difference says is one observation,
however many rollouts it rests on. Rollouts of a task resemble each other, and both runs find the same tasks hard; both
facts are in the scatter of the differences, and nothing has to be assumed about either.

The interval is Student's for the mean of the differences, with two imagined tasks added to those seen: one without a
difference, and half a task each with a difference of `+scale` and `-scale`, which is how much a task may change. For
one rollout per task that passed or failed this is the interval of Agresti and Min (2005) for matched pairs. Where
hardly any task differs the two halves count up to double, because theirs then reaches less far than the exact bound.
So the promise of 95 % is kept where few tasks differ, and the interval is never of width zero: that all tasks of a
sample agree does not show that all tasks there are do. With many tasks nothing of this matters. The p value belongs
to the same interval: it is below 0.05 exactly if the interval leaves 0 out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nemo_gym.metrics.intervals import beta_quantile, beta_weight

Floats = NDArray[np.float64]

_IMAGINED_TASKS = 2.0
_POWER = 0.8
_ROUND_NUMBERS = (1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Difference:
    """What a second run has more than a first, as the mean over their common tasks."""

    base: float
    new: float
    """Means over the tasks, each of which counts the same."""
    delta: float
    ci_low: float
    ci_high: float
    p: float
    tasks: int
    detectable: float
    """The smallest true difference that a comparison like this one finds in 80 % of cases."""
    relative: float | None = None
    """`delta` as a share of `base`; None when that is zero or negative."""
    relative_ci: tuple[float, float] | None = None

    @property
    def is_significant(self) -> bool:
        """Whether the 95 % interval leaves 0 out."""
        return self.ci_low > 0 or self.ci_high < 0

    def tasks_needed(self, difference: float) -> int:
        """About how many tasks it would take to find a true difference of this size in 80 % of cases."""
        return math.ceil(self.tasks * (self.detectable / difference) ** 2)


def paired_difference(base: Floats, new: Floats, scale: float, most: float = math.inf) -> Difference | None:
    """Compare the values of the same tasks in two runs; None for fewer than two tasks, which say nothing about others.

    `scale` is how much a task may change, 1 for passed or failed (see `scale_of`); means differ by at most `most`.
    """
    tasks = len(base)
    if tasks < 2:
        return None
    mean_base, mean_new = float(base.mean()), float(new.mean())
    centre, error = _centre_and_error(new - base, scale)
    reach = t_quantile(tasks - 1) * error
    needed = (t_quantile(tasks - 1) + NormalDist().inv_cdf(_POWER)) * error
    relative = relative_ci = None
    if mean_base > 0:
        relative = mean_new / mean_base - 1
        shifts = (new - base * (1 + relative)) / mean_base
        off, spread = _centre_and_error(shifts, scale / mean_base)
        around, half = relative + off, t_quantile(tasks - 1) * spread
        relative_ci = (around - half, around + half)
    return Difference(
        base=mean_base,
        new=mean_new,
        delta=mean_new - mean_base,
        ci_low=max(centre - reach, -most),
        ci_high=min(centre + reach, most),
        p=two_sided_p(centre / error, tasks - 1) if error else 1.0,
        tasks=tasks,
        detectable=needed,
        relative=relative,
        relative_ci=relative_ci,
    )


def _centre_and_error(differences: Floats, scale: float) -> tuple[float, float]:
    """The mean of the differences and its standard error, with the imagined tasks among them."""
    among = len(differences) + _IMAGINED_TASKS
    centre = float(differences.sum()) / among
    squares = float((differences * differences).sum())
    differing = squares / (scale * scale)
    squares += scale * scale * (1 + 1 / (1 + differing))
    return centre, math.sqrt(max(squares / among - centre * centre, 0.0) / (among - 1))


def scale_of(values: Floats, means: Floats) -> float:
    """How much a task may change, judged by the values of all rollouts of both runs and the means of their tasks.

    A share, of which some are 0 or 1, may change by 1; anything else by what two values typically differ by: twice
    their standard deviation (what never varies may still vary by a tenth). The mean of several rollouts changes
    as much only if rollouts of a task are alike. How much they are, the scatter of the means tells, measured as if half
    a task that always passes and half a task that never does had been seen besides: few failures say little about it.
    """
    if not len(values):
        return 1.0
    scatter = float(values.std())
    low, high = float(values.min()), float(values.max())
    is_share = low >= 0 and high <= 1 and (low == 0 or high == 1)
    most = 1.0 if is_share else 2 * scatter or abs(high) / 10 or 1.0
    if not scatter or not len(means):
        return most
    mean = float(means.mean())
    imagined = (mean**2 + (1 - mean) ** 2) / 2 if is_share else scatter**2
    alike = (len(means) * float(means.var()) + imagined) / (len(means) * scatter**2 + imagined)
    return most * math.sqrt(min(alike, 1.0))


def mcnemar_exact(only_base: int, only_new: int) -> float:
    """The exact two-sided p value of McNemar's test, for tasks that passed in one of two runs only."""
    fewer, among = min(only_base, only_new), only_base + only_new
    if 2 * fewer >= among:
        return 1.0
    return min(1.0, 2 * beta_weight(0.5, among - fewer, fewer + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of several tests, raised so that a false alarm among all of them stays as rare as for one."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for done, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[place] * (len(p_values) - done)))
        adjusted[place] = highest
    return adjusted


def two_sided_p(t: float, degrees: int) -> float:
    """How often Student's t is at least this far from 0 by chance."""
    square = t * t
    if square > 3:  # far out, where what is left would drown in the rounding of 1 - …
        return beta_weight(degrees / (degrees + square), degrees / 2, 0.5)
    share = square / (degrees + square)
    return 1 - beta_weight(share, 0.5, degrees / 2) if share else 1.0


@lru_cache(maxsize=1024)
def t_quantile(degrees: int, confidence: float = 0.95) -> float:
    """How far from 0 Student's t lies at most with this probability."""
    share = beta_quantile(confidence, 0.5, degrees / 2)
    return math.sqrt(degrees * share / (1 - share))


def round_number_below(value: float) -> float:
    """The largest of …, 0.1, 0.2, 0.5, 1, 2, 5, … that is not above a positive value."""
    exponent = math.floor(math.log10(value))
    fitting = [digit for digit in _ROUND_NUMBERS if digit * 10.0**exponent <= value * (1 + 1e-9)]
    return fitting[-1] * 10.0**exponent if fitting else 5 * 10.0 ** (exponent - 1)
