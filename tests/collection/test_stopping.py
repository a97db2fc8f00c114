"""What ends a run before all of its rollouts are made, what limits it, and what its sidecar says."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, Row, failing_with, keys_in, lines_in, right_away, rows_of, write_rows

UTC_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def test_a_failed_call_is_one_line_of_the_sidecar_and_never_a_score(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] == 1)
    write_rows(Path("in.jsonl"), rows_of(2))

    collect("+max_attempts=2")

    first, second = lines_in(Path("out_failures.jsonl"))
    assert list(first) == [
        "_ng_failure_class",
        "_ng_failure_message",
        "_ng_failure_status",
        "_ng_failure_server",
        "_ng_started_at",
        "_ng_ended_at",
        "_ng_task_index",
        "_ng_rollout_index",
        "agent_ref",
    ]
    assert first["_ng_failure_class"] == "agent_error"
    assert first["_ng_failure_status"] == 500
    assert first["_ng_failure_server"] == "alpha"
    assert UTC_TIME.fullmatch(first["_ng_started_at"])
    assert first["_ng_started_at"] <= first["_ng_ended_at"]
    assert second["_ng_attempt_index"] == 1
    assert keys_in(Path("out.jsonl")) == [(0, 0)]


def test_answers_that_are_no_results_are_failures_of_their_row(fake_run: FakeRun, collect: Collect) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        bodies = ["not JSON", "[1, 2]", "null"]
        return web.Response(text=bodies[row["n"]]) if row["n"] < 3 else await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(4))

    collect("+max_attempts=1")

    assert [line["_ng_failure_class"] for line in lines_in(Path("out_failures.jsonl"))] == ["invalid_response"] * 3
    assert keys_in(Path("out.jsonl")) == [(3, 0)]


def test_what_an_agent_reports_is_routed_as_it_asks_and_not_tried_again_in_this_run(
    fake_run: FakeRun, collect: Collect
) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        reports: list[Row] = [
            {"reward": 0.0},
            {"reward": 0.0, "_ng_failure_class": ""},
            {"reward": 0.0, "_ng_failure_class": "kill_shaped", "_ng_no_persist": True},
        ]
        return reports[row["n"]]

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(3))

    done = collect()

    assert done.exit_code == 1
    assert keys_in(Path("out.jsonl")) == [(0, 0)]
    assert keys_in(Path("out_failures.jsonl")) == [(1, 0)]
    assert "Rollouts: 1 of 3 finished, 1 failed, 1 discarded" in done.stdout
    assert len(fake_run.rows) == 3


def test_the_run_stops_when_three_rollouts_of_an_agent_are_refused_its_key(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(401)
    write_rows(Path("in.jsonl"), rows_of(50))

    done = collect("+num_samples_in_parallel=1", "+max_attempts=1")

    assert done.exit_code == 1
    assert len(fake_run.rows) == 3
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Stopped early: ")]
    assert "the key was refused in 3 rollouts of agent 'alpha' and none succeeded" in line
    assert "50 rollouts are missing" in done.stderr.splitlines()[-1]


def test_a_refused_row_concerns_itself_alone(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(422, lambda row: row["n"] != 4)
    write_rows(Path("in.jsonl"), rows_of(12))

    done = collect("+num_samples_in_parallel=1")

    assert "Stopped early" not in done.stdout
    assert keys_in(Path("out.jsonl")) == [(4, 0)]
    assert len(fake_run.rows) == 12  # nothing was tried twice


REFUSED_FOR_EVER = {
    400: "http_4xx",
    401: "auth",
    403: "auth",
    404: "http_4xx",
    405: "http_4xx",
    413: "http_4xx",
    415: "http_4xx",
    422: "http_4xx",
}


def test_what_would_be_refused_again_is_tried_once_in_a_run_and_once_more_when_resumed(
    fake_run: FakeRun, collect: Collect
) -> None:
    statuses = list(REFUSED_FOR_EVER)

    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] < len(statuses):
            return web.json_response({"detail": "no"}, status=statuses[row["n"]])
        return web.json_response({"detail": "perhaps later"}, status=409) if row["n"] == len(statuses) else row

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(len(statuses) + 2))

    for run in (1, 2):
        collect("+max_attempts=2", "+resume_from_cache=true")

        assert [fake_run.keys().count((n, 0)) for n in range(len(statuses))] == [run] * len(statuses)
    failures = {line["_ng_task_index"]: line for line in lines_in(Path("out_failures.jsonl"))}
    assert [failures[n]["_ng_failure_class"] for n in range(len(statuses))] == list(REFUSED_FOR_EVER.values())
    assert all("_ng_failure_terminal" not in line for line in failures.values())
    assert fake_run.keys().count((len(statuses), 0)) == 2  # another status is tried again, and given up


def test_five_refusals_for_one_reason_and_no_success_end_the_run_and_say_why(
    fake_run: FakeRun, collect: Collect
) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        reason = f"request {row['n']}: temperature is not supported"
        return web.json_response({"error": {"message": reason}}, status=400)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(50))

    done = collect("+num_samples_in_parallel=1")

    assert done.exit_code == 1
    assert len(fake_run.rows) == 5
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Stopped early: ")]
    assert "5 rollouts failed for the same reason and none succeeded" in line
    assert "temperature is not supported" in line
    assert "50 rollouts are missing. Go on with" in done.stderr.splitlines()[-1]


def test_refusals_do_not_end_a_run_whose_other_rollouts_take_longer(fake_run: FakeRun, collect: Collect) -> None:
    refused = asyncio.Event()

    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] % 4 == 0:
            await asyncio.wait_for(refused.wait(), 60)
            return await right_away(row, attempt)
        if len(fake_run.rows) >= 40:
            refused.set()
        return web.json_response({"detail": "no"}, status=422)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(40))

    done = collect("+num_samples_in_parallel=40")

    assert "Stopped early" not in done.stdout
    assert keys_in(Path("out.jsonl")) == [(n, 0) for n in range(0, 40, 4)]


def test_failing_fast_stops_at_the_first_rollout_that_failed_for_good(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(500)
    write_rows(Path("in.jsonl"), rows_of(10))

    done = collect("+fail_fast=true", "+num_samples_in_parallel=1", "+max_attempts=1")

    assert done.exit_code == 1
    assert len(fake_run.rows) == 1
    assert "Stopped early: a rollout failed and fail_fast is on" in done.stdout


def test_too_large_a_fraction_of_failures_stops_the_run_from_twenty_on(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] % 2 == 0)
    write_rows(Path("in.jsonl"), rows_of(60))

    done = collect("+max_failure_fraction=0.4", "+num_samples_in_parallel=1", "+max_attempts=1")

    assert done.exit_code == 1
    assert len(fake_run.rows) == 20
    assert "Stopped early: 10 of 20 finished rollouts failed, more than max_failure_fraction=0.4 allows" in done.stdout


def test_the_run_ends_in_good_order_when_its_time_is_over(fake_run: FakeRun, collect: Collect) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] >= 2:
            await asyncio.sleep(60)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(4))

    done = collect("+run_timeout_s=0.3")

    assert done.exit_code == 1
    assert "Stopped early: run_timeout_s=0.3 is over" in done.stdout
    assert keys_in(Path("out.jsonl")) == [(0, 0), (1, 0)]
    assert Path("out_failures.jsonl").read_text() == ""
    assert Path("out_aggregate_metrics.json").exists()


def test_a_rollout_that_takes_too_long_is_a_timeout_and_the_others_are_kept(
    fake_run: FakeRun, collect: Collect
) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == 0:
            await asyncio.sleep(60)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(3))

    done = collect("+rollout_timeout_s=0.2", "+max_attempts=2")

    assert done.exit_code == 1
    failures = lines_in(Path("out_failures.jsonl"))
    assert [line["_ng_failure_class"] for line in failures] == ["timeout", "timeout"]
    assert "rollout_timeout_s=0.2" in failures[0]["_ng_failure_message"]
    assert keys_in(Path("out.jsonl")) == [(1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("option", "most"),
    [("+num_samples_in_parallel=2", 2), ("+num_samples_in_parallel=0", 12), ("+num_samples_in_parallel=null", 12)],
)
def test_the_cap_is_never_exceeded_and_0_lifts_it(option: str, most: int, fake_run: FakeRun, collect: Collect) -> None:
    async def together(row: Row, attempt: int) -> Any:
        if fake_run.most_in_flight == most:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)
        return await right_away(row, attempt)

    full = asyncio.Event()
    fake_run.answer = together
    write_rows(Path("in.jsonl"), rows_of(12))

    assert collect(option).exit_code == 0
    assert fake_run.most_in_flight == most


def test_caps_per_agent_hold_each_for_itself(fake_run: FakeRun, collect: Collect) -> None:
    running = {"alpha": 0, "beta": 0}
    most = {"alpha": 0, "beta": 0}

    async def answer(row: Row, attempt: int) -> Any:
        name = row["agent_ref"]["name"]
        running[name] += 1
        most[name] = max(most[name], running[name])
        await asyncio.sleep(0.02)
        running[name] -= 1
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), [*rows_of(6, "alpha"), *rows_of(6, "beta")])

    done = collect("+num_samples_in_parallel={alpha: 1, _default: 3}")

    assert done.exit_code == 0
    assert most == {"alpha": 1, "beta": 3}


def test_rows_start_in_input_order(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(30))

    collect("+num_samples_in_parallel=1")

    assert fake_run.keys() == [(n, 0) for n in range(30)]
