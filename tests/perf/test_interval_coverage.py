"""Whether 95 % intervals hold the true mean in 95 % of simulated runs: some cells of the grid, or all of them.

`tests/metrics/test_intervals.py` has a few of the cells, with fewer runs.
"""

from functools import partial

import pytest

from tests.metrics.simulation import AVERAGE, LEAST, LEAST_ELSEWHERE, Cell, coverage, grid
from tests.perf.coverage_grids import EXPERIMENTS, drawn, require_covered, simulated

ORDINARY, OTHERS = "50 tasks or more, rates of 0.1 to 0.9", "others"


def require_intervals(cells: list[Cell]) -> None:
    shares = simulated(partial(coverage, runs=EXPERIMENTS), cells)
    kinds = {
        ORDINARY: {cell: share for cell, share in shares.items() if cell.is_ordinary},
        OTHERS: {cell: share for cell, share in shares.items() if not cell.is_ordinary},
    }
    require_covered(kinds, {ORDINARY: LEAST, OTHERS: LEAST_ELSEWHERE}, AVERAGE)


def test_intervals_cover_the_true_mean_in_some_cells_of_the_grid() -> None:
    require_intervals(drawn(list(grid()), 78))


@pytest.mark.whole_grid
def test_intervals_cover_the_true_mean_over_the_whole_grid() -> None:
    require_intervals(list(grid()))
