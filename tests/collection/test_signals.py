"""Ctrl-C, SIGTERM, kill -9, a full disk, and two collectors on one output: real processes, real signals."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.collection.fakes import Answer, FakeRun, Row, keys_in, lines_in, right_away, rows_of, write_rows
from tests.collection.processes import BOTH_WAYS, COMMAND, Collector, wait_until
from tests.programs import WAIT_S

KILLS = int(os.environ.get("NEMO_GYM_TEST_KILLS", "8"))
ROWS_PER_KILL = 30

Start = Callable[..., Collector]


@pytest.fixture
def start(fake_run: FakeRun) -> Iterator[Start]:
    """Start a collector on in.jsonl and out.jsonl."""
    collectors: list[Collector] = []

    def begin(*options: str, **settings: Any) -> Collector:
        defaults = [
            f"+head_server.port={fake_run.port}",
            "+agent_name=alpha",
            "+input_jsonl_fpath=in.jsonl",
            "+output_jsonl_fpath=out.jsonl",
        ]
        collectors.append(Collector(*defaults, *options, **settings))
        return collectors[-1]

    yield begin
    for collector in collectors:
        collector.stop()


def first_three_at_once(others_s: float = 600.0) -> Answer:
    """Three rollouts are quick, the next two take a second, all others as long as said."""

    async def answer(row: Row, attempt: int) -> Row:
        if row["n"] >= 3:
            await asyncio.sleep(1.0 if row["n"] < 5 else others_s)
        return await right_away(row, attempt)

    return answer


def three_are_finished() -> bool:
    return Path("out.jsonl").exists() and len(Path("out.jsonl").read_bytes().splitlines()) == 3


@BOTH_WAYS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_what_is_in_flight_finish_and_says_how_to_resume(
    number: signal.Signals, way: Sequence[str], fake_run: FakeRun, start: Start
) -> None:
    fake_run.answer = first_three_at_once()
    write_rows(Path("in.jsonl"), rows_of(20))
    collector = start("+num_samples_in_parallel=2", way=way)
    wait_until(lambda: three_are_finished() and fake_run.in_flight == 2, collector)

    collector.send(number)

    ended = collector.wait()
    assert keys_in(Path("out.jsonl")) == [(n, 0) for n in range(5)]
    assert len(fake_run.rows) == 5  # nothing was started after the signal
    assert "Stopping: interrupted. No new rollouts; the 2 in flight get 10 s" in collector.stderr
    if way is COMMAND:
        assert ended == 130
        assert collector.stderr.splitlines()[-1] == (
            f"15 rollouts are missing. Go on with: ng_collect_rollouts +head_server.port={fake_run.port} "
            "+agent_name=alpha +input_jsonl_fpath=in.jsonl +output_jsonl_fpath=out.jsonl +num_samples_in_parallel=2 "
            "+resume_from_cache=true"
        )
        assert "Stopped early: interrupted" in collector.stdout
    else:  # then the signal does to the program what it always does
        assert ended == (130 if number is signal.SIGINT else -number)
    assert not Path("out_aggregate_metrics.json").exists()
    assert Path("out_failures.jsonl").read_text() == ""
    assert not Path("out.lock").exists()
    manifest = json.loads(Path("out_manifest.json").read_text())
    assert (manifest["counts"]["success"], manifest["counts"]["missing"]) == (5, 15)

    fake_run.answer = right_away
    assert start("+num_samples_in_parallel=2", "+resume_from_cache=true", way=way).wait() == 0
    assert keys_in(Path("out.jsonl")) == [(n, 0) for n in range(20)]


@BOTH_WAYS
def test_a_second_ctrl_c_stops_at_once_and_the_run_can_be_resumed(
    way: Sequence[str], fake_run: FakeRun, start: Start
) -> None:
    fake_run.answer = first_three_at_once(others_s=8.0)  # less than a single Ctrl-C would grant them
    write_rows(Path("in.jsonl"), rows_of(7))
    collector = start("+json=true", way=way)
    wait_until(lambda: fake_run.in_flight == 2 and len(Path("out.jsonl").read_bytes().splitlines()) == 5, collector)

    collector.send(signal.SIGINT)
    wait_until(lambda: "Stopping: interrupted" in collector.stderr, collector)
    collector.send(signal.SIGINT)

    assert collector.wait() == 130
    if way is COMMAND:
        assert json.loads(collector.stdout)["stopped"]["kind"] == "interrupted"
        assert "Go on with: ng_collect_rollouts" in collector.stderr.splitlines()[-1]
    assert keys_in(Path("out.jsonl")) == [(n, 0) for n in range(5)]  # what was in flight was not waited for

    fake_run.answer = right_away
    assert start("+json=true", "+resume_from_cache=true", way=way).wait() == 0
    assert keys_in(Path("out.jsonl")) == [(n, 0) for n in range(7)]


@BOTH_WAYS
def test_a_signal_while_metrics_are_computed_loses_nothing(way: Sequence[str], fake_run: FakeRun, start: Start) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    fake_run.metrics_delay_s = 600
    collector = start(way=way)
    wait_until(lambda: bool(fake_run.metric_requests), collector)

    collector.send(signal.SIGTERM)

    assert collector.wait() == (130 if way is COMMAND else -signal.SIGTERM)
    if way is COMMAND:
        assert "Stopped early: interrupted while the metrics were computed" in collector.stdout
        assert collector.stderr.splitlines()[-1].startswith("The metrics are missing. Go on with: ng_collect_rollouts ")
    assert keys_in(Path("out.jsonl")) == [(0, 0), (1, 0)]
    assert json.loads(Path("out_manifest.json").read_text())["counts"]["success"] == 2


def test_a_second_collector_is_refused_with_the_pid_of_the_first(fake_run: FakeRun, start: Start) -> None:
    fake_run.answer = first_three_at_once()
    write_rows(Path("in.jsonl"), rows_of(6))
    first = start()
    wait_until(three_are_finished, first)

    fresh, resumed = start(name="second"), start("+resume_from_cache=true", name="third")

    assert (fresh.wait(), resumed.wait()) == (2, 2)
    for refused in (fresh, resumed):
        assert f"process {first.pid} is already collecting into this output" in refused.stderr
    assert first.is_running
    assert not Path("out.previous").exists()


def test_the_lock_of_a_killed_collector_is_taken_over(fake_run: FakeRun, start: Start) -> None:
    fake_run.answer = first_three_at_once()
    write_rows(Path("in.jsonl"), rows_of(6))
    killed = start()
    wait_until(three_are_finished, killed)
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert Path("out.lock").exists()
    fake_run.answer = right_away

    resumed = start("+resume_from_cache=true", name="resumed")

    assert resumed.wait() == 0
    assert f"from process {killed.pid}, which is gone" in resumed.stderr
    assert not Path("out.lock").exists()


def test_a_full_disk_ends_the_run_with_what_is_finished_and_resume_goes_on(fake_run: FakeRun, start: Start) -> None:
    async def answer(row: Row, attempt: int) -> Row:
        return {**await right_away(row, attempt), "padding": "x" * 10_000}

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(20))

    full = start("+num_samples_in_parallel=1", largest_file=55_000)

    assert full.wait() == 1
    assert "Error: cannot write to out.jsonl: File too large; everything finished before is safe" in full.stderr
    assert "Traceback" not in full.stderr
    assert [line["_ng_task_index"] for line in lines_in(Path("out.jsonl"))] == [0, 1, 2, 3, 4]
    assert start("+resume_from_cache=true", "+num_samples_in_parallel=1").wait() == 0
    assert keys_in(Path("out.jsonl")) == [(n, 0) for n in range(20)]


def test_a_disk_without_room_for_the_rows_is_an_error_before_any_request(fake_run: FakeRun, start: Start) -> None:
    write_rows(Path("in.jsonl"), rows_of(200))

    full = start("+num_repeats=20", largest_file=100_000)

    assert full.wait() == 1
    assert "Error: cannot prepare out_materialized_inputs.jsonl: File too large; everything" in full.stderr
    assert "Traceback" not in full.stderr
    assert fake_run.rows == []
    assert list(Path().glob("out*")) == []


def test_killed_at_random_moments_and_resumed_each_time_no_rollout_is_lost_or_doubled(
    fake_run: FakeRun, start: Start
) -> None:
    rows = KILLS * ROWS_PER_KILL // 2
    all_killed = threading.Event()

    async def answer(row: Row, attempt: int) -> Row:
        await asyncio.sleep(random.uniform(0, 0.1))
        if row["_ng_task_index"] == rows - 1:  # the last: no collector gets to its end, on however fast a machine
            await asyncio.to_thread(all_killed.wait, WAIT_S)
        return {**await right_away(row, attempt), "padding": "x" * random.randrange(20_000)}

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(rows))
    options = ("+num_repeats=2", "+num_samples_in_parallel=8", "+resume_from_cache=true")
    for _ in range(KILLS):
        collector = start(*options)
        time.sleep(random.uniform(0.0, 0.6))
        collector.send(signal.SIGKILL)
        assert collector.wait() == -signal.SIGKILL, collector.stderr
    all_killed.set()

    last = start(*options)

    assert last.wait() == 0, last.stderr
    assert keys_in(Path("out.jsonl")) == [(task, rollout) for task in range(rows) for rollout in range(2)]
    assert len(lines_in(Path("out_materialized_inputs.jsonl"))) == 2 * rows
    assert json.loads(Path("out_manifest.json").read_text())["counts"]["missing"] == 0
