import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.reward_profile import RewardProfiler

Golden = Callable[[str], Any]
AssertSame = Callable[[Any, Any], None]


def row(task: int, rollout: int, agent: str = "alpha") -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": agent}}


def result(task: int, rollout: int, usage: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, **fields, "response": {"usage": usage or {}}}


def profile(results: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows = [row(record["_ng_task_index"], record["_ng_rollout_index"]) for record in results]
    return RewardProfiler().profile_from_data(rows, results)


def test_the_files_match_the_golden_data_byte_for_byte(
    golden: Golden, golden_bytes: Callable[[str], bytes], tmp_path: Path
) -> None:
    profiler = RewardProfiler()
    groups, agents = profiler.profile_from_data(golden("rows.jsonl"), golden("results.jsonl"), True)

    paths = profiler.write_to_disk(groups, agents, tmp_path / "rollouts.jsonl")

    names = ["rollouts_reward_profiling.jsonl", "rollouts_agent_metrics.json"]
    assert [path.name for path in paths] == names
    assert [path.read_bytes() for path in paths] == [golden_bytes(name) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_the_completion_summary_matches_the_golden_data(golden: Golden, assert_same: AssertSame) -> None:
    summary = RewardProfiler().profile_completion_summary(golden("rows.jsonl"), golden("results.jsonl"))

    assert_same(summary, golden("completion_summary.json"))


def test_the_completion_summary_counts_results_nobody_asked_for() -> None:
    summary = RewardProfiler().profile_completion_summary([], [result(0, 0)])

    assert (summary["extra_rollout_rows"], summary["reward_profile_completion_pct"]) == (1, 100.0)


def test_rows_without_results_are_an_error_unless_partial_rollouts_are_allowed(golden: Golden) -> None:
    rows, results = golden("rows.jsonl"), golden("results.jsonl")

    with pytest.raises(ValueError, match=r"^3 .*\[\(1, 1\), \(2, 0\), \(2, 1\)\].*\+\+allow_partial_rollouts=True"):
        RewardProfiler().align_rows_and_results(rows, results)
    assert RewardProfiler().profile_from_data(rows, [], allow_partial_rollouts=True) == ([], [])


def test_results_without_a_row_are_always_an_error() -> None:
    with pytest.raises(ValueError, match=r"^1 .*no matching materialized input.*\[\(1, 0\)\]"):
        RewardProfiler().align_rows_and_results([row(0, 0)], [result(1, 0)], allow_partial_rollouts=True)


def test_only_the_first_ten_keys_are_named() -> None:
    with pytest.raises(ValueError, match=r"^12 .*\(0, 9\)\]"):
        RewardProfiler().align_rows_and_results([row(0, number) for number in range(12)], [])


def test_a_repeated_key_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Duplicate materialized input row.*\(0, 0\)"):
        RewardProfiler().profile_from_data([row(0, 0), row(0, 0)], [], True)
    with pytest.raises(ValueError, match=r"Duplicate result row.*\(1, 0\)"):
        RewardProfiler().profile_from_data([row(1, 0)], [result(1, 0), result(1, 0)], True)


@pytest.mark.parametrize("index", [None, "0", True, 2**63])
def test_a_row_without_usable_indices_is_an_error_that_names_it(index: object) -> None:
    with pytest.raises(KeyError, match="result row 2 has _ng_task_index"):
        RewardProfiler().align_rows_and_results([row(0, 0)], [result(0, 0), {"_ng_task_index": index}])


def test_pairs_come_in_key_order_whatever_the_input_order() -> None:
    rows = [row(1, 0), row(0, 1), row(0, 0)]
    results = [result(0, 0), result(0, 1), result(1, 0)]

    pairs = RewardProfiler().align_rows_and_results(rows, results)

    assert pairs == [(rows[2], results[0]), (rows[1], results[1]), (rows[0], results[2])]


def test_rewards_and_bools_of_three_tasks_of_two() -> None:
    results = [
        result(task, rollout, {"tokens": 1}, reward=rollout, ok=bool(rollout))
        for task in range(3)
        for rollout in (0, 1)
    ]
    groups, [agent] = profile(results)

    for group in groups:
        assert (group["mean/reward"], group["std/reward"]) == (0.5, 0.7071067811865476)
        assert (group["mean/ok"], group["std/tokens"]) == (0.5, 0.0)
        assert group["sample"] == {"agent_ref": {"name": "alpha"}}
    assert agent["std/reward"] == pytest.approx(0.5477225575051661, abs=1e-9)
    assert list(agent)[-1] == "agent_ref"


def test_max_and_min_are_whole_numbers_only_when_every_number_is() -> None:
    whole, [agent] = profile([result(0, 0, {"tokens": 1}, ok=True), result(0, 1, {"tokens": 1}, ok=False)])
    assert [whole[0][key] for key in ("mean/tokens", "max/tokens", "min/tokens", "median/tokens", "std/tokens")] == [
        1.0, 1, 1, 1.0, 0.0,
    ]  # fmt: skip
    assert [type(agent[key]) for key in ("max/tokens", "min/ok", "mean/tokens")] == [int, int, float]

    mixed, _ = profile([result(0, 0, {"tokens": 1}, reward=1.0)])
    assert type(mixed[0]["max/tokens"]) is float
    gap, _ = profile([result(0, 0, {"tokens": 1}), result(0, 1)])
    assert type(gap[0]["max/tokens"]) is float


def test_tasks_of_unequal_size_with_usage_alone() -> None:
    groups, _ = profile([result(0, 0, {"tokens": 3}), result(0, 1, {"tokens": 4}), result(1, 0, {"tokens": 5})])

    assert [group["mean/tokens"] for group in groups] == [3.5, 5.0]


def test_rollout_infos_are_sorted_and_complete() -> None:
    results = [result(0, 1, {"tokens": 7}, extra=True, reward=0), result(0, 0, {"tokens": 6}, reward=1.0)]

    [group], _ = profile(results)

    assert group["rollout_infos"] == [
        {"rollout_id": "0:0", "_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "tokens": 6},
        {"rollout_id": "0:1", "_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 0, "tokens": 7, "extra": 1},
    ]
    assert list(group["rollout_infos"][1])[3:] == ["reward", "tokens", "extra"]
    assert [type(value) for value in group["rollout_infos"][1].values()][3:] == [int, int, int]


def test_rollout_infos_keep_integers_no_float_can_hold() -> None:
    [group], _ = profile([result(0, 0, seed=2**60 + 1), result(0, 1, seed=-(10**400))])

    assert [info["seed"] for info in group["rollout_infos"]] == [2**60 + 1, -(10**400)]
    assert group["max/seed"] == 2**60


def test_fields_only_some_tasks_have() -> None:
    groups, [agent] = profile([result(0, 0, a=1.0), result(1, 0, b=2.0), result(2, 0, a=3.0)])

    assert [[key for key in group if "/" in key] for group in groups[:2]] == [
        [f"{statistic}/{field}" for statistic in ("mean", "max", "min", "median", "std", "histogram")]
        for field in ("a", "b")
    ]
    assert (groups[0]["std/a"], agent["mean/a"], agent["mean/b"]) == (0.0, 2.0, 2.0)
    assert [key for key in agent if key.startswith("std/")] == ["std/a"]


def test_fields_appear_in_the_order_of_the_rollouts_not_of_the_input() -> None:
    _, [agent] = profile([result(1, 0, z=1.0), result(0, 0, b=1.0, a=1.0)])

    assert [key for key in agent if key.startswith("mean/")] == ["mean/b", "mean/a", "mean/z"]


def test_agents_are_those_of_the_rows_sorted_by_name() -> None:
    rows = [row(0, 0, "zeta"), row(1, 0, "alpha"), row(0, 1, "zeta"), {"_ng_task_index": 2, "_ng_rollout_index": 0}]
    results = [result(0, 0, reward=1.0), result(0, 1, reward=0.0), result(1, 0, reward=1.0), result(2, 0, reward=9.0)]

    _, agents = RewardProfiler().profile_from_data(rows, results)

    assert [(agent["agent_ref"], agent["mean/reward"]) for agent in agents] == [
        ({"name": "alpha"}, 1.0),
        ({"name": "zeta"}, 0.5),
    ]


def test_a_result_without_a_usable_response_is_profiled_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        [group], _ = profile([result(0, 0, reward=1.0) | {"response": None}, row(0, 1) | {"reward": 0.0}])

    assert group["mean/reward"] == 0.5
    assert "response is not an object" in caplog.text
    assert "'0:0'" in caplog.text
    assert "0:1" not in caplog.text


def test_histograms_are_dropped_from_copies_only() -> None:
    entry = {"mean/reward": 1.0, "histogram/reward": object()}

    assert RewardProfiler().prepare_for_serialization([entry]) == [{"mean/reward": 1.0}]
    assert "histogram/reward" in entry
