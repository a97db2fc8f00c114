"""Metrics: who is asked for them, with what, and what becomes of the answers."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from nemo_gym.paths import PARENT_DIR
from nemo_gym.reward_profile import compute_aggregate_metrics
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.schemas.aggregate_metrics import AggregateMetricsRequest
from nemo_gym.server_utils import ServerClient
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, Row, failing_with, keys_in, lines_in, rows_of, write_rows

RESULTS = """
{"_ng_task_index":0,"_ng_rollout_index":0,"agent_ref":{"name":"alpha"},"reward":1.0,"label":"x","responses_create_params":{"input":"hello"},"response":{"id":"r1","output":[],"usage":{"total_tokens":9}}}
{"_ng_task_index":0,"_ng_rollout_index":1,"agent_ref":{"name":"alpha"},"reward":0.0,"label":"y","responses_create_params":{"input":"hello"},"response":{"id":"r2","output":[],"usage":{}}}
{"_ng_task_index":1,"_ng_rollout_index":0,"agent_ref":{"name":"beta"},"reward":0.5,"responses_create_params":{"input":"bye"}}
{"_ng_task_index":2,"_ng_rollout_index":0,"agent_ref":{},"reward":0.5}
"""
REQUESTS = {
    "alpha": [
        {
            "_ng_task_index": 0,
            "_ng_rollout_index": 0,
            "agent_ref": {"name": "alpha"},
            "reward": 1.0,
            "label": "x",
            "response": {"usage": {"total_tokens": 9}},
        },
        {
            "_ng_task_index": 0,
            "_ng_rollout_index": 1,
            "agent_ref": {"name": "alpha"},
            "reward": 0.0,
            "label": "y",
        },
    ],
    "beta": [{"_ng_task_index": 1, "_ng_rollout_index": 0, "agent_ref": {"name": "beta"}, "reward": 0.5}],
}


@pytest.fixture
def metrics_client(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A client behind which the library's own aggregation answers."""

    async def post(server_name: str, url_path: str, json: AggregateMetricsRequest) -> MagicMock:
        content = compute_aggregate_metrics(json.verify_responses).model_dump_json().encode()
        return MagicMock(ok=True, read=AsyncMock(return_value=content))

    client = MagicMock(spec=ServerClient)
    client.post = AsyncMock(side_effect=post)
    monkeypatch.setattr(RolloutCollectionHelper, "setup_server_client", lambda self, head_server_config=None: client)
    return client


def test_each_agent_is_asked_for_the_metrics_of_its_stripped_results(metrics_client: MagicMock) -> None:
    results = [json.loads(line) for line in RESULTS.split("\n") if line]

    path = asyncio.run(RolloutCollectionHelper()._call_aggregate_metrics(results, results, "eval.jsonl"))

    calls = [call.kwargs for call in metrics_client.post.await_args_list]
    assert {call["server_name"]: call["json"].verify_responses for call in calls} == REQUESTS
    assert {call["url_path"] for call in calls} == {"/aggregate_metrics"}
    assert path == Path("eval_aggregate_metrics.json")
    golden = PARENT_DIR / "tests" / "metrics" / "golden" / "two_agents_aggregate_metrics.json"
    assert path.read_bytes() == golden.read_bytes().rstrip()


def test_the_values_for_a_tracker_are_flat(metrics_client: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = MagicMock()
    monkeypatch.setattr("nemo_gym.trackers.wandb.get_wandb_run", lambda: tracker)
    results = [json.loads(line) for line in RESULTS.split("\n") if line]

    asyncio.run(RolloutCollectionHelper()._call_aggregate_metrics(results, results, "eval.jsonl"))

    (values,) = tracker.log.call_args.args
    statistics = {
        "alpha": {"mean": 0.5, "max": 1.0, "min": 0.0, "median": 0.5, "std": 0.7071067811865476},
        "beta": {"mean": 0.5, "max": 0.5, "min": 0.5, "median": 0.5, "std": 0.0},
    }
    expected = {
        f"{agent}/{name}/reward": value for agent, values in statistics.items() for name, value in values.items()
    }
    expected |= {f"alpha/{name}/total_tokens": 9.0 for name in ("mean", "max", "min", "median")}
    expected |= {f"key_metrics/{name}": 0.5 for name in ("alpha/mean/reward", "beta/mean/reward")}
    assert values == pytest.approx({**expected, "key_metrics/alpha/mean/total_tokens": 9.0})


def test_without_results_nobody_is_asked_and_nothing_is_written(metrics_client: MagicMock) -> None:
    path = asyncio.run(RolloutCollectionHelper()._call_aggregate_metrics([], [], "eval.jsonl"))

    assert path is None
    assert list(Path().iterdir()) == []
    metrics_client.post.assert_not_called()


def test_aggregation_can_be_left_for_later(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))

    done = collect("+disable_aggregation=true")

    assert done.exit_code == 0
    assert "Aggregate metrics" not in done.stdout
    assert "No metrics: +disable_aggregation=true asks for none; ng_aggregate_rollouts" in done.stdout
    assert fake_run.metric_requests == []
    assert not Path("out_aggregate_metrics.json").exists()


def test_an_agent_that_cannot_compute_metrics_costs_no_rollout_and_is_asked_again_on_resume(
    fake_run: FakeRun, collect: Collect
) -> None:
    fake_run.metrics_status = 500
    write_rows(Path("in.jsonl"), rows_of(2))
    first = collect()
    fake_run.metrics_status = 200

    second = collect("+resume_from_cache=true")

    assert first.exit_code == 1
    assert "Rollouts: 2 of 2 finished" in first.stdout
    assert re.search(r"^No metrics: agent 'alpha' could not be asked.*out of order", first.stdout, re.MULTILINE)
    assert first.stderr.splitlines()[-1].startswith("The metrics are missing. Go on with: ")
    assert second.exit_code == 0
    assert fake_run.asked["/run"] == 2
    assert Path("out_aggregate_metrics.json").exists()


def test_every_agent_with_rollouts_gets_its_entry(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(422, lambda row: row["agent_ref"]["name"] == "alpha")
    write_rows(Path("in.jsonl"), [*rows_of(2, "beta"), *rows_of(3, "alpha")])

    collect("+max_attempts=1")

    [beta] = json.loads(Path("out_aggregate_metrics.json").read_text())
    assert list(beta) == ["agent_ref", "agent_metrics", "key_metrics", "group_level_metrics", "coverage", "percentiles"]
    assert beta["agent_ref"] == {"name": "beta"}
    assert [len(request["verify_responses"]) for request in fake_run.metric_requests] == [2]


def test_a_complete_run_that_is_resumed_shows_what_its_agents_compute_now(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()
    path = Path("out_aggregate_metrics.json")
    first, written = json.loads(path.read_text()), path.stat().st_mtime_ns

    assert collect("+resume_from_cache=true").exit_code == 0
    assert len(fake_run.metric_requests) == 2
    assert path.stat().st_mtime_ns == written  # nothing has changed, so nothing was written

    fake_run.metrics = {"agent_metrics": {"mean/reward": 0.25}, "key_metrics": {}, "group_level_metrics": []}
    assert collect("+resume_from_cache=true").exit_code == 0
    again = json.loads(path.read_text())
    assert again[0]["agent_metrics"] == {"mean/reward": 0.25} != first[0]["agent_metrics"]

    fake_run.metrics = {"agent_metrics": "broken"}
    assert collect("+resume_from_cache=true").exit_code == 0
    assert json.loads(path.read_text()) == again
    assert len(lines_in(Path("out.jsonl"))) == 2


def test_metrics_are_asked_for_in_task_order_and_without_the_bulk(fake_run: FakeRun, collect: Collect) -> None:
    async def last_first(row: Row, attempt: int) -> Any:
        if row["n"] < 3:
            await ended[row["n"] + 1].wait()
        ended[row["n"]].set()
        return {**row, "reward": 1.0, "note": "half a \ud83d", "response": {"output": ["long"], "usage": {"n": 1}}}

    ended = [asyncio.Event() for _ in range(4)]
    fake_run.answer = last_first
    write_rows(Path("in.jsonl"), rows_of(4))

    assert collect().exit_code == 0

    assert [line["n"] for line in lines_in(Path("out.jsonl"))] == [3, 2, 1, 0]
    (request,) = fake_run.metric_requests
    assert [record["n"] for record in request["verify_responses"]] == [0, 1, 2, 3]
    assert list(request["verify_responses"][0]) == [
        "n",
        "agent_ref",
        "_ng_task_index",
        "_ng_rollout_index",
        "reward",
        "note",
        "response",
    ]
    assert request["verify_responses"][0]["response"] == {"usage": {"n": 1}}
    assert request["verify_responses"][0]["note"] == "half a ?"


def test_rollouts_that_belong_to_no_row_stay_in_the_file_and_out_of_the_metrics(
    fake_run: FakeRun, collect: Collect
) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    collect("+limit=2")
    stranger = {"_ng_task_index": 9, "_ng_rollout_index": 0, "agent_ref": {"name": "alpha"}, "reward": 0.0}
    with Path("out.jsonl").open("a") as file:
        file.write(json.dumps(stranger) + "\n")

    done = collect("+resume_from_cache=true", "+limit=3")

    assert "holds 1 rollouts that belong to no row" in done.stderr
    assert keys_in(Path("out.jsonl")) == [(0, 0), (1, 0), (2, 0), (9, 0)]
    assert len(fake_run.metric_requests[-1]["verify_responses"]) == 3
