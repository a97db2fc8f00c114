"""Captured calls, an agent's observations and its own account become one trajectory; what is wrong becomes a gap."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.base_responses_api_model import (
    CaptureStore,
    clear_model_call_captures_for_rollouts,
    merge_model_call_capture_into_record,
)
from nemo_gym.collect.collector import lines_to_upload
from nemo_gym.jsonl import to_line
from nemo_gym.keys import OBSERVED_KEYS
from nemo_gym.observability.store import Observing
from nemo_gym.rollout_observability import TrajectoryRecord
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.read import without_observations
from tests.recording.harness import Stage, noisy_endpoint, rows_of_example

ROW = {"_ng_task_index": 3, "_ng_rollout_index": 1, "responses_create_params": {"input": "hi"}}
SERVER = {"type": "responses_api_models", "name": "policy"}
EXCHANGE = {
    "model_call_id": "call-1",
    "dialect": "responses",
    "model_ref": SERVER,
    "started_at": 10.0,
    "completed_at": 10.5,
    "latency_ms": 500.0,
    "latency_ttft_ms": None,
    "status_code": 200,
    "error_category": None,
    "request": {"input": "hi", "model": "asked"},
    "response": {"id": "resp_1", "model": "m", "output": [], "usage": {"input_tokens": 3, "output_tokens": 4}},
}
REF = {"model_ref": SERVER, "response_id": "resp_1"}
TURN = {"invocation_id": "root", "task_id": "3", "rollout_id": "3-1", "turn_no": 1, "timestamp": 1.0, "step_count": 0}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
INVOCATION = {"invocation_id": "root", "model_calls": [REF], "conversation": [CALL_ITEM, OUTPUT_ITEM]}


def folded(tmp_path: Path, record: dict[str, Any], **more: Any) -> dict[str, Any]:
    record = {**ROW, "reward": 1.0, **record}
    Observing([tmp_path]).fold({**ROW, **more}, record)
    TrajectoryRecord.model_validate(record["ng_trajectory"])
    return record


def codes(record: dict[str, Any]) -> set[str]:
    return {gap["code"] for gap in record["ng_trajectory"]["gaps"]}


def test_calls_are_in_the_trajectory_with_all_that_was_said_and_in_the_capture_without(tmp_path: Path) -> None:
    CaptureStore(tmp_path).record("3-1", EXCHANGE)
    record = folded(tmp_path, {})

    capture, trajectory = record["ng_model_call_capture"], record["ng_trajectory"]
    assert capture["metrics"]["num_calls"] == 1
    assert capture["metrics"]["tokens_total"] == 7
    assert capture["metrics"]["tokens_reasoning"] is None
    assert "request" not in capture["calls"][0]
    (call,) = trajectory["model_calls"]
    assert (call["request"], call["response"]) == (EXCHANGE["request"], EXCHANGE["response"])
    assert call["duration_ms"] == 500.0
    assert call["token_stats"]["prompt_tokens"] == 3
    assert call["response_metadata"]["model"] == "m"
    assert (trajectory["task_id"], trajectory["rollout_id"]) == ("3", "3-1")
    assert codes(record) == {"turns_unavailable", "conversation_unavailable"}
    assert record["reward"] == 1.0


def test_an_agents_account_is_joined_with_what_was_captured(tmp_path: Path) -> None:
    CaptureStore(tmp_path).record("3-1", EXCHANGE)
    tool = {"invocation_id": "root", "tool_call_id": "c1", "status": "completed", "duration_ms": 5.0}
    account = {
        "task_id": "3",
        "rollout_id": "3-1",
        "invocations": [INVOCATION],
        "turns": [{**TURN, "turn_no": 2, "timestamp": 2.0}, {**TURN, "model_calls": [REF]}],
        "tool_calls": [tool],
        "model_calls": [{"model_call_id": "call-1", "duration_ms": 1.0, "token_stats": {"cached_tokens": 2}}],
    }
    seen = {"kind": "tool_call", "invocation_id": "root", "tool_call_id": "c1", "duration_ms": 7.0}
    record = folded(tmp_path, {"ng_trajectory": account, "ng_agent_observations": {"source": "pi", "records": [seen]}})

    trajectory = record["ng_trajectory"]
    assert [turn["turn_no"] for turn in trajectory["turns"]] == [1, 2]
    assert trajectory["turns"][0]["model_calls"][0]["model_call_id"] == "call-1"
    (call,) = trajectory["model_calls"]
    assert (call["duration_ms"], call["token_stats"]["cached_tokens"]) == (500.0, 2)
    (tool_call,) = trajectory["tool_calls"]
    assert (tool_call["status"], tool_call["duration_ms"], tool_call["output"]) == ("completed", 7.0, "rain")
    assert codes(record) == {"model_call_ownership_unavailable"}


def test_another_identity_is_put_right_and_told(tmp_path: Path) -> None:
    account = {"task_id": "x", "rollout_id": "y", "turns": [{**TURN, "task_id": "x", "rollout_id": "y"}]}
    record = folded(tmp_path, {"ng_trajectory": account}, problem_id="p7")

    assert record["ng_trajectory"]["task_id"] == "p7"
    assert record["ng_trajectory"]["turns"][0]["rollout_id"] == "3-1"
    (gap,) = [gap for gap in record["ng_trajectory"]["gaps"] if gap["code"] == "producer_trajectory_identity_mismatch"]
    assert gap["detail"] == "rollout_id,task_id"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, "model_call_capture_no_records"),
        ({"ng_trajectory": {"nonsense": 1}}, "producer_trajectory_invalid"),
        ({"ng_trajectory": "nonsense"}, "producer_trajectory_invalid"),
        ({"ng_agent_observations": 7}, "agent_observations_invalid"),
        ({"ng_agent_observations": {"source": "pi", "records": [{"kind": "?"}]}}, "agent_observation_join_failed"),
    ],
)
def test_whatever_agents_say_is_a_gap_and_never_an_error(tmp_path: Path, record: dict[str, Any], expected: str) -> None:
    assert expected in codes(folded(tmp_path, record))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda store: store.path_for("3-1").write_bytes(b"{\n"), "model_call_capture_records_unreadable"),
        (lambda store: store.mark_incomplete("3-1"), "model_call_capture_incomplete"),
        (lambda store: store.path_for("3-1").mkdir(), "model_call_capture_unreadable"),
    ],
)
def test_what_is_wrong_with_the_files_is_a_gap(tmp_path: Path, damage: Any, expected: str) -> None:
    damage(CaptureStore(tmp_path))
    record = folded(tmp_path, {})
    assert expected in codes(record)
    assert expected in [gap["code"] for gap in record["ng_model_call_capture"]["gaps"]]


def test_a_trajectory_that_cannot_be_made_leaves_the_rollout_and_what_was_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CaptureStore(tmp_path).record("3-1", EXCHANGE)

    def broken(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("nemo_gym.observability.trajectories.trajectory_of", broken)
    record = {**ROW, "reward": 1.0}
    Observing([tmp_path]).fold(ROW, record)

    capture: Any = record["ng_model_call_capture"]
    assert capture["calls"][0]["request"] == EXCHANGE["request"]
    assert capture["gaps"] == [{"code": "trajectory_projection_failed", "detail": "RuntimeError"}]
    assert "ng_trajectory" not in record


def test_a_history_that_was_redacted_is_not_brought_back(tmp_path: Path) -> None:
    CaptureStore(tmp_path).record("3-1", EXCHANGE)
    gaps = [{"code": "multimodal_history_redacted"}]
    record = folded(tmp_path, {"ng_agent_observations": {"source": "pi", "gaps": gaps}})

    assert record["ng_trajectory"]["model_calls"][0]["request"] is None


def test_without_anything_observed_a_record_is_left_alone(tmp_path: Path) -> None:
    record = {**ROW, "reward": 1.0}
    Observing([]).fold(ROW, record)
    assert record == {**ROW, "reward": 1.0}


def test_what_a_row_brings_from_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    old: dict[str, Any] = {"ng_trajectory": {"task_id": "3", "rollout_id": "3-1", "turns": [TURN]}}
    record = {**ROW, **old, "reward": 1.0}
    Observing([tmp_path]).fold({**ROW, **old}, record)
    assert record["ng_trajectory"]["turns"] == []


def test_an_id_that_cannot_be_a_path_costs_the_capture_only(tmp_path: Path) -> None:
    record = {"_ng_rollout_id": "a/b", "reward": 1.0}
    Observing([tmp_path]).fold({"_ng_rollout_id": "a/b"}, record)
    assert record == {"_ng_rollout_id": "a/b", "reward": 1.0}
    assert merge_model_call_capture_into_record({"_ng_rollout_id": "a/b"}, [tmp_path]) == {"_ng_rollout_id": "a/b"}


def test_captures_of_earlier_runs_are_cleared_for_what_is_to_be_sent(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    for rollout_id in ("3-1", "3-1-a1", "4-1"):
        store.record(rollout_id, EXCHANGE)
        store.mark_incomplete(rollout_id)
    clear_model_call_captures_for_rollouts([ROW, {"_ng_rollout_id": "../x"}, None], [tmp_path])

    assert store.read("3-1") == []
    assert not store.is_incomplete("3-1")
    assert len(store.read("3-1-a1")) == len(store.read("4-1")) == 1


def test_rollouts_under_one_id_at_the_same_time_say_so_and_one_after_another_have_no_need_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observing, store = Observing([tmp_path]), CaptureStore(tmp_path)
    rows = [{**ROW, "_ng_rollout_index": index, "_ng_rollout_id": "mine"} for index in range(2)]

    async def call(row: dict[str, Any]) -> None:
        store.record("mine", EXCHANGE)

    def ended(row: dict[str, Any]) -> list[str]:
        record = {**row, "reward": 1.0}
        observing.fold(row, record)
        return [gap["code"] for gap in record["ng_model_call_capture"].get("gaps", ())]

    async def posted(*given: dict[str, Any]) -> None:
        for row in given:
            await observing.begin(call)(row)

    asyncio.run(posted(*rows, ROW))
    shared = ["model_call_capture_rollout_id_shared"]
    assert [ended(row) for row in rows] == [shared, shared]
    assert "under the same _ng_rollout_id, such as 'mine'" in caplog.text
    for row in rows:
        asyncio.run(posted(row))
        assert ended(row) == []


def test_trackers_get_neither_trajectories_nor_what_was_said(tmp_path: Path) -> None:
    CaptureStore(tmp_path).record("3-1", EXCHANGE)
    record = merge_model_call_capture_into_record({**ROW, "ng_trajectory": {"x": 1}}, [tmp_path], include_payloads=True)
    paths = RolloutPaths(tmp_path / "out.jsonl")
    plain = b'{"reward":1.0}'
    paths.failures.touch()
    odd = {"reward": 1.0, "ng_model_call_capture": {"calls": [{"model_call_id": "a"}, "what was said"]}}
    paths.rollouts.write_bytes(orjson.dumps(record) + b"\n" + plain + b"\n" + orjson.dumps(odd) + b"\n")

    observed, other, of_the_odd = lines_to_upload(paths)

    assert of_the_odd == plain

    assert other == plain
    sent = orjson.loads(observed)
    assert "ng_trajectory" not in sent
    assert sent["ng_model_call_capture"]["calls"][0]["model_call_id"] == "call-1"
    assert "request" not in sent["ng_model_call_capture"]["calls"][0]


def exchange_of(number: int, **more: Any) -> dict[str, Any]:
    item = {**CALL_ITEM, "arguments": '{"tab":"\\t"}'}
    usage = {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": number,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 3 + number,
    }
    response = {"id": f"resp_{number}", "model": "m", "status": "completed", "output": [item], "usage": usage}
    asked = {"input": "a\ttab", "tools": [{"response": {"request": {}}}]}
    return {
        **EXCHANGE,
        "model_call_id": f"call-{number}",
        "started_at": 10.0 + number,
        "request": asked,
        "response": response,
        **more,
    }


def account_of(*numbers: int, **more: Any) -> dict[str, Any]:
    """An account as `simple_agent` writes it."""
    refs = [{"model_call_id": None, "model_ref": SERVER, "response_id": f"resp_{number}"} for number in numbers]
    names = {"invocation_id": "root", "task_id": "3", "rollout_id": "3-1"}
    told = {"question": [CALL_ITEM], "answer": [OUTPUT_ITEM], "reasoning_content": None, "resolved": None}
    turns = [
        {**names, "turn_no": turn, "timestamp": 10.0 + turn, **told, "step_count": 0, "model_calls": [ref]}
        for turn, ref in enumerate(refs, 1)
    ]
    root = {
        "kind": "agent_invocation",
        "invocation_id": "root",
        "parent_invocation_id": None,
        "spawned_by_tool_call_id": None,
        "status": "completed",
        "duration_ms": 1.5,
        "error_type": None,
        "model_calls": refs,
        "conversation": [CALL_ITEM, OUTPUT_ITEM],
    }
    tool = {
        "kind": "tool_call",
        "invocation_id": "root",
        "tool_call_id": "c1",
        "sandbox_id": None,
        "tool_name": "look",
        "started_at": 1.0,
        "completed_at": 2.0,
        "duration_ms": 1000.0,
        "timing_source": "executor",
        "status": "completed",
        "error_type": None,
        "output": "rain",
    }
    gap = {"code": "resolution_unavailable", "invocation_id": "root", "detail": None}
    account = {"schema_version": "1.0", "task_id": "3", "rollout_id": "3-1", "invocations": [root], "turns": turns}
    return {**account, "model_calls": [], "tool_calls": [tool], "gaps": [gap], **more}


def test_a_rollout_of_bundled_servers_is_folded_with_its_calls_and_turns(tmp_path: Path) -> None:
    row = rows_of_example(1)[0]
    observing: dict[str, Any] = {"observability_enabled": True, "model_call_capture_dir": str(tmp_path)}
    with noisy_endpoint() as endpoint, Stage(endpoint.port, **observing) as stage:
        record = stage.stored(row)
    Observing([tmp_path]).fold(row, record)
    trajectory = TrajectoryRecord.model_validate(record["ng_trajectory"])

    assert len(trajectory.model_calls) == len(trajectory.turns) == len(record["ng_model_call_capture"]["calls"])
    assert [turn.model_calls[0].model_call_id for turn in trajectory.turns] == [
        call.model_call_id for call in trajectory.model_calls
    ]


def test_metrics_leave_out_what_was_observed_wherever_it_can_be_told(tmp_path: Path) -> None:
    CaptureStore(tmp_path).path_for("3-1").write_bytes(orjson.dumps(exchange_of(1)) + b"\n")
    row = {name: ROW[name] for name in ("_ng_task_index", "_ng_rollout_index")}
    record: dict[str, Any] = {
        "reward": 1.0,
        "ng_trajectory": account_of(1),
        **row,
        "_ng_timing": {},
    }
    Observing([tmp_path]).fold(ROW, record)
    whole = orjson.loads(to_line(record))
    plain = {name: value for name, value in whole.items() if name not in OBSERVED_KEYS}

    assert without_observations(to_line(record).rstrip()) == plain
    nested = {"about": {"ng_trajectory": {"schema_version": "1.0"}, "_ng_task_index": 1}, **whole}
    left = without_observations(orjson.dumps(nested))
    assert {name: value for name, value in left.items() if name not in OBSERVED_KEYS} == {
        **plain,
        "about": nested["about"],
    }
    assert without_observations(orjson.dumps(plain)) == plain
