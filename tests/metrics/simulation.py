"""How often the 95 % interval of a mean holds the true one, in runs that are made up.

A run has some tasks, each with a pass rate of its own, drawn from a beta distribution whose mean is the truth. How
alike the rollouts of one task are is the share of the variance that lies between tasks: 0 when all tasks have the same
rate, 1 when each of them is passed always or never. Seeds follow from the cell, so that its result is always the same.
"""

import zlib
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.metrics.intervals import clustered_mean

TASKS = (5, 20, 50, 200)
REPEATS = ((1, 1), (4, 4), (16, 16), (1, 8))
RATES = (0.02, 0.1, 0.3, 0.5, 0.9, 0.97)
LIKENESS = (0.0, 0.3, 0.7, 1.0)
LEAST, LEAST_ELSEWHERE = 0.93, 0.92
AVERAGE = (0.94, 0.97)


class Cell(NamedTuple):
    """One kind of run."""

    tasks: int
    repeats: tuple[int, int]
    """Fewest and most rollouts of a task."""
    rate: float
    likeness: float

    @property
    def is_ordinary(self) -> bool:
        """Neither few tasks nor nearly all passed or failed."""
        return self.tasks >= 50 and 0.1 <= self.rate <= 0.9


def grid() -> Iterator[Cell]:
    """Every cell; for single attempts it makes no difference how alike they are."""
    for tasks, repeats, rate, likeness in product(TASKS, REPEATS, RATES, LIKENESS):
        if repeats != (1, 1) or not likeness:
            yield Cell(tasks, repeats, rate, likeness)


def coverage(cell: Cell, runs: int) -> float:
    """The share of `runs` whose interval holds the true mean."""
    rng = np.random.default_rng(zlib.crc32(repr(cell).encode()))
    hits = 0
    for _ in range(runs):
        counts = rng.integers(*cell.repeats, cell.tasks, endpoint=True)
        owners = np.repeat(np.arange(cell.tasks), counts)
        passed = rng.random(len(owners)) < _rates(cell, rng)[owners]
        ends = clustered_mean(passed, owners).ci95
        assert ends is not None
        hits += ends[0] <= cell.rate <= ends[1]
    return hits / runs


def _rates(cell: Cell, rng: np.random.Generator) -> NDArray[np.float64]:
    if cell.likeness == 0:
        return np.full(cell.tasks, cell.rate)
    if cell.likeness == 1:
        return (rng.random(cell.tasks) < cell.rate).astype(np.float64)
    weight = 1 / cell.likeness - 1
    return rng.beta(cell.rate * weight, (1 - cell.rate) * weight, cell.tasks)
