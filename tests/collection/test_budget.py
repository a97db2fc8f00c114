"""A run with a budget ends close to it, loses nothing, and goes on when the budget is raised."""

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.http.run_answers import HAS_PARTIAL, USAGE_HEADER
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, keys_in, lines_in, rows_of, write_rows
from tests.collection.processes import Collector, wait_until

Row = dict[str, Any]
TASKS = 300
PRICES = "+prices={a-model: {input: 2, cached_input: 0.5, output: 10}}"


def lengths(number: int = TASKS, seed: int = 7) -> list[int]:
    """Output tokens of each task: most are short, and some are long."""
    draw = random.Random(seed)
    return [round(200 * draw.lognormvariate(0, 1)) for _ in range(number)]


def answer_of(row: Row, *, model: str = "a-model") -> Row:
    output = LENGTHS[row["n"]]
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 40},
        "output_tokens": output,
        "total_tokens": 100 + output,
    }
    return {**row, "reward": 1.0, "response": {"model": model, "usage": usage}}


LENGTHS = lengths()
TOTAL = sum(LENGTHS) + 100 * TASKS


async def in_time(row: Row, attempt: int) -> Row:
    await asyncio.sleep(LENGTHS[row["n"]] / 20_000)
    return answer_of(row)


def used_on_disk() -> int:
    return sum(line["response"]["usage"]["total_tokens"] for line in lines_in(Path("out.jsonl")))


@pytest.fixture
def skewed(fake_run: FakeRun) -> FakeRun:
    fake_run.answer = in_time
    write_rows(Path("in.jsonl"), rows_of(TASKS))
    return fake_run


def test_half_the_tokens_end_the_run_within_5_percent_and_a_raised_budget_finishes_it(
    skewed: FakeRun, collect: Collect
) -> None:
    budget = TOTAL // 2

    done = collect(f"+max_total_tokens={budget}", "+num_samples_in_parallel=64", "+json=true")

    summary = json.loads(done.stdout)
    assert done.exit_code == 1
    assert summary["stopped"]["kind"] == "budget"
    assert summary["finished"] == len(skewed.rows) == len(keys_in(Path("out.jsonl")))
    assert 0.9 * budget <= used_on_disk() <= 1.05 * budget
    assert summary["budgets"] == {"max_total_tokens": {"limit": budget, "used": used_on_disk()}}
    assert "+resume_from_cache=true" in done.stderr

    again = collect(f"+max_total_tokens={budget}", "+resume_from_cache=true")

    assert again.exit_code == 1
    assert "Stopped early: " in again.stdout
    assert 0.9 * budget <= used_on_disk() <= 1.05 * budget

    last = collect(f"+max_total_tokens={2 * TOTAL}", "+resume_from_cache=true")

    assert last.exit_code == 0
    assert keys_in(Path("out.jsonl")) == [(task, 0) for task in range(TASKS)]
    assert f"Budget: {TOTAL:,} tokens of max_total_tokens={2 * TOTAL:,} used" in last.stdout


def test_a_run_that_was_killed_goes_on_within_the_same_budget(skewed: FakeRun, collect: Collect) -> None:
    budget = TOTAL // 2
    options = [
        f"+head_server.port={skewed.port}",
        "+agent_name=alpha",
        "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out.jsonl",
        f"+max_total_tokens={budget}",
        "+num_samples_in_parallel=16",
    ]
    collector = Collector(*options)
    try:
        wait_until(lambda: Path("out.jsonl").exists() and len(lines_in_whole(Path("out.jsonl"))) > 20, collector)
        collector.send(signal.SIGKILL)
        collector.wait()
    finally:
        collector.stop()
    finished = set(lines_in_whole(Path("out.jsonl")))

    done = collect(f"+max_total_tokens={budget}", "+resume_from_cache=true", "+num_samples_in_parallel=16")

    assert done.exit_code == 1
    assert 0.9 * budget <= used_on_disk() <= 1.05 * budget
    assert finished <= set(lines_in_whole(Path("out.jsonl")))
    assert collect(f"+max_total_tokens={2 * TOTAL}", "+resume_from_cache=true").exit_code == 0
    assert keys_in(Path("out.jsonl")) == [(task, 0) for task in range(TASKS)]


def lines_in_whole(path: Path) -> list[bytes]:
    """The lines of a file that are complete."""
    return path.read_bytes().split(b"\n")[:-1]


def test_failed_attempts_count_with_what_they_had_of_a_response(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(40))

    async def fails_at_first(row: Row, attempt: int) -> Any:
        if attempt > 1:
            return answer_of(row)
        both = {"error": "broken", "partial_response": {**answer_of(row)["response"], "output": []}}
        return web.json_response(both, status=500, headers={HAS_PARTIAL: "true"})

    fake_run.answer = fails_at_first
    done = collect(PRICES, "+max_cost_usd=1000", "+num_samples_in_parallel=4", "+json=true")

    summary = json.loads(done.stdout)
    each = [(60 * 2 + 40 * 0.5 + output * 10) / 1e6 for output in LENGTHS[:40]]
    assert done.exit_code == 0
    assert summary["cost_usd"] == pytest.approx(2 * sum(each))
    assert summary["budgets"]["max_cost_usd"]["used"] == pytest.approx(2 * sum(each))
    cost = json.loads(Path("out_aggregate_metrics.json").read_text())[0]["cost"]
    assert cost["usd"] == pytest.approx(2 * sum(each))
    assert cost["failed_attempts_usd"] == pytest.approx(sum(each))

    again = collect(PRICES, "+max_cost_usd=1000", "+resume_from_cache=true", "+json=true")
    assert json.loads(again.stdout)["cost_usd_in_all"] == pytest.approx(2 * sum(each))


def test_a_budget_just_above_what_the_run_takes_lets_it_finish(skewed: FakeRun, collect: Collect) -> None:
    done = collect(f"+max_total_tokens={round(1.01 * TOTAL)}", f"+max_output_tokens_total={TOTAL}")

    assert done.exit_code == 0, done.stdout
    assert len(keys_in(Path("out.jsonl"))) == TASKS


async def says_nothing(row: Row, attempt: int) -> Row:
    return {**row, "reward": 1.0}


async def tells_by_header(row: Row, attempt: int) -> web.Response:
    """An agent whose response has no `usage`, and whose model server has counted."""
    answer = web.json_response({**row, "reward": 1.0, "response": {"model": "its own"}})
    answer.headers[USAGE_HEADER] = json.dumps(["a-model", 100, 40, LENGTHS[row["n"]], 100 + LENGTHS[row["n"]]])
    return answer


def test_a_budget_that_cannot_be_kept_ends_the_run_at_the_first_rollout(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(30))
    fake_run.answer = says_nothing

    done = collect("+max_total_tokens=1000000", "+num_samples_in_parallel=1", PRICES, "+json=true")

    assert done.exit_code == 1
    summary = json.loads(done.stdout)
    assert summary["stopped"]["kind"] == "budget"
    assert summary["stopped"]["message"] == (
        "max_total_tokens cannot be kept: alpha, task 0, rollout 0 does not say how many tokens it used. Have the "
        "agent ask its model by `server_client`, or put `usage` into its response; or leave that option out"
    )
    assert summary["budgets"] == {"max_total_tokens": {"limit": 1_000_000, "used": None}}
    assert (summary["cost_usd"], summary["cost_usd_in_all"]) == (None, None)
    assert len(fake_run.rows) == 1

    fake_run.answer = in_time
    again = collect("+max_total_tokens=1000000", "+resume_from_cache=true")

    assert again.exit_code == 1
    assert "Stopped early: max_total_tokens cannot be kept: 1 finished rollouts do not say" in again.stdout
    assert len(fake_run.rows) == 1


def test_a_cost_that_nobody_knows_is_called_unknown(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    fake_run.answer = says_nothing

    done = collect(PRICES)

    assert done.exit_code == 0
    assert "Cost: unknown, without 3 rollouts that do not say how many tokens they used" in done.stdout


def test_what_model_servers_counted_is_kept_in_records_and_counts_over_resumes(
    fake_run: FakeRun, collect: Collect
) -> None:
    write_rows(Path("in.jsonl"), rows_of(40))
    fake_run.answer = tells_by_header
    each = [(60 * 2 + 40 * 0.5 + output * 10) / 1e6 for output in LENGTHS[:40]]

    first = collect(PRICES, f"+max_cost_usd={sum(each) / 2}", "+num_samples_in_parallel=2", "+json=true")

    assert first.exit_code == 1
    assert json.loads(first.stdout)["stopped"]["kind"] == "budget"
    records = lines_in(Path("out.jsonl"))
    assert 0 < len(records) < 40
    output = LENGTHS[records[0]["n"]]
    assert records[0]["_ng_usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 40},
        "output_tokens": output,
        "total_tokens": 100 + output,
        "model": "a-model",
    }
    spent = sum(each[record["n"]] for record in records)
    assert json.loads(first.stdout)["cost_usd"] == pytest.approx(spent)

    again = collect(PRICES, "+max_cost_usd=1000", "+resume_from_cache=true", "+json=true")

    assert again.exit_code == 0
    assert json.loads(again.stdout)["cost_usd_in_all"] == pytest.approx(sum(each))
    metrics = json.loads(Path("out_aggregate_metrics.json").read_text())[0]
    assert metrics["cost"]["usd"] == pytest.approx(sum(each))


def test_what_failed_attempts_used_counts_if_only_model_servers_tell_it(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(10))

    async def fails_at_first(row: Row, attempt: int) -> Any:
        answer = await tells_by_header(row, attempt)
        answer.set_status(500 if attempt == 1 else 200)
        return answer

    fake_run.answer = fails_at_first
    done = collect("+max_total_tokens=10000000", "+json=true")

    used = json.loads(done.stdout)["budgets"]["max_total_tokens"]["used"]
    assert used == 2 * sum(100 + output for output in LENGTHS[:10])
    assert sum(line["_ng_usage"]["total_tokens"] for line in lines_in(Path("out_failures.jsonl"))) == used / 2
