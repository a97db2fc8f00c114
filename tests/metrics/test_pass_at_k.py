from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.reward_profile import (
    add_avg_sample_std_dev,
    compute_pass_majority_metrics,
    compute_subset_metrics,
    highest_k_metrics,
)

Golden = Callable[[str], Any]
AssertSame = Callable[[Any, Any], None]

NEW_KEYS = ("unanswered@", "per_sample_aggregate_aligned", "aligned_std", "percent_avg_sample_std_dev")


def metrics_of(tasks: list[list[Any]], **arguments: Any) -> dict[str, Any]:
    return compute_pass_majority_metrics(tasks, **arguments)[0]


def tasks_of(rewards: list[list[float]]) -> list[list[dict[str, Any]]]:
    return [[{"reward": reward} for reward in task] for task in rewards]


def test_two_tasks_of_four_rollouts_with_answers_match_the_golden_data(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("pass_at_k.json")["two_tasks_of_four"]

    metrics, scores, names, max_k = compute_pass_majority_metrics(case["tasks"], answer_key=case["answer_key"])

    assert_same(metrics, case["metrics"])
    assert_same(scores, case["score_dicts"])
    assert (names, max_k) == (["accuracy", "no_answer"], 4)


def test_without_an_answer_key_there_is_neither_majority_nor_no_answer(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("pass_at_k.json")["two_tasks_of_four"]
    expected = {k: v for k, v in case["metrics"].items() if "majority@" not in k and "no_answer" not in k}
    expected["per_sample_aggregate"] = {"accuracy": expected["per_sample_aggregate"]["accuracy"]}

    assert_same(metrics_of(case["tasks"]), expected)


def test_uneven_tasks_and_continuous_rewards_match_the_golden_data(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("pass_at_k.json")["uneven_and_continuous"]

    assert_same(metrics_of(case["tasks"]), case["metrics"])


def test_a_score_that_some_rollouts_lack_matches_the_golden_data(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("pass_at_k.json")["score_in_some_rollouts"]

    def scores(rollout: dict[str, Any]) -> dict[str, Any]:
        return {"accuracy": rollout["reward"]} | ({"lib": rollout["lib"]} if "lib" in rollout else {})

    assert_same(metrics_of(case["tasks"], score_fn=scores), case["metrics"])


def test_one_answer_with_two_scores_is_two_candidates(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("pass_at_k.json")["same_answer_different_scores"]
    metrics = metrics_of(case["tasks"], answer_key="a")

    assert_same({key: value for key, value in metrics.items() if key.startswith("majority@")}, case["metrics"])


def test_a_task_without_answers_counts_as_zero_in_the_majority(golden: Golden, assert_same: AssertSame) -> None:
    expected = golden("pass_at_k.json")["no_answers"]["metrics"]
    metrics = metrics_of([[{"reward": 1.0, "a": None}, {"reward": 1.0, "a": None}]], answer_key="a")

    assert_same({key: metrics[key] for key in metrics if key in expected}, expected)


def test_subsets_match_the_golden_data(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("pass_at_k.json")["subsets"]

    assert_same(compute_subset_metrics(case["tasks"], "lvl"), case["metrics"])
    assert compute_subset_metrics(case["tasks"], "no such field") == {}


def test_degenerate_inputs() -> None:
    assert compute_pass_majority_metrics([]) == ({}, [], [], 0)
    assert compute_pass_majority_metrics([[], []]) == ({"per_sample_aggregate": {}}, [[], []], [], 0)
    assert compute_pass_majority_metrics([[], []], answer_key="a") == ({"per_sample_aggregate": {}}, [[], []], [], 0)
    assert metrics_of([[], [{"reward": 1.0}]]) == {
        "pass@1/accuracy": 100.0,
        "pass@1[avg-of-1]/accuracy": 100.0,
        "per_sample_aggregate": {"accuracy": [100.0]},
    }


def test_sample_std_dev_matches_the_golden_data_and_comes_in_percent_too(
    golden: Golden, assert_same: AssertSame
) -> None:
    case = golden("pass_at_k.json")["two_tasks_of_four"]
    metrics: dict[str, Any] = {}
    _, scores, names, max_k = compute_pass_majority_metrics(case["tasks"], answer_key=case["answer_key"])

    add_avg_sample_std_dev(metrics, scores, names, max_k)

    expected = case["avg_sample_std_dev"]
    assert_same({key: value for key, value in metrics.items() if "percent" not in key}, expected)
    in_percent = {key.replace("/avg_sample", "/percent_avg_sample"): 100 * value for key, value in expected.items()}
    assert_same({key: value for key, value in metrics.items() if "percent" in key}, in_percent)


def test_sample_std_dev_needs_two_rollouts() -> None:
    metrics: dict[str, Any] = {}
    _, scores, names, max_k = compute_pass_majority_metrics(tasks_of([[1.0], [0.0]]))

    add_avg_sample_std_dev(metrics, scores, names, max_k)

    assert metrics == {}


def test_equal_scores_have_no_deviation_whatever_their_rounding() -> None:
    metrics: dict[str, Any] = {}
    _, scores, names, max_k = compute_pass_majority_metrics(tasks_of([[0.1] * 7]))

    add_avg_sample_std_dev(metrics, scores, names, max_k)

    assert metrics["pass@1[avg-of-7]/accuracy/avg_sample_std_dev"] == 0.0


def test_highest_k_selection_matches_the_golden_data(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("pass_at_k.json")["two_tasks_of_four"]
    metrics, scores, names, max_k = compute_pass_majority_metrics(case["tasks"], answer_key=case["answer_key"])
    add_avg_sample_std_dev(metrics, scores, names, max_k)

    selected = {
        "pass@{k}": highest_k_metrics(metrics, "pass@{k}"),
        "pass@1[avg-of-{k}]": highest_k_metrics(metrics, "pass@1[avg-of-{k}]"),
        "majority@{k} excluding no_answer": highest_k_metrics(metrics, "majority@{k}", exclude_names=["no_answer"]),
        "pass@{k} only accuracy": highest_k_metrics(metrics, "pass@{k}", score_names=["accuracy"]),
    }

    assert_same(selected, case["highest_k"])


def test_the_highest_k_is_sought_among_the_selected_names_and_compared_as_a_number() -> None:
    metrics = {"pass@2/accuracy": 1, "pass@10/accuracy": 2, "pass@10/no_answer": 3, "pass@12/no_answer": 4}

    assert highest_k_metrics(metrics, "pass@{k}", score_names=["accuracy"]) == {"pass@10/accuracy": 2}
    assert highest_k_metrics(metrics, "majority@{k}") == {}
    assert highest_k_metrics({}, "pass@{k}") == {}
    assert highest_k_metrics({"pass@3/easy/accuracy": 1}, "pass@{k}") == {"pass@3/easy/accuracy": 1}


def test_a_pattern_without_k_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'pass@1' must hold \{k\}"):
        highest_k_metrics({}, "pass@1")


def test_several_scores_give_separate_keys_and_bools_count_as_numbers() -> None:
    metrics = metrics_of([[{"x": True, "y": 0.25}]], score_fn=lambda rollout: rollout)

    assert (metrics["pass@1/x"], metrics["pass@1/y"]) == (100.0, 25.0)


def test_scores_may_be_numpys() -> None:
    scores = {"x": np.float32(0.5), "y": np.bool_(True), "z": np.int64(1)}

    metrics, [[plain]], _, _ = compute_pass_majority_metrics([[{}]], score_fn=lambda _: scores)

    assert (metrics["pass@1/x"], metrics["pass@1/y"], metrics["pass@1/z"]) == (50.0, 100.0, 100.0)
    assert [type(value) for value in plain.values()] == [float, int, float]


@pytest.mark.parametrize("reward", [None, "1.0", float("nan"), float("inf"), 10**400, [1.0]])
def test_a_rollout_without_a_usable_reward_is_skipped(reward: object) -> None:
    metrics, scores, _, max_k = compute_pass_majority_metrics([[{"reward": reward}, {"reward": 1.0}], [{}]])

    assert scores == [[{}, {"accuracy": 1.0}], [{}]]
    assert (metrics["pass@1/accuracy"], metrics["pass@1[avg-of-2]/accuracy"], max_k) == (100.0, 100.0, 2)


def test_a_rollout_that_is_no_object_is_skipped() -> None:
    task: list[Any] = [None, "text", {"reward": 1.0, "a": "x"}]
    metrics = metrics_of([task], answer_key="a")

    assert (metrics["pass@1/accuracy"], metrics["majority@3/accuracy"]) == (100.0, 100.0)


def test_a_score_function_may_stumble_over_a_bad_reward_only() -> None:
    def is_solved(rollout: dict[str, Any]) -> dict[str, Any]:
        return {"solved": rollout["reward"] > 0.5}

    assert metrics_of([[{"reward": None}, {}, {"reward": 1.0}]], score_fn=is_solved)["pass@1/solved"] == 100.0
    with pytest.raises(ZeroDivisionError):
        metrics_of([[{"reward": 1.0}]], score_fn=lambda rollout: {"x": 1 / 0})


def test_answers_that_cannot_be_hashed_are_compared_by_their_json() -> None:
    answers: list[object] = [["4", 2], ["4", 2], '["4",2]', {"x": 1, "y": 2}]
    task = [{"reward": float(number < 2), "a": answer} for number, answer in enumerate(answers)]

    assert metrics_of([task], answer_key="a")["majority@4/accuracy"] == 100.0
    assert metrics_of([task[::-1]], answer_key="a")["majority@3/accuracy"] == pytest.approx(100 / 3)


def test_dict_answers_are_equal_whatever_the_order_of_their_keys() -> None:
    task: list[Any] = [
        {"reward": 1.0, "a": {"x": 1, "y": 2}},
        {"reward": 0.0, "a": {1, 2}},
        {"reward": 1.0, "a": {"y": 2, "x": 1}},
    ]

    assert metrics_of([task], answer_key="a")["majority@3/accuracy"] == 100.0


def test_unanswered_tells_how_many_tasks_have_no_answer_in_their_first_k_rollouts() -> None:
    tasks: list[list[Any]] = [
        [{"reward": 0.0, "a": None}, {"reward": 1.0, "a": "x"}],
        [{"reward": 0.0, "a": None}, {"reward": 0.0, "a": None}],
        [{"reward": 1.0, "a": "y"}],
        [],
    ]
    metrics = metrics_of(tasks, answer_key="a")

    assert (metrics["unanswered@1"], metrics["unanswered@2"]) == (75.0, 50.0)
    assert (metrics["majority@1/no_answer"], metrics["majority@2/no_answer"]) == (0.0, 0.0)
    assert list(metrics)[-2:] == ["unanswered@1", "unanswered@2"]


def test_runs_keep_their_position_beside_the_documented_list_that_closes_gaps() -> None:
    tasks: list[list[dict[str, Any]]] = [[{"reward": 0.0}, {}, {"reward": 1.0}], [{"reward": 1.0}, {}, {"reward": 1.0}]]
    metrics = metrics_of(tasks)

    assert metrics["per_sample_aggregate"] == {"accuracy": [50.0, 100.0]}
    assert metrics["per_sample_aggregate_aligned"] == {"accuracy": [50.0, None, 100.0]}
    assert metrics["pass@1[avg-of-2]/accuracy/std_dev_across_runs"] == pytest.approx(35.35533905932738)
    assert "pass@1[avg-of-2]/accuracy/aligned_std_dev_across_runs" not in metrics
    assert metrics["pass@1[avg-of-3]/accuracy/aligned_std_dev_across_runs"] == pytest.approx(35.35533905932738)
    assert metrics["pass@1[avg-of-3]/accuracy/aligned_std_err_across_runs"] == pytest.approx(25.0)


def test_runs_that_only_end_early_are_not_reported_twice() -> None:
    assert not [key for key in metrics_of([[{"reward": 0.0}, {}]]) if key.startswith(NEW_KEYS)]


binary_tasks = st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=7), min_size=1, max_size=5)


@given(binary_tasks)
def test_pass_at_k_is_the_share_of_k_subsets_that_contain_a_pass(rewards: list[list[float]]) -> None:
    metrics = metrics_of(tasks_of(rewards))

    for k in range(1, max(map(len, rewards)) + 1):
        shares = []
        for task in rewards:
            subsets = list(combinations(task, k))
            shares += [sum(map(any, subsets)) / len(subsets)] if subsets else []
        assert metrics[f"pass@{k}/accuracy"] == pytest.approx(100 * sum(shares) / len(shares), abs=1e-9)


@given(st.lists(st.lists(st.none() | st.floats(0, 1), max_size=6), min_size=1, max_size=5))
def test_averages_and_continuous_pass_at_k_follow_their_definition(rewards: list[list[float | None]]) -> None:
    tasks = [[{"reward": reward} for reward in task] for task in rewards]
    metrics = metrics_of(tasks)

    for k in range(1, max(map(len, rewards)) + 1):
        firsts = [[value for value in task[:k] if value is not None] for task in rewards]
        averages = [sum(values) / len(values) for values in firsts if values]
        expected = pytest.approx(100 * sum(averages) / len(averages), abs=1e-9) if averages else None
        assert metrics.get(f"pass@1[avg-of-{k}]/accuracy") == expected
        scored = [[value for value in task if value is not None] for task in rewards]
        continuous = [max(v[:k]) for v in scored if len(v) >= k]
        if continuous and not any(set(v) <= {0, 1} for v in scored):
            best = pytest.approx(100 * sum(continuous) / len(continuous), abs=1e-9)
            assert metrics[f"pass@{k}/accuracy"] == best


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([None, "x", "y"])), max_size=6),
        min_size=1,
        max_size=4,
    )
)
def test_majority_counts_every_prefix_from_scratch(pairs: list[list[tuple[float, str | None]]]) -> None:
    tasks = [[{"reward": reward, "a": answer} for reward, answer in task] for task in pairs]
    metrics = metrics_of(tasks, answer_key="a")

    for k in range(1, max(map(len, pairs)) + 1):
        total = 0.0
        for task in pairs:
            votes = [pair for pair in task[:k] if pair[1] is not None]
            leaders = {pair for pair in votes if votes.count(pair) == max(map(votes.count, votes))}
            total += sum(reward for reward, _ in leaders) / len(leaders) if leaders else 0.0
        assert metrics[f"majority@{k}/accuracy"] == pytest.approx(100 * total / len(pairs), abs=1e-9)
