"""Repeats that stop when their task is decided: not sent, counted, recorded, and owed again without the option."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from nemo_gym.cli.command import command_named
from nemo_gym.metrics.aggregate import compute_aggregate_metrics, for_uneven_repeats
from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.metrics.intervals import compute_coverage
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from nemo_gym.runs.record import Row
from nemo_gym.runs.repeats import RepeatRule
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, keys_in, lines_in, right_away, rows_of, write_rows

aggregate = command_named("aggregate_rollouts")
TOOL = {"type": "function", "name": "look_up", "parameters": {}, "strict": True}
STOP = "+stop_repeats_when=n >= 2 and std == 0"


async def undecided_at_1(row: Row, attempt: int) -> Any:
    """Task 1 passes every other time, all others always."""
    reward = row["_ng_rollout_index"] % 2 if row["_ng_task_index"] == 1 else 1.0
    return {**await right_away(row, attempt), "reward": float(reward)}


def test_repeats_of_decided_tasks_are_not_sent_and_the_run_is_complete(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = undecided_at_1
    write_rows(Path("in.jsonl"), rows_of(3))

    done = collect("+num_repeats=8", "+num_samples_in_parallel=1", STOP, "+json=true")

    said = json.loads(done.stdout)
    assert (done.exit_code, said["finished"], said["not_needed"], said["missing"]) == (0, 12, 12, 0)
    assert fake_run.keys()[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]  # one repeat of each task after the other
    manifest = json.loads(Path("out_manifest.json").read_text())
    assert manifest["not_needed"]["alpha"]["0"] == {
        "not_made": [2, 3, 4, 5, 6, 7],
        "n": 2,
        "mean": 1.0,
        "pass_rate": 1.0,
    }
    assert sorted(manifest["not_needed"]["alpha"]) == ["0", "2"]
    assert (manifest["counts"]["not_needed"], manifest["counts"]["missing"]) == (12, 0)
    coverage = said["coverage"]["alpha"]
    assert coverage["not_needed"] == {"rollouts": 12, "tasks": 2}
    assert (coverage["expected"]["rollouts"], coverage["missing"]["rollouts"]) == (24, 0)
    assert coverage["mean_excluding_failures"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert said["key_metrics"]["alpha"]["mean/reward"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert coverage["pass_at_k"]["k"] == coverage["least_repeats"] == 2
    assert "24/24" in done.stderr
    assert "12 not needed" in done.stderr


def test_what_is_decided_stays_so_on_resume_and_is_owed_without_the_option(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = undecided_at_1
    write_rows(Path("in.jsonl"), rows_of(3))
    collect("+num_repeats=8", "+num_samples_in_parallel=1", STOP)
    fake_run.rows.clear()

    same = collect("+num_repeats=8", STOP, "+resume_from_cache=true", "+json=true")

    said = json.loads(same.stdout)
    assert (same.exit_code, said["finished"], said["not_needed"], fake_run.rows) == (0, 12, 12, [])
    assert json.loads(Path("out_manifest.json").read_text())["counts"]["missing"] == 0

    killed = lines_in(Path("out.jsonl"))[:-3]  # as if it had been killed before
    Path("out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in killed))
    collect("+num_repeats=8", STOP, "+resume_from_cache=true")
    assert {row["_ng_task_index"] for row in fake_run.rows} == {1}
    fake_run.rows.clear()

    rest = collect("+num_repeats=8", "+resume_from_cache=true", "+json=true")

    said = json.loads(rest.stdout)
    assert (rest.exit_code, said["finished"], said["not_needed"]) == (0, 24, 0)
    assert len(fake_run.rows) == 12
    assert len(set(keys_in(Path("out.jsonl")))) == 24
    assert "not_needed" not in json.loads(Path("out_manifest.json").read_text())


@pytest.mark.usefixtures("head_config", "quick_retries")
def test_the_same_from_python(fake_run: FakeRun) -> None:
    fake_run.answer = undecided_at_1
    write_rows(Path("in.jsonl"), rows_of(3))
    options: Row = {
        "input_jsonl_fpath": "in.jsonl",
        "output_jsonl_fpath": "out.jsonl",
        "agent_name": "alpha",
        "num_repeats": 8,
        "num_samples_in_parallel": 1,
        "stop_repeats_when": "n >= 2 and std == 0",
    }

    results = asyncio.run(RolloutCollectionHelper().run_from_config(RolloutCollectionConfig(**options)))
    again = asyncio.run(
        RolloutCollectionHelper().run_from_config(RolloutCollectionConfig(**options, resume_from_cache=True))
    )

    assert len(results) == len(again) == len(fake_run.rows) == 12
    [entry] = json.loads(Path("out_aggregate_metrics.json").read_text())
    assert entry["agent_metrics"]["mean/reward"] == pytest.approx((1 + 0.5 + 1) / 3)


def test_shards_add_up_what_was_not_needed(fake_run: FakeRun, collect: Collect) -> None:

    fake_run.answer = undecided_at_1
    write_rows(Path("in.jsonl"), rows_of(4))
    for shard in ("1/2", "2/2"):
        assert collect("+num_repeats=4", "+num_samples_in_parallel=1", STOP, f"+shard={shard}").exit_code == 0

    aggregate.run(
        [f"+head_server.port={fake_run.port}", "+input_glob=out-shard*of002.jsonl", "+output_jsonl_fpath=all.jsonl"]
    )

    [entry] = json.loads(Path("all_aggregate_metrics.json").read_text())
    assert entry["coverage"]["not_needed"] == {"rollouts": 6, "tasks": 3}
    assert entry["coverage"]["missing"]["rollouts"] == 0
    assert entry["agent_metrics"]["mean/reward"] == pytest.approx(3.5 / 4)


def test_a_condition_is_asked_in_order_and_a_decision_is_kept() -> None:
    rule = RepeatRule("pass_rate_ci_width < 0.9 and n < 3", 8)

    for reward in (1.0, 1.0, 0.0, 0.5):
        rule.add("t", {"reward": reward})
    rule.add("u", {"reward": float("nan")})
    rule.add("u", {})

    assert rule.decided == {"t": {"n": 2, "mean": 1.0, "pass_rate": 1.0}}


@pytest.mark.parametrize(
    ("condition", "after"),
    [
        ("pass_rate_ci_width < 0.2", 17),
        ("mean == 1 and n >= 4", 4),
        ("std == 0", 2),
        ("min == max and repeats == 32", 1),
        ("pass_rate_ci_low > 0.5 or pass_rate_ci_high < 0.5", 6),
        ("max < 1", None),
    ],
)
def test_what_a_condition_may_ask_for(condition: str, after: int | None) -> None:
    rule = RepeatRule(condition, 32)
    for _ in range(32):
        rule.add(0, {"reward": 1.0})

    assert (rule.decided.get(0) or {}).get("n") == after


def test_what_rests_on_more_repeats_than_some_task_has_is_null_with_the_reason() -> None:
    records = [
        {"_ng_task_index": task, "_ng_rollout_index": repeat, "reward": float(task == 0 or repeat % 2)}
        for task, repeats in ((0, 2), (1, 4))
        for repeat in range(repeats)
    ]
    table = RolloutTable()
    for record in records:
        table.add(record)

    def hook(tasks: Any) -> Row:
        return {"pass@1/a": 1.0, "pass@2/a": 2.0, "pass@4/a": 4.0, "pass@1[avg-of-4]/a": 5.0, "majority@3/a": 3.0}

    metrics = compute_aggregate_metrics(records, hook, lambda found: {"pass@4/a": found["pass@4/a"]})
    even = for_uneven_repeats(metrics, table, "std == 0")

    assert {name: value for name, value in even.agent_metrics.items() if "@" in name} == {
        "pass@1/a": 1.0,
        "pass@2/a": 2.0,
        "pass@4/a": None,
        "pass@1[avg-of-4]/a": None,
        "majority@3/a": None,
    }
    assert even.agent_metrics["why_null"].startswith("repeats stop when std == 0, and some task has only 2")
    assert even.key_metrics == {"pass@4/a": None}
    assert even.agent_metrics["mean/reward"] == pytest.approx(0.75)


def test_a_repeat_that_failed_and_then_was_not_needed_counts_once() -> None:
    scored = [{"_ng_task_index": 0, "_ng_rollout_index": repeat, "reward": 1.0} for repeat in range(2)]

    coverage = compute_coverage(scored, {(0, 2)}, 4, 1, 4, not_needed={(0, 2), (0, 3)})

    assert [coverage[name]["rollouts"] for name in ("scored", "failed", "not_needed", "missing")] == [2, 0, 2, 0]


@pytest.mark.parametrize("written", [orjson.dumps, lambda answer: json.dumps(answer).encode()])
def test_repeats_are_stored_alike_however_agents_write_them(
    fake_run: FakeRun, collect: Collect, written: Callable[[Row], bytes]
) -> None:
    """What answers to a task have in common is read once, if it is written as ours is: nobody can tell."""
    params = {"input": "hi \u00fc", "temperature": 1e16, "tools": [TOOL]}
    message = {"type": "message", "role": "assistant", "content": "no tool, no call"}

    async def answer(row: Row, attempt: int) -> web.Response:
        given = {"input": "other"} if row["_ng_rollout_index"] == 5 else row["responses_create_params"]
        told = {"responses_create_params": given, "response": {"output": [message]}, "reward": 0.5}
        return web.Response(body=written(told), content_type="application/json")

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), [{"responses_create_params": params}])

    done = collect("+num_repeats=8", "+num_samples_in_parallel=1", "+json=true")

    assert done.exit_code == 0
    lines = Path("out.jsonl").read_bytes().splitlines()
    expected = orjson.dumps({"responses_create_params": params, "response": {"output": [message]}, "reward": 0.5})[:-1]
    assert [line.startswith(expected + b",") for line in lines] == [index != 5 for index in range(8)]
    assert json.loads(done.stdout)["health"]["tools_not_called"] == 7
