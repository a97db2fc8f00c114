"""Differences between runs: the numbers of well-known tests, and intervals that contain what they promise."""

import itertools
import math

import numpy as np
import pytest
import scipy  # `stats` takes a second, and is loaded where it is used
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.metrics.paired import (
    holm,
    mcnemar_exact,
    paired_difference,
    round_number_below,
    scale_of,
    t_quantile,
    two_sided_p,
)
from tests.compare.simulation import Cell, simulate

EXACT = 1e-9


@pytest.mark.parametrize("degrees", [1, 2, 7, 49, 999, 99_999])
def test_students_t_is_that_of_scipy(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), rel=EXACT)
    for t in (0.0, 1e-6, 0.3, 1.0, 2.5, 6.0, 20.0):
        assert two_sided_p(t, degrees) == pytest.approx(2 * scipy.stats.t.sf(t, degrees), rel=EXACT, abs=1e-300)
        assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemars_exact_test_is_the_binomial_test(only_base: int, only_new: int) -> None:
    among = only_base + only_new
    expected = scipy.stats.binomtest(only_base, among).pvalue if among else 1.0
    assert mcnemar_exact(only_base, only_new) == pytest.approx(expected, rel=EXACT, abs=1e-300)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_rejects_step_by_step(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for done, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
            if p_values[place] * (len(p_values) - done) > level:
                break
            rejected.add(place)
        assert rejected == {place for place, p in enumerate(adjusted) if p <= level}
    assert all(one >= other for one, other in zip(adjusted, p_values, strict=True))


def test_one_rollout_per_task_gives_the_interval_of_agresti_and_min() -> None:
    """Where many tasks differ; 60 passed in both, 25 in the second only, 10 in the first only, 5 in neither."""
    base = np.repeat([1.0, 0.0, 1.0, 0.0], [60, 25, 10, 5])
    new = np.repeat([1.0, 1.0, 0.0, 0.0], [60, 25, 10, 5])
    found = paired_difference(base, new, 1.0)
    assert found is not None
    gained, lost, among = 25.5, 10.5, 102.0
    centre = (gained - lost) / among
    wald = math.sqrt((gained + lost) - (gained - lost) ** 2 / among) / among
    half = scipy.stats.norm.ppf(0.975) * wald
    assert found.delta == pytest.approx(0.15)
    assert (found.ci_low, found.ci_high) == pytest.approx((centre - half, centre + half), abs=0.003)


@pytest.mark.parametrize("amount", [0.0, 0.125, 1.0])
def test_tasks_that_all_differ_by_the_same_amount_leave_doubt(amount: float) -> None:
    base = np.zeros(40)
    found = paired_difference(
        base, base + amount, scale_of(np.append(base, base + amount), np.append(base, base + amount))
    )
    assert found is not None
    assert found.ci_high - found.ci_low > 0.01


def test_tokens_that_never_vary_leave_doubt_too() -> None:
    base, new = np.full(30, 500.0), np.full(30, 520.0)
    values = np.append(base, new)
    found = paired_difference(base, new, scale_of(values, values))
    assert found is not None
    assert found.ci_low < 20 < found.ci_high + 10
    assert found.is_significant


def test_one_task_says_nothing() -> None:
    assert paired_difference(np.array([0.0]), np.array([1.0]), 1.0) is None


@given(st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_the_p_value_agrees_with_the_interval(tasks: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    base, new = generator.integers(0, 5, (2, tasks)) / 4
    found = paired_difference(base, new, 1.0)
    assert found is not None
    assert found.is_significant == (found.p < 0.05) or abs(found.p - 0.05) < 1e-9


def test_pairing_narrows_the_interval_as_theory_says() -> None:
    """Tasks that are equally hard for both runs cancel out: the variance is that of the rollouts alone."""
    generator = np.random.default_rng(5)
    paired = simulate(Cell(400, 16, 0.5, 0.0, 0.9), 60, generator)
    unpaired = simulate(Cell(400, 16, 0.5, 0.0, 0.9, related=False), 60, generator)
    within = 0.1 * 0.25 / 16  # a tenth of the tasks is open, the others are sure
    between = 0.9 * 0.25
    expected = math.sqrt((within + between) / within)
    assert unpaired.width / paired.width == pytest.approx(expected, rel=0.5)
    assert unpaired.width / paired.width > 3


def test_tasks_needed_are_those_that_halve_the_error() -> None:
    generator = np.random.default_rng(1)
    base, new = (generator.random((2, 200)) < 0.5).astype(float)
    found = paired_difference(base, new, 1.0)
    assert found is not None
    assert found.tasks_needed(found.detectable) == 200
    assert found.tasks_needed(found.detectable / 2) == 800


@pytest.mark.parametrize(
    ("value", "expected"), [(0.037, 0.02), (0.02, 0.02), (7.0, 5.0), (0.00099, 0.0005), (1.0, 1.0)]
)
def test_round_numbers(value: float, expected: float) -> None:
    assert round_number_below(value) == pytest.approx(expected)


CELLS = [
    Cell(tasks, repeats, base, difference, likeness, related, graded, uneven=repeats == 4, failed=0.05 * (repeats > 1))
    for tasks, repeats, (base, difference), likeness, related, graded in itertools.product(
        (20, 100), (1, 4), ((0.5, 0.0), (0.1, 0.05), (0.97, 0.0)), (0.0, 0.9), (True, False), (False, True)
    )
]


def test_intervals_contain_the_true_difference() -> None:
    """A part of the grid, few times each; `make bench` runs the whole (tests/perf/test_compare_coverage.py)."""
    generator = np.random.default_rng(20)
    outcomes = [(cell, simulate(cell, 80, generator)) for cell in CELLS]
    together = np.mean([outcome.covered for _, outcome in outcomes])
    assert 0.94 < together < 0.99
    assert min(outcome.covered for _, outcome in outcomes) > 0.85, "beyond what 80 experiments scatter"
    unchanged = [outcome.alarms for cell, outcome in outcomes if cell.difference == 0]
    assert np.mean(unchanged) < 0.03
