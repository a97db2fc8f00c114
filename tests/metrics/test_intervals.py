import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.metrics.intervals import RunningMean, binomial_interval, clustered_mean, t_quantile
from tests.metrics.simulation import LEAST, LEAST_ELSEWHERE, Cell, coverage

DRAWS = 2000
DRAWS_OF_CELL = 600
"""A sample: `make bench` has the whole grid, with more."""


def interval(passed: list[int], repeats: int) -> tuple[float, float]:
    """The interval of tasks that were passed so many times out of `repeats`."""
    rewards = [float(number < passes) for passes in passed for number in range(repeats)]
    ends = clustered_mean(rewards, np.repeat(np.arange(len(passed)), repeats)).ci95
    assert ends is not None
    return ends


@pytest.mark.parametrize(
    "cell",
    [
        Cell(50, (4, 4), 0.3, 0.0),
        Cell(50, (1, 8), 0.1, 1.0),
        Cell(50, (16, 16), 0.9, 0.3),
        Cell(200, (1, 8), 0.5, 0.7),
        Cell(5, (4, 4), 0.5, 0.7),
        Cell(20, (4, 4), 0.97, 0.3),
    ],
)
def test_the_interval_covers_the_true_mean_in_about_95_of_100_runs(cell: Cell) -> None:
    assert coverage(cell, DRAWS_OF_CELL) >= (LEAST if cell.is_ordinary else LEAST_ELSEWHERE)


def test_the_interval_is_that_of_clopper_and_pearson_for_single_attempts() -> None:
    # From published tables.
    table = {(0, 10): (0, 0.3085), (5, 10): (0.1871, 0.8129), (1, 50): (0.0005, 0.1065), (14, 20): (0.4572, 0.8811)}

    for (passes, tasks), ends in table.items():
        assert interval([1] * passes + [0] * (tasks - passes), 1) == pytest.approx(ends, abs=5e-5)


def test_tasks_passed_wholly_or_not_at_all_are_covered_in_at_least_95_percent() -> None:
    for tasks, rate in product((5, 20, 50), (0.03, 0.1, 0.5, 0.97)):
        chances = [math.comb(tasks, n) * rate**n * (1 - rate) ** (tasks - n) for n in range(tasks + 1)]
        ends = [interval([3] * n + [0] * (tasks - n), 3) for n in range(tasks + 1)]
        assert sum(chance for chance, (low, high) in zip(chances, ends, strict=True) if low <= rate <= high) >= 0.95


@pytest.mark.parametrize("repeats", [1, 4, 64])
def test_tasks_that_were_all_passed_count_as_one_attempt_each(repeats: int) -> None:
    assert interval([repeats] * 5, repeats) == pytest.approx((0.025 ** (1 / 5), 1))
    assert interval([0] * 50, repeats) == pytest.approx((0, 1 - 0.025 ** (1 / 50)))


def test_one_failure_leaves_the_interval_between_those_of_tasks_and_of_rollouts() -> None:
    by_tasks, by_rollouts = binomial_interval(0.98, 50), binomial_interval(0.995, 200)

    low, high = interval([4] * 49 + [3], 4)

    assert by_tasks[0] < low < by_rollouts[0]
    assert low < 0.995 < high <= 1


@pytest.mark.parametrize("tasks", [2, 3, 5, 20, 50, 300])
@pytest.mark.parametrize("repeats", [1, 2, 4, 16, 64])
def test_one_failure_more_never_makes_the_interval_narrower_by_half(tasks: int, repeats: int) -> None:
    for spread in (True, False):  # the next failure in the next task, or in the same one
        passed = [repeats] * tasks
        before = math.nan
        for failure in range(min(tasks * repeats, 40)):
            low, high = interval(passed, repeats)
            assert not high - low < before / 2, (spread, failure)
            before = high - low
            passed[failure % tasks if spread else failure // repeats] -= 1


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), min_size=2, max_size=30),
    st.integers(0, 1000),
)
def test_one_failure_more_never_halves_the_interval_of_uneven_tasks(rewards: list[list[float]], choice: int) -> None:
    passes = [(task, number) for task, values in enumerate(rewards) for number, value in enumerate(values) if value]
    if not passes:
        return
    tasks = [task for task, values in enumerate(rewards) for _ in values]
    before = clustered_mean([value for values in rewards for value in values], tasks).half_width
    task, number = passes[choice % len(passes)]
    rewards[task][number] = 0.0
    after = clustered_mean([value for values in rewards for value in values], tasks).half_width

    assert before is not None
    assert after is not None
    assert after > before / 2


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=30))
def test_the_interval_holds_the_mean_lies_within_the_bounds_and_is_that_of_failures_mirrored(
    pairs: list[tuple[int, float]],
) -> None:
    tasks = [task for task, _ in pairs]
    estimate = clustered_mean([value for _, value in pairs], tasks)
    mirrored = clustered_mean([1 - value for _, value in pairs], tasks)

    if estimate.ci95 is not None and estimate.mean is not None and mirrored.ci95 is not None:
        low, high = estimate.ci95
        assert 0 <= low <= estimate.mean + 1e-12
        assert estimate.mean - 1e-12 <= high <= 1
        assert (1 - high, 1 - low) == pytest.approx(mirrored.ci95, abs=1e-6)


@pytest.mark.parametrize("share", [1e-6, 0.01, 0.5, 0.999])
def test_the_interval_is_continuous_where_the_binomial_is_taken_for_normal(share: float) -> None:
    fewest = 10_000 / min(share, 1 - share)
    below, above = binomial_interval(share, fewest * 0.9999), binomial_interval(share, fewest * 1.0001)

    assert above[1] - above[0] == pytest.approx(below[1] - below[0], rel=0.01)


def test_the_interval_of_unbounded_rewards_covers_the_true_mean() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(DRAWS):
        owners = np.repeat(np.arange(15), 4)
        values = rng.normal(3, 2, 15)[owners] + rng.normal(0, 1, len(owners))
        ends = clustered_mean(values, owners).ci95
        assert ends is not None
        hits += ends[0] <= 3 <= ends[1]
    assert 0.935 <= hits / DRAWS <= 0.965


def test_repeating_a_rollout_adds_no_certainty() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 1.0]
    once = clustered_mean(rewards, range(5))
    often = clustered_mean(rewards * 50, [*range(5)] * 50)

    assert often.ci95 == pytest.approx(once.ci95)
    assert (once.rollouts, often.rollouts, once.tasks, often.tasks) == (5, 250, 5, 5)


def test_equal_task_sizes_give_the_t_interval_of_the_task_means() -> None:
    rewards = np.array([[2.0, 4.0], [6.0, 5.0], [1.0, 1.0]])
    means = rewards.mean(axis=1)
    half = 4.302653 * means.std(ddof=1) / math.sqrt(3)

    estimate = clustered_mean(rewards.ravel(), [0, 0, 1, 1, 2, 2])

    assert estimate.ci95 == pytest.approx((means.mean() - half, means.mean() + half))
    assert estimate.half_width == pytest.approx(half)


def test_equal_rewards_between_the_bounds_are_no_proof_either() -> None:
    few, many = clustered_mean([0.5] * 3, range(3)).ci95, clustered_mean([0.5] * 100, range(100)).ci95

    assert few is not None
    assert many is not None
    assert few[0] < 0.4 < many[0] < 0.5 < many[1] < 0.6 < few[1]


def test_one_task_says_nothing_about_others() -> None:
    estimate = clustered_mean([0.0, 1.0], [7, 7])

    assert (estimate.mean, estimate.ci95, estimate.half_width, estimate.tasks) == (0.5, None, None, 1)


def test_no_rollouts_have_no_mean() -> None:
    assert clustered_mean([], []) == RunningMean().estimate() == (None, None, 0, 0)


def test_the_t_quantile_agrees_with_the_tables() -> None:
    table = {1: 12.7062, 2: 4.30265, 5: 2.57058, 9: 2.26216, 10: 2.22814, 15: 2.13145, 30: 2.04227, 120: 1.97993}

    assert {degrees: t_quantile(degrees) for degrees in table} == pytest.approx(table, rel=1e-5)


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-2, 2) | st.sampled_from([0.0, 1.0, math.nan])), max_size=30))
def test_the_running_mean_equals_that_of_all_values_at_once(pairs: list[tuple[int, float]]) -> None:
    running = RunningMean()
    for task, value in pairs:
        running.add(task, value)

    live = running.estimate()
    at_once = clustered_mean([value for _, value in pairs], [task for task, _ in pairs])

    assert live[2:] == at_once[2:]
    assert live.mean == pytest.approx(at_once.mean, abs=1e-12)
    assert (live.ci95 is None) == (at_once.ci95 is None)
    assert live.ci95 == pytest.approx(at_once.ci95, abs=1e-6)
