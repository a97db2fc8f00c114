import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from nemo_gym.metrics.aggregate import aggregate_table
from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.reward_profile import (
    AggregateMetricsMixin,
    AggregateMetricsRequest,
    compute_aggregate_metrics,
    compute_pass_majority_metrics,
)

Golden = Callable[[str], Any]
AssertSame = Callable[[Any, Any], None]


def response(task: int, rollout: int, **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, **fields}


def test_the_result_without_hooks_matches_the_golden_data(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("aggregate.json")

    assert_same(compute_aggregate_metrics(case["responses"]).model_dump(), case["result"])
    assert_same(compute_aggregate_metrics(case["responses"][::-1]).model_dump(), case["result"])


def test_the_metrics_file_of_two_agents_matches_the_golden_data_byte_for_byte(
    golden: Golden, golden_bytes: Callable[[str], bytes]
) -> None:
    entries = []
    for agent, responses in golden("two_agents.json").items():
        metrics = compute_aggregate_metrics(responses)
        entries.append(
            {
                "agent_ref": {"name": agent},
                "agent_metrics": metrics.agent_metrics,
                "key_metrics": metrics.key_metrics,
                "group_level_metrics": metrics.group_level_metrics,
            }
        )

    content = orjson.dumps(entries, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    assert content == golden_bytes("two_agents_aggregate_metrics.json")


def test_std_exists_only_where_it_is_defined_except_in_groups_of_one(golden: Golden, assert_same: AssertSame) -> None:
    case = golden("aggregate.json")["std_rule"]
    metrics = compute_aggregate_metrics(case["responses"])

    statistics = [
        {key: value for key, value in group.items() if key == "_ng_task_index" or "/" in key}
        for group in metrics.group_level_metrics
    ]
    assert_same(metrics.agent_metrics, case["agent_metrics"])
    assert_same(statistics, case["groups"])


def test_hooks_add_to_the_agent_and_to_single_tasks(golden: Golden) -> None:
    responses = golden("aggregate.json")["responses"]
    per_task = [
        {"_ng_task_index": 1, "note": "second task", "mean/reward": -1},
        {"_ng_task_index": 9, "note": "no such task"},
        {"note": "no task at all"},
        "no entry",
    ]
    returned = {"per_task_metrics": per_task}

    def compute_metrics(tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        returned["solved"] = sum(any(rollout["reward"] == 1 for rollout in task) for task in tasks)  # type: ignore[assignment]
        return returned

    metrics = compute_aggregate_metrics(responses, compute_metrics, lambda agent: {"solved": agent["solved"]})

    assert (metrics.agent_metrics["solved"], metrics.key_metrics) == (2, {"solved": 2})
    assert "per_task_metrics" not in metrics.agent_metrics
    assert "per_task_metrics" in returned
    first, second = metrics.group_level_metrics
    assert "note" not in first
    assert (second["_ng_task_index"], second["note"], second["mean/reward"]) == (1, "second task", -1)


def test_hooks_see_tasks_ascending_and_rollouts_in_the_order_sent() -> None:
    responses = [response(10, 1, tag="b"), response(5, 0, tag="a"), response(10, 0, tag="c")]
    metrics = compute_aggregate_metrics(responses, lambda tasks: {"seen": tasks})

    assert metrics.agent_metrics["seen"] == [[responses[1]], [responses[0], responses[2]]]
    assert [group["_ng_task_index"] for group in metrics.group_level_metrics] == [5, 10]


def test_a_hook_that_returns_nothing_adds_nothing() -> None:
    assert compute_aggregate_metrics([response(0, 0)], lambda tasks: None).agent_metrics == {}  # type: ignore[arg-type, return-value]


def test_no_responses_give_empty_metrics_and_call_no_hook() -> None:
    metrics = compute_aggregate_metrics([], lambda tasks: {"called": 1}, lambda agent: {"called": 1})

    assert metrics.model_dump() == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}


def test_a_response_without_any_number_gives_a_group_without_statistics() -> None:
    metrics = compute_aggregate_metrics([response(0, 0, label="x", response={"usage": None})])

    assert metrics.agent_metrics == {}
    assert not [key for key in metrics.group_level_metrics[0] if "/" in key]


def test_nan_is_no_value() -> None:
    metrics = compute_aggregate_metrics([response(0, 0, reward=float("nan")), response(0, 1, reward=1.0)])

    assert metrics.agent_metrics == dict.fromkeys(("mean/reward", "max/reward", "min/reward", "median/reward"), 1.0)


def test_infinite_values_have_no_std_and_raise_no_warning() -> None:
    metrics = compute_aggregate_metrics([response(0, 0, x=float("inf"), y=1.0), response(0, 1, x=1.0, y=2.0)])

    assert (metrics.agent_metrics["max/x"], "std/x" in metrics.agent_metrics) == (float("inf"), False)


def test_our_own_numbers_are_no_metrics_while_those_of_others_count_whatever_they_begin_with() -> None:
    fields = {"_ng_attempt_index": 2, "_theirs": 1.5, "reward": 1.0, "response": {"usage": {"_cached": 3}}}
    metrics = compute_aggregate_metrics([response(0, 0, **fields)])

    means = ["mean/_theirs", "mean/reward", "mean/_cached"]
    assert list(metrics.key_metrics) == means
    assert [key for key in metrics.group_level_metrics[0] if key.startswith("mean/")] == means


def test_a_field_and_a_usage_field_of_one_name_are_both_shown() -> None:
    usage = {"total_tokens": 7, "reward": 100.0}
    metrics = compute_aggregate_metrics([response(0, 0, reward=1.0, total_tokens=9, response={"usage": usage})])

    [info] = metrics.group_level_metrics[0]["rollout_infos"]
    assert (metrics.agent_metrics["mean/total_tokens"], metrics.agent_metrics["mean/result.total_tokens"]) == (7.0, 9.0)
    assert (info["total_tokens"], info["usage.total_tokens"]) == (9, 7)
    assert (metrics.agent_metrics["mean/reward"], metrics.agent_metrics["mean/usage.reward"]) == (1.0, 100.0)
    assert (info["reward"], info["usage.reward"]) == (1.0, 100.0)


def test_bad_records_are_left_out_of_what_they_affect_counted_and_named() -> None:
    responses: list[Any] = [
        response(0, 0, reward=1.0, x=1.0),
        response(0, 1, reward=None, x=3.0),
        {"reward": 5.0},
        "no object",
        response(0, 0, reward=9.0),
        response(1, 0, reward=0.0, response=None),
        response(1, 1, reward="1", response={"usage": [1]}),
        {"_ng_task_index": True, "_ng_rollout_index": 0, "reward": 5.0},
    ]
    metrics = compute_aggregate_metrics(responses)

    assert (metrics.agent_metrics["mean/reward"], metrics.agent_metrics["mean/x"]) == (0.5, 2.0)
    assert [group["num_rollouts"] for group in metrics.group_level_metrics] == [2, 2]
    assert metrics.agent_metrics["bad_records"] == 7
    assert metrics.agent_metrics["bad_records_by_reason"] == {
        "reward is not a number": {"count": 2, "records": ["0:1", "1:1"]},
        "_ng_task_index or _ng_rollout_index is missing or not an integer": {
            "count": 2,
            "records": ["record 3", "record 8"],
        },
        "record is not an object": {"count": 1, "records": ["record 4"]},
        "response is not an object": {"count": 1, "records": ["1:0"]},
        "response.usage is not an object": {"count": 1, "records": ["1:1"]},
        "rollout key occurred before; the first record was kept": {"count": 1, "records": ["0:0"]},
    }
    assert list(metrics.agent_metrics)[-2:] == ["bad_records", "bad_records_by_reason"]
    assert orjson.dumps(metrics.model_dump())


def test_the_names_of_bad_records_are_bounded() -> None:
    metrics = compute_aggregate_metrics([response(0, number, reward=None) for number in range(1000)])

    [reason] = metrics.agent_metrics["bad_records_by_reason"].values()
    assert (reason["count"], len(reason["records"])) == (1000, 20)


def test_records_that_are_all_bad_are_reported_and_call_no_hook() -> None:
    metrics = compute_aggregate_metrics([{}, {}], lambda tasks: {"called": 1}, lambda agent: {"called": 1})

    assert metrics.agent_metrics["bad_records"] == 2
    assert (metrics.group_level_metrics, metrics.key_metrics) == ([], {})


def test_pass_at_k_in_a_hook_survives_bad_records() -> None:
    responses = [
        response(0, 0, reward=1.0, answer=["a", "list"]),
        response(0, 1, reward=None, answer={"an": "object"}),
        response(0, 2, answer=["a", "list"]),
    ]
    metrics = compute_aggregate_metrics(
        responses, lambda tasks: compute_pass_majority_metrics(tasks, answer_key="answer")[0]
    )

    assert metrics.agent_metrics["pass@1/accuracy"] == 100.0
    assert metrics.agent_metrics["bad_records"] == 1


def test_a_hook_that_stumbles_over_a_bad_reward_is_asked_again_without_it(caplog: pytest.LogCaptureFixture) -> None:
    responses = [response(0, 0, reward=1.0), response(0, 1, reward=None), response(1, 0, reward=None)]

    def total(tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {"total": sum(rollout["reward"] for task in tasks for rollout in task), "tasks": len(tasks)}

    with caplog.at_level(logging.WARNING):
        metrics = compute_aggregate_metrics(responses, total)

    assert (metrics.agent_metrics["total"], metrics.agent_metrics["tasks"]) == (1.0, 1)
    assert "asking again" in caplog.text


def test_a_hook_that_fails_on_good_records_fails_the_call() -> None:
    def broken(_: object) -> dict[str, Any]:
        raise RuntimeError("a fault of the hook")

    with pytest.raises(RuntimeError, match="a fault of the hook"):
        compute_aggregate_metrics([response(0, 0, reward=1.0)], broken)
    with pytest.raises(RuntimeError, match="a fault of the hook"):
        compute_aggregate_metrics([response(0, 0, reward=1.0)], None, broken)


def test_key_metrics_that_bad_records_made_impossible_become_the_means() -> None:
    metrics = compute_aggregate_metrics(
        [response(0, 0, reward=None, x=1.0)], None, lambda agent: {"reward": agent["mean/reward"]}
    )

    assert metrics.key_metrics == {"mean/x": 1.0}


def test_a_table_filled_record_by_record_gives_the_same_metrics(golden: Golden) -> None:
    responses = golden("aggregate.json")["responses"]
    table = RolloutTable()
    for record in responses:
        table.add(record)

    assert len(table) == len(responses)
    assert aggregate_table(table) == compute_aggregate_metrics(responses)


def test_records_may_all_have_different_fields() -> None:
    responses = [response(task, 0, **{f"field{task}": task, f"text{task}": "x"}) for task in range(300)]

    metrics = compute_aggregate_metrics(responses)

    assert (len(metrics.agent_metrics), metrics.agent_metrics["mean/field299"]) == (4 * 300, 299.0)
    assert metrics.group_level_metrics[200]["rollout_infos"][0]["field200"] == 200


def test_a_long_run_whose_records_all_look_different_is_kept_in_one_layout() -> None:
    count = 10_002
    table = RolloutTable()
    for task in range(count):
        numbers = {"reward": 1.0, "seed": 2**60 + task, "a": task, "b": 0, "c": True}
        table.add(response(task, 0, **{f"text{task}": "x"}, **numbers))

    metrics = aggregate_table(table)

    assert len(table.layouts) == 1
    assert metrics.agent_metrics["mean/a"] == (count - 1) / 2
    infos = [group["rollout_infos"][0] for group in metrics.group_level_metrics]
    assert [info["seed"] - 2**60 for info in infos] == list(range(count))
    assert [info["a"] for info in infos] == list(range(count))


def test_a_servers_endpoint_uses_its_hooks() -> None:
    class Server(AggregateMetricsMixin):
        def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
            return {"mean/tasks": len(tasks)}

    body = AggregateMetricsRequest(verify_responses=[response(0, 0, reward=1.0), response(3, 0, reward=0.0)])
    metrics = asyncio.run(Server().aggregate_metrics(body))

    assert metrics.key_metrics == {"mean/reward": 0.5, "mean/tasks": 2}
    assert "mean/tasks" not in asyncio.run(AggregateMetricsMixin().aggregate_metrics(body)).key_metrics
