from typing import Any

import orjson
import pytest

from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.metrics.intervals import clustered_mean, compute_coverage
from nemo_gym.metrics.pass_at_k import compute_pass_majority_metrics


def record(task: int, rollout: int, reward: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, "reward": reward}


RECORDS = [record(0, 0, 1.0), record(0, 1, 0.0), record(1, 0, 1.0), record(2, 0, True)]


def test_every_expected_rollout_and_task_is_scored_failed_or_missing() -> None:
    coverage = compute_coverage(RECORDS, [(1, 1), (3, 0), (3, 1)], expected_rollouts=10, expected_tasks=5)

    assert coverage["expected"] == {"rollouts": 10, "tasks": 5}
    assert coverage["scored"] == {"rollouts": 4, "tasks": 3}
    assert coverage["failed"] == {"rollouts": 3, "tasks": 1}
    assert coverage["missing"] == {"rollouts": 3, "tasks": 1}
    assert coverage["tasks_per_k"] == {"1": 3, "2": 1}


def test_both_means_come_with_their_interval() -> None:
    coverage = compute_coverage(RECORDS, [(1, 1), (3, 0)])

    assert coverage["mean_excluding_failures"] == 0.75
    assert coverage["mean_failures_as_zero"] == 0.5
    without = clustered_mean([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 2]).ci95
    with_zeros = clustered_mean([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 2, 1, 3]).ci95
    assert without is not None
    assert with_zeros is not None
    assert coverage["ci95"] == {
        "mean_excluding_failures": pytest.approx(list(without)),
        "mean_failures_as_zero": pytest.approx(list(with_zeros)),
    }


def test_the_keys_come_in_a_fixed_order_and_the_dict_is_json() -> None:
    coverage = compute_coverage(RECORDS)

    assert list(coverage) == [
        "expected",
        "scored",
        "failed",
        "missing",
        "mean_excluding_failures",
        "mean_failures_as_zero",
        "ci95",
        "tasks_per_k",
        "pass_at_k",
    ]
    assert orjson.loads(orjson.dumps(coverage)) == coverage


def test_what_is_missing_is_unknown_when_nobody_says_what_was_expected() -> None:
    coverage = compute_coverage(RECORDS)

    assert coverage["expected"] == coverage["missing"] == {"rollouts": None, "tasks": None}


def test_a_failed_rollout_that_was_scored_later_counts_once() -> None:
    coverage = compute_coverage(RECORDS, [(0, 0), (0, 0), (2, 0)], expected_rollouts=4, expected_tasks=3)

    assert coverage["failed"] == {"rollouts": 0, "tasks": 0}
    assert coverage["missing"] == {"rollouts": 0, "tasks": 0}
    assert coverage["mean_failures_as_zero"] == coverage["mean_excluding_failures"]


def test_a_result_without_a_usable_reward_is_not_scored() -> None:
    records = [record(0, 0, None), record(0, 1, float("nan")), record(1, 0, 1.0), record(1, 0, 0.0)]
    coverage = compute_coverage(records, expected_rollouts=3, expected_tasks=2)

    assert coverage["scored"] == {"rollouts": 1, "tasks": 1}
    assert coverage["missing"] == {"rollouts": 2, "tasks": 1}
    assert (coverage["mean_excluding_failures"], coverage["ci95"]["mean_excluding_failures"]) == (1.0, None)


def test_nothing_scored_has_no_mean_but_failures_do() -> None:
    coverage = compute_coverage([], [(0, 0), (1, 0)], expected_rollouts=2, expected_tasks=2)

    assert coverage["mean_excluding_failures"] is None
    assert coverage["mean_failures_as_zero"] == 0.0
    assert (coverage["failed"], coverage["tasks_per_k"]) == ({"rollouts": 2, "tasks": 2}, {})


def test_more_than_expected_is_not_less_than_nothing_missing() -> None:
    assert compute_coverage(RECORDS, expected_rollouts=1, expected_tasks=1)["missing"] == {"rollouts": 0, "tasks": 0}


def test_a_table_serves_as_well_as_the_records() -> None:
    table = RolloutTable()
    for entry in RECORDS:
        table.add(entry)

    assert compute_coverage(table, [(3, 0)], 9, 4) == compute_coverage(RECORDS, [(3, 0)], 9, 4)


def test_rewards_of_0_and_1_have_pass_at_k_for_as_many_rollouts_as_most_tasks_have() -> None:
    rewards = [[1, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1], [1, 0, 0, 0, 0]]
    records = [record(task, n, reward) for task, values in enumerate(rewards) for n, reward in enumerate(values)]

    found = compute_coverage(reversed(records))["pass_at_k"]

    tasks = [[{"reward": reward} for reward in values] for values in rewards]
    same = compute_pass_majority_metrics(tasks)[0]
    assert found == {
        "k": 4,
        "tasks": 4,
        "pass@k": pytest.approx(same["pass@4/accuracy"]),
        "pass@1[avg-of-k]": pytest.approx(same["pass@1[avg-of-4]/accuracy"]),
    }


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 0.5], [0.0, 2.0]])
def test_single_rollouts_and_other_rewards_have_no_pass_at_k(rewards: list[float]) -> None:
    assert compute_coverage([record(0, n, reward) for n, reward in enumerate(rewards)])["pass_at_k"] is None
