"""Runs made up so that the true difference between them is known, to see how often an interval contains it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.metrics.paired import paired_difference, scale_of

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One kind of experiment."""

    tasks: int
    repeats: int
    base: float
    """The mean of the first run."""
    difference: float
    likeness: float
    """0: every task is equally hard; near 1: a task is always solved or never."""
    related: bool = True
    """Whether both runs find the same tasks hard."""
    graded: bool = False
    uneven: bool = False
    """Whether repeats differ from task to task."""
    failed: float = 0.0
    """The share of rollouts that failed, in either run."""


class Outcome(NamedTuple):
    """What became of many experiments of one kind."""

    covered: float
    """The share of intervals that contain the true difference."""
    alarms: float
    """The share of intervals that lie wholly below 0."""
    discordant: float
    """How many tasks differ, on average."""
    width: float


def simulate(cell: Cell, experiments: int, generator: np.random.Generator) -> Outcome:
    """Make up experiments, each with tasks drawn anew, and compare the two runs of each."""
    covered = alarms = discordant = 0
    width = 0.0
    truth = cell.difference
    for _ in range(experiments):
        base, new, scale = _experiment(cell, generator)
        found = paired_difference(base, new, scale)
        if found is None:
            covered += 1
            continue
        covered += found.ci_low <= truth <= found.ci_high
        alarms += found.ci_high < 0
        discordant += int(np.sum(np.abs(new - base) > 1e-12))
        width += found.ci_high - found.ci_low
    return Outcome(covered / experiments, alarms / experiments, discordant / experiments, width / experiments)


def _experiment(cell: Cell, generator: np.random.Generator) -> tuple[Floats, Floats, float]:
    hardness = generator.random(cell.tasks)
    of_new = hardness if cell.related else generator.random(cell.tasks)
    runs = [
        _run(cell, _abilities(mean, cell.likeness, places), generator)
        for mean, places in ((cell.base, hardness), (cell.base + cell.difference, of_new))
    ]
    scored = np.array(runs[0][1] > 0) & np.array(runs[1][1] > 0)
    base, new = (sums[scored] / counts[scored] for sums, counts, _ in runs)
    return base, new, scale_of(np.append(runs[0][2], runs[1][2]), np.append(base, new))


def _abilities(mean: float, likeness: float, places: Floats) -> Floats:
    """The chance of each task, with the given mean over all tasks: a mixture of always, never and the mean itself."""
    sure = likeness
    chances = np.full(len(places), mean)
    chances[places < sure * mean] = 1.0
    chances[places >= 1 - sure * (1 - mean)] = 0.0
    return chances


def _run(cell: Cell, chances: Floats, generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Sums and counts of each task, and the values of all scored rollouts."""
    shape = (cell.tasks, cell.repeats)
    if cell.graded:
        values = np.repeat(chances[:, np.newaxis], cell.repeats, axis=1)
        open_ = (chances > 0) & (chances < 1)
        shares = chances[open_, np.newaxis]
        values[open_] = generator.beta(4 * shares, 4 * (1 - shares), (int(open_.sum()), cell.repeats))
    else:
        values = (generator.random(shape) < chances[:, np.newaxis]).astype(np.float64)
    there = generator.random(shape) >= cell.failed
    if cell.uneven:
        there &= np.arange(cell.repeats) < generator.integers(1, cell.repeats + 1, cell.tasks)[:, np.newaxis]
    return (values * there).sum(axis=1), there.sum(axis=1).astype(np.float64), values[there]
