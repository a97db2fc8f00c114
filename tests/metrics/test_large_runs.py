"""Metrics of very many tasks: the same numbers to the byte, without all records or all answers in memory."""

import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from nemo_gym.collect import metrics as collected
from nemo_gym.collect.metrics import AgentMetrics, LargeAnswer, large_answer, write_metrics
from nemo_gym.jsonl import array_portions
from nemo_gym.metrics import aggregate, profile
from nemo_gym.metrics.aggregate import aggregated_json, compute_aggregate_metrics
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics, AggregateMetricsRequest

TASKS = 20_000


def record(task: int, **fields: Any) -> dict[str, Any]:
    chance = random.Random(task)
    usage = {"input_tokens": chance.randrange(9_000), "output_tokens": 7, "total_tokens": 9, "details": {"cached": 1}}
    scored = {"reward": float(task % 3 == 0), "note": '},{"' if task % 5 else "]},{[", "parts": [{"a": 1}, {"b": [2]}]}
    return {"_ng_task_index": task, "_ng_rollout_index": 0, **scored, "response": {"usage": usage}, **fields}


def request(records: list[Any]) -> bytes:
    return orjson.dumps({"verify_responses": records})


def read(body: bytes) -> AggregateMetricsRequest:
    return TypeAdapter(AggregateMetricsRequest).validate_json(body)


def long_way(records: list[Any], *hooks: Any) -> bytes:
    metrics = compute_aggregate_metrics(records, *hooks)
    return metrics.__pydantic_serializer__.to_json(metrics, by_alias=True, warnings=False)


def portions_of(body: bytes) -> list[list[dict[str, Any]]]:
    return list(array_portions(body, 1, len(body) - 1))


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_objects_in_an_array_are_told_apart_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    records = [record(task) for task in range(300)]
    monkeypatch.setattr("nemo_gym.jsonl._PORTION_BYTES", size)
    portions = portions_of(orjson.dumps(records))
    assert [each for portion in portions for each in portion] == records
    assert len(portions) > 1 or size > 1000
    assert portions_of(b"[]") == []


@pytest.mark.parametrize("odd", [b'[{"a":1},2]', b'[{"a":1},{"b":2]', b'[{"a":1},]', b'[{"a":NaN},{}]'])
def test_an_array_of_something_else_is_for_others_to_read(monkeypatch: pytest.MonkeyPatch, odd: bytes) -> None:
    monkeypatch.setattr("nemo_gym.jsonl._PORTION_BYTES", 1)
    with pytest.raises(ValueError, match=r"JSON|objects|expected|trailing|unexpected"):
        portions_of(odd)


def test_the_answer_is_the_same_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "_GROUPS_AT_A_TIME", 7)
    monkeypatch.setattr("nemo_gym.metrics.profile._TASKS_AT_A_TIME", 13)
    monkeypatch.setattr("nemo_gym.jsonl._PORTION_BYTES", 1000)
    odd_text = '\x00\x08\x0c\x1f\x7f\u2028/\\"\u00e9\U0001f600'
    records: list[Any] = [record(task, answer=odd_text, tiny=-1e-7 / (task + 1)) for task in range(100)]
    records += [
        record(3, reward=None),
        record(5, _ng_rollout_index=1, reward=2**70),
        record(7, _ng_rollout_index=1, x=1.5),
    ]
    assert aggregated_json(request(records[:100]), read) == long_way(records[:100])
    body = orjson.dumps({"verify_responses": records[:101]}).replace(b'"reward":null', b'"reward":%d' % 2**70)
    assert aggregated_json(body, read) == long_way(read(body).verify_responses)


def test_hooks_see_all_records_and_add_to_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "_GROUPS_AT_A_TIME", 7)

    def compute(tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        per_task = [{"_ng_task_index": task[0]["_ng_task_index"], "size": len(task)} for task in tasks]
        return {"tasks": len(tasks), "per_task_metrics": [*per_task, {"_ng_task_index": 10**6, "size": 0}, "odd"]}

    def headline(agent_metrics: dict[str, Any]) -> dict[str, Any]:
        return {"tasks": agent_metrics["tasks"]}

    records = [record(task) for task in range(50)]
    assert aggregated_json(request(records), read, compute, headline) == long_way(records, compute, headline)


@pytest.mark.parametrize("records", [[], [1], [{"reward": 1}], [record(1), 5, "text"]])
def test_records_that_are_none_are_counted(records: list[Any]) -> None:
    body = request(records)
    if any(not isinstance(each, dict) for each in records):
        with pytest.raises(ValueError, match="dict"):
            aggregated_json(body, read)
    else:
        assert aggregated_json(body, read) == long_way(records)


def test_memory_holds_the_request_and_the_answer_once() -> None:
    body = request([record(task) for task in range(TASKS)])
    aggregated_json(request([record(1)]), read)
    tracemalloc.start()
    try:
        answer = aggregated_json(body, read)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(AggregateMetrics.model_validate_json(answer).group_level_metrics) == TASKS
    assert peak < 1.3 * len(answer) + 30e6  # all groups as objects take five times the answer


def test_the_collector_writes_a_long_answer_as_it_writes_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym.jsonl._PORTION_BYTES", 5000)
    monkeypatch.setattr(collected, "_GROUPS_AT_A_TIME", 7)
    body = aggregated_json(request([record(task) for task in range(100)]), read)
    assert large_answer(body) is None
    monkeypatch.setattr(collected, "_LARGE_BYTES", 1000)
    large = large_answer(body)
    assert isinstance(large, LargeAnswer)
    plain = AgentMetrics("agent", AggregateMetrics.model_validate_json(body), {"scored": 1})
    apart = AgentMetrics("agent", AggregateMetrics.model_validate(large.rest), {"scored": 1}, groups=large)
    for name, metrics in (("plain", plain), ("apart", apart)):
        write_metrics([metrics, metrics], tmp_path / name)
    written = (tmp_path / "plain").read_bytes()
    assert (tmp_path / "apart").read_bytes() == written
    assert written == orjson.dumps([plain.as_entry()] * 2, option=orjson.OPT_INDENT_2)
    assert apart.as_entry() == plain.as_entry()
    assert large_answer(body[:-2]) is None
    assert large_answer(b" " + body) is None


def test_a_record_with_very_many_keys_takes_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_VALUES_AT_A_TIME", 1_000)  # as 100,000 keys are by default: many portions

    def seconds(keys: int) -> float:
        records = [record(task) for task in range(200)]
        records[77] |= {f"field {number}": number for number in range(keys)}
        begun = time.process_time()
        metrics = compute_aggregate_metrics(records)
        took = time.process_time() - begun
        assert sum(f"mean/field {number}" in metrics.group_level_metrics[77] for number in range(keys)) == keys
        assert len(metrics.group_level_metrics[78]) < 40
        return took

    assert seconds(16_000) < 16 * min(seconds(2_000) for _ in range(3))
