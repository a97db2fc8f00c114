import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.metrics.intervals import RunningMean, clustered_mean, t_quantile

DRAWS = 2000


def coverage(tasks: int, rollouts: tuple[int, int], rates: tuple[float, float]) -> float:
    """How often the interval holds the true mean when task pass rates are drawn from a beta distribution."""
    rng = np.random.default_rng(tasks * 1000 + rollouts[1])
    truth = rates[0] / sum(rates)
    hits = 0
    for _ in range(DRAWS):
        counts = rng.integers(rollouts[0], rollouts[1], tasks, endpoint=True)
        owners = np.repeat(np.arange(tasks), counts)
        passed = rng.random(len(owners)) < rng.beta(*rates, tasks)[owners]
        ends = clustered_mean(passed, owners).ci95
        assert ends is not None
        hits += ends[0] <= truth <= ends[1]
    return hits / DRAWS


@pytest.mark.parametrize(
    ("tasks", "rollouts", "rates"),
    [
        (10, (4, 4), (1, 1)),
        (10, (16, 16), (4, 1)),
        (10, (1, 16), (1, 1)),
        (30, (1, 1), (1, 1)),
        (30, (8, 8), (0.5, 0.5)),
        (30, (4, 4), (19, 1)),
        (200, (1, 1), (4, 1)),
        (200, (1, 16), (5, 5)),
        (200, (16, 16), (0.3, 2.7)),
    ],
)
def test_the_interval_covers_the_true_mean_in_about_95_of_100_runs(
    tasks: int, rollouts: tuple[int, int], rates: tuple[float, float]
) -> None:
    # Two thousand draws scatter by half a percent.
    assert 0.93 <= coverage(tasks, rollouts, rates) <= 0.98


def test_a_few_tasks_with_a_high_pass_rate_are_covered_too() -> None:
    assert coverage(10, (1, 1), (19, 1)) >= 0.93


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


def test_all_passes_are_no_proof_of_perfection() -> None:
    for reward, certain in ((1.0, 1), (0.0, 0)):
        estimate = clustered_mean([reward] * 20, [task for task in range(10) for _ in range(2)])
        assert estimate.ci95 is not None
        assert estimate.ci95[certain] == reward
        assert 0.2 < abs(estimate.ci95[1 - certain] - reward) < 0.5


def test_equal_rewards_between_the_bounds_have_no_spread() -> None:
    assert clustered_mean([0.5, 0.5, 0.5], [0, 1, 2]).ci95 == (0.5, 0.5)


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
