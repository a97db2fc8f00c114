"""`+plan=true`, `+pilot` and prices: what is told before and after the money is spent."""

import asyncio
import json
import os
import pty
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, keys_in, lines_in, rows_of, write_rows

Row = dict[str, Any]
TASKS = 60
PRICES = "+prices={a-model: {input: 2, cached_input: 0.5, output: 10}}"
DRAW = random.Random(3)
LENGTHS = [round(200 * DRAW.lognormvariate(0, 1)) for _ in range(TASKS)]
COST = sum(60 * 2 + 40 * 0.5 + output * 10 for output in LENGTHS) / 1e6


async def answer(row: Row, attempt: int, model: str = "a-model") -> Row:
    output = LENGTHS[row["n"]]
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 40},
        "output_tokens": output,
        "total_tokens": 100 + output,
    }
    return {**row, "reward": 1.0, "response": {"model": model, "usage": usage}}


@pytest.fixture
def priced(fake_run: FakeRun) -> FakeRun:
    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(TASKS))
    return fake_run


def test_a_pilot_says_what_the_whole_will_take_and_stops_where_nobody_can_be_asked(
    priced: FakeRun, collect: Collect, caplog: pytest.LogCaptureFixture
) -> None:
    done = collect("+pilot=20", "+num_repeats=2", PRICES, "+json=true")

    summary = json.loads(done.stdout)
    assert done.exit_code == 1
    assert summary["stopped"]["kind"] == "pilot"
    tasks = sorted({task for task, _ in keys_in(Path("out.jsonl"))})
    assert [task // 3 for task in tasks] == list(range(20))
    assert len(priced.rows) == summary["finished"] == 40
    assert "+resume_from_cache=true +yes=true" in done.stderr
    assert "Estimate for the whole run, 95 % range, from this run's finished part (20 tasks seen):" in caplog.text
    estimate = next(line for line in caplog.messages if line.startswith("  Cost: "))
    low, high = (float(end.strip("$()")) for end in estimate.split("(")[1].split(" to "))
    assert low <= 2 * COST <= high

    again = collect("+pilot=20", "+num_repeats=2", PRICES, "+resume_from_cache=true")

    assert again.exit_code == 1
    assert len(priced.rows) == 40

    last = collect("+pilot=20", "+num_repeats=2", PRICES, "+resume_from_cache=true", "+yes=true", "+json=true")

    assert last.exit_code == 0
    assert len(keys_in(Path("out.jsonl"))) == len(priced.rows) == 2 * TASKS
    assert json.loads(last.stdout)["cost_usd_in_all"] == pytest.approx(2 * COST)


def test_after_a_pilot_the_run_goes_on_with_yes_and_counts_everything_once(priced: FakeRun, collect: Collect) -> None:
    done = collect("+pilot=5", "+yes=true", PRICES, "+json=true")

    summary = json.loads(done.stdout)
    assert done.exit_code == 0
    assert keys_in(Path("out.jsonl")) == [(task, 0) for task in range(TASKS)]
    assert (summary["finished"], summary["expected"], summary["missing"]) == (TASKS, TASKS, 0)
    assert summary["cost_usd"] == pytest.approx(COST)
    assert summary["tokens"]["output_tokens"] == sum(LENGTHS)
    pilot = [row["_ng_task_index"] for row in priced.rows[:5]]
    assert [task // 12 for task in sorted(pilot)] == list(range(5))


def test_on_a_terminal_a_pilot_asks(priced: FakeRun) -> None:
    ours, theirs = pty.openpty()
    options = [
        f"+head_server.port={priced.port}",
        "+agent_name=alpha",
        "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out.jsonl",
        "+pilot=5",
    ]
    code = "from nemo_gym.cli.command import command_named; command_named('collect_rollouts')()"
    command = [sys.executable, "-c", code, *options]
    seen = bytearray()

    async def converse() -> int:
        process = await asyncio.create_subprocess_exec(*command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        def read() -> None:
            try:
                seen.extend(os.read(ours, 65_536))
            except OSError:
                loop.remove_reader(ours)
            if b"[y/N]" in seen:
                asked.set()

        loop.add_reader(ours, read)
        async with asyncio.timeout(60):
            await asked.wait()
            os.write(ours, b"y\n")
            code = await process.wait()
        loop.remove_reader(ours)
        return code

    exit_code = asyncio.run(converse())
    os.close(ours)

    assert len(keys_in(Path("out.jsonl"))) == TASKS, seen.decode(errors="replace")
    assert exit_code == 0


def test_a_plan_tells_everything_and_touches_nothing(priced: FakeRun, collect: Collect) -> None:
    before = sorted(Path().iterdir())

    done = collect("+plan=true", "+num_repeats=3", "+max_total_tokens=1000", PRICES, "+pilot=7", "+json=true")

    plan = json.loads(done.stdout)
    assert done.exit_code == 0
    assert sorted(Path().iterdir()) == before
    assert priced.rows == []
    assert plan["agents"] == {"alpha": {"tasks": TASKS, "rollouts": 3 * TASKS, "owed": 3 * TASKS}}
    assert (plan["rollouts"], plan["owed"], plan["finished"]) == (3 * TASKS, 3 * TASKS, 0)
    assert plan["first_request"]["responses_create_params"] == {"input": "task 0"}
    assert plan["first_request"]["_ng_task_index"] == 0
    assert "out.jsonl" in plan["files"]
    assert "out_aggregate_metrics.json" in plan["files"]
    assert plan["budgets"] == {"max_total_tokens": {"limit": 1000, "used": 0}}
    assert plan["pilot_tasks"] == 7
    assert plan["estimate"] is None
    assert plan["servers"].startswith("they run")


def test_a_plan_needs_no_servers_and_finds_what_a_run_would_refuse(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), [{"n": 1}])
    assert collect("+plan=true", "+head_server.port=1").exit_code == 2

    long = "x" * 5_000
    write_rows(Path("in.jsonl"), [{"responses_create_params": {"input": long}, "n": n} for n in range(3)])
    done = collect("+plan=true", "+head_server.port=1", "+num_samples_in_parallel=5")

    assert done.exit_code == 0
    assert "Plan: 3 tasks, 3 rollouts; nothing is sent and nothing is written" in done.stdout
    assert "At most 5 rollouts in parallel" in done.stdout
    assert "(5,000 characters)" in done.stdout
    assert long not in done.stdout
    assert "No estimate: +estimate_from=" in done.stdout
    assert not Path("out.jsonl").exists()


def test_a_plan_of_a_resumed_run_estimates_from_its_finished_part(priced: FakeRun, collect: Collect) -> None:
    assert collect("+limit=30").exit_code == 0
    untouched = {path: path.stat().st_mtime_ns for path in Path().iterdir()}

    done = collect("+plan=true", "+resume_from_cache=true", PRICES, "+json=true")

    plan = json.loads(done.stdout)
    assert {path: path.stat().st_mtime_ns for path in Path().iterdir()} == untouched
    assert (plan["rollouts"], plan["finished"], plan["owed"]) == (TASKS, 30, TASKS - 30)
    assert plan["first_request"]["n"] == 30
    cost = plan["estimate"]["whole_run"]["cost_usd"]
    assert cost["low"] <= COST <= cost["high"]

    changed = collect("+plan=true", "+resume_from_cache=true", "+agent_name=beta")
    assert changed.exit_code == 2
    assert "cannot be resumed like this" in changed.stderr


def test_an_earlier_run_of_the_same_rows_tells_what_this_one_takes(
    priced: FakeRun, collect: Collect, caplog: pytest.LogCaptureFixture
) -> None:
    assert collect("+output_jsonl_fpath=earlier.jsonl").exit_code == 0

    done = collect("+plan=true", "+estimate_from=earlier.jsonl", "+num_repeats=2", PRICES, "+json=true")

    estimate = json.loads(done.stdout)["estimate"]
    assert f"{TASKS} of {TASKS} tasks matched by what was asked" in estimate["source"]
    assert estimate["whole_run"]["cost_usd"]["value"] == pytest.approx(2 * COST)
    assert estimate["whole_run"]["output_tokens"]["value"] == pytest.approx(2 * sum(LENGTHS))
    assert estimate["time_s"]["value"] > 0

    assert collect("+estimate_from=earlier.jsonl", f"+max_total_tokens={10**9}").exit_code == 0
    assert "Estimate for the whole run, 95 % range, from earlier.jsonl" in caplog.text
    assert collect("+plan=true", "+estimate_from=in.jsonl").exit_code == 2


def test_cost_is_in_the_last_lines_the_progress_line_and_the_metrics_file(priced: FakeRun, collect: Collect) -> None:
    done = collect(PRICES)

    assert done.exit_code == 0
    assert f"Cost: ${COST:.3g}" in done.stdout
    assert f"0 failed, ${COST:.3g}" in done.stderr
    metrics = json.loads(Path("out_aggregate_metrics.json").read_text())
    assert metrics[0]["cost"]["usd"] == pytest.approx(COST)
    assert metrics[0]["cost"]["usd_per_rollout"] == pytest.approx(COST / TASKS)
    assert list(metrics[0])[:4] == ["agent_ref", "agent_metrics", "key_metrics", "group_level_metrics"]


def test_a_model_without_a_price_is_named_once(
    priced: FakeRun, collect: Collect, caplog: pytest.LogCaptureFixture
) -> None:
    async def by_others(row: Row, attempt: int) -> Row:
        return await answer(row, attempt, "surprise-7b")

    priced.answer = by_others
    priced.config = {"judge": {"responses_api_models": {"other": {"entrypoint": "app.py", "model": "judge"}}}}

    done = collect(PRICES)

    lines = [line for line in caplog.messages if "surprise-7b" in line]
    assert len(lines) == 1
    assert "there is no price for the model 'surprise-7b', which rollouts show" in lines[0]
    assert "Cost: $0.00, without what has no price: surprise-7b" in done.stdout

    caplog.clear()
    stopped = collect(PRICES, "+max_cost_usd=1", "+num_samples_in_parallel=2")
    assert stopped.exit_code == 1
    assert "Stopped early: max_cost_usd cannot be kept: there is no price for the model 'surprise-7b'" in stopped.stdout
    assert len(lines_in(Path("out.jsonl"))) < TASKS


def test_what_contradicts_itself_is_refused_in_one_line(priced: FakeRun, collect: Collect) -> None:
    for options, said in (
        (["+max_cost_usd=5"], "max_cost_usd=5 needs prices"),
        (["+pilot=1"], "at least 2"),
        (["+prices={m: {input: -1, output: 1}}"], "prices"),
        (["+prices={m: {input: 1, outputs: 1}}"], "prices"),
        (["+pilot=5", "+executor=ray", "+num_shards=2"], "pilot=5 does not go with executor=ray"),
    ):
        done = collect(*options)
        assert done.exit_code == 2, options
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3, done.stderr
    assert priced.rows == []


def test_a_server_may_be_called_prices(priced: FakeRun, collect: Collect) -> None:
    server = {"resources_servers": {"shop": {"entrypoint": "app.py", "domain": "other"}}}
    Path("env.yaml").write_text(json.dumps({"prices": server}))

    done = collect("+json=true")

    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["cost_usd"] is None
