"""Whether the intervals of `ng_compare` hold the true difference: some cells of the grid, or all of them.

`tests/compare/test_statistics.py` has a few of the cells, with fewer experiments.
"""

import itertools

import numpy as np
import pytest

from tests.compare.simulation import Cell, Outcome, simulate
from tests.perf.coverage_grids import EXPERIMENTS, drawn, require_covered, share_of, simulated
from tests.perf.side_by_side.estimates import Outcome as Verdict

ORDINARY, OTHERS = "50 tasks or more, 10 or more of which differ", "others"
LEAST = {ORDINARY: 0.93, OTHERS: 0.92}
AVERAGE, MOST_ALARMS = (0.94, 0.97), 0.055
MEANS = ((0.1, 0.0), (0.5, 0.0), (0.97, 0.0), (0.5, 0.05), (0.9, 0.02), (0.03, 0.02))
REPEATS = ((1, False, 0.0), (4, False, 0.05), (4, True, 0.0), (16, True, 0.05))


def grid() -> list[Cell]:
    return [
        Cell(tasks, repeats, base, difference, likeness, related, graded, uneven, failed)
        for tasks, (repeats, uneven, failed), (base, difference), likeness, related, graded in itertools.product(
            (20, 50, 200, 1000), REPEATS, MEANS, (0.0, 0.5, 0.9), (True, False), (False, True)
        )
    ]


def outcome_of(cell: Cell) -> Outcome:
    return simulate(cell, EXPERIMENTS, np.random.default_rng(abs(hash(cell)) % 2**32))


def require_intervals(cells: list[Cell]) -> None:
    outcomes = simulated(outcome_of, cells)
    ordinary = {cell: out.covered for cell, out in outcomes.items() if cell.tasks >= 50 and out.discordant >= 10}
    others = {cell: out.covered for cell, out in outcomes.items() if cell not in ordinary}
    require_covered({ORDINARY: ordinary, OTHERS: others}, LEAST, AVERAGE)
    alarms = max(out.alarms for cell, out in outcomes.items() if cell.difference == 0)
    found = share_of(alarms).at_most(MOST_ALARMS)
    print(f"alarms without a difference: at most {alarms:.2%}, at most {MOST_ALARMS:.1%}: {found}")
    assert found is not Verdict.MISSED


def test_intervals_hold_the_true_difference_in_some_cells_of_the_grid() -> None:
    require_intervals(drawn(grid(), 144))


@pytest.mark.whole_grid
def test_intervals_hold_the_true_difference_over_the_whole_grid() -> None:
    require_intervals(grid())
