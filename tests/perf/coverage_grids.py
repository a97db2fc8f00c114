"""Whether intervals hold the truth as often as they promise: simulated over a grid of cells, on all processors.

This is statistics, not timing: the seeds follow from the cells, so that a grid always finds the same, also on a machine
that has other things to do. `make bench` has some of the cells, drawn once and for all; `make bench-coverage` has all.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tests.perf.side_by_side.estimates import Estimate, Outcome
from tests.perf.side_by_side.estimates import worst as worst_of

CellT = TypeVar("CellT")
OutcomeT = TypeVar("OutcomeT")

EXPERIMENTS = 2000
"""Of each cell; a share of them is known to a percent."""


def drawn(cells: Sequence[CellT], count: int) -> list[CellT]:
    """So many of the cells, always the same."""
    return random.Random(count).sample(cells, count)


def simulated(outcome_of: Callable[[CellT], OutcomeT], cells: Sequence[CellT]) -> dict[CellT, OutcomeT]:
    """What becomes of each cell."""
    with ProcessPoolExecutor() as pool:
        return dict(zip(cells, pool.map(outcome_of, cells, chunksize=2), strict=True))


def share_of(hits: float) -> Estimate:
    """A share of the experiments of one cell, and its error."""
    return Estimate(hits, 1.96 * math.sqrt(hits * (1 - hits) / EXPERIMENTS))


def require_covered(
    shares: Mapping[str, Mapping[CellT, float]], least: Mapping[str, float], average: tuple[float, float]
) -> None:
    """Hold the least share of each kind of cells, and the average of the first kind, against what is promised."""
    told, outcomes = [], []
    for kind, some in shares.items():
        worst = min(some, key=some.__getitem__)
        mean = sum(some.values()) / len(some)
        outcomes.append(share_of(some[worst]).at_least(least[kind]))
        told.append(f"{kind}: {len(some)} cells, on average {mean:.2%}, least in {worst}")
        told.append(f"least covered of {kind}: {some[worst]:.2%}, at least {least[kind]:.0%}: {outcomes[-1]}")
    first = next(iter(shares.values()))
    found = Estimate(
        sum(first.values()) / len(first), math.hypot(*(share_of(each).error for each in first.values())) / len(first)
    )
    outcomes += [found.at_least(average[0]), found.at_most(average[1])]
    told.append(
        f"covered on average: {found.value:.2%}, {average[0]:.0%} to {average[1]:.0%}: {worst_of(*outcomes[-2:])}"
    )
    print("", *told, sep="\n")
    assert Outcome.MISSED not in outcomes, "; ".join(line for line in told if line.endswith(Outcome.MISSED))
