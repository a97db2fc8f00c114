"""Order, caps and retries."""

import asyncio
import gc
import logging
import time
import tracemalloc
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from typing import Any
from unittest.mock import ANY

import pytest

from nemo_gym.collect.dispatch import Dispatch, DispatchSettings
from nemo_gym.collect.failures import RetryPauses
from nemo_gym.http.errors import ServerResponseError
from nemo_gym.runs.options import Concurrency, RolloutCollectionConfig
from nemo_gym.runs.record import FailureClass, Row
from tests.rollouts.dispatch_fakes import (
    Agent,
    collect,
    now_s,
    refuse,
    row_of,
    rows_of,
    run,
    settings,
    tasks_of,
)


def test_rows_start_in_input_order_and_never_more_than_the_cap_at_once() -> None:
    agent = Agent()

    attempts = run(collect(Dispatch(rows_of(20), agent, settings(3))))

    assert [row["_ng_task_index"] for row in agent.started] == list(range(20))
    assert agent.most_running == 3
    assert sorted(tasks_of(attempts)) == list(range(20))
    assert all(attempt.is_final and attempt.record()["reward"] == 1.0 for attempt in attempts)


def test_a_success_is_stamped_and_timed_by_a_clock_that_nobody_sets() -> None:
    async def slowly(row: Row) -> Any:
        time.sleep(0.05)  # noqa: ASYNC251 - the clock of this loop does not tick, the real one does
        calls = {"calls": [], "calls_left_out": 3}
        return {"reward": 1.0, "_ng_timing": calls} | ({"_ng_failure_class": "mine"} if row["_ng_task_index"] else {})

    records = {a.row["_ng_task_index"]: a.record() for a in run(collect(Dispatch(rows_of(2), slowly, settings(2))))}

    assert list(records[0]) == ["reward", "_ng_task_index", "_ng_rollout_index", "agent_ref", "_ng_timing"]
    timing = records[0]["_ng_timing"]
    assert timing == {"started_at": ANY, "duration_s": ANY, "calls": [], "calls_left_out": 3}
    assert 0.05 <= timing["duration_s"] < 600
    assert abs(datetime.fromisoformat(timing["started_at"]).timestamp() - time.time()) < 3600
    assert records[1] == {"reward": 1.0, "_ng_failure_class": "mine"}  # a failure has times of its own, or none


def test_attempts_come_in_the_order_in_which_they_end() -> None:
    async def sooner_the_later_they_start(row: Row) -> Any:
        await asyncio.sleep(10 - row["_ng_task_index"])
        return {}

    assert tasks_of(run(collect(Dispatch(rows_of(5), Agent(sooner_the_later_they_start), settings(5))))) == [
        4,
        3,
        2,
        1,
        0,
    ]


def test_without_a_cap_all_rows_are_in_flight_together() -> None:
    agent = Agent()

    run(collect(Dispatch(rows_of(1_000), agent, settings(None))))

    assert agent.most_running == 1_000


def test_rows_are_read_only_as_room_appears() -> None:
    read: list[int] = []

    def rows() -> Iterator[Row]:
        for row in rows_of(100):
            read.append(row["_ng_task_index"])
            yield row

    async def scenario() -> None:
        ended = 0
        async with Dispatch(rows(), Agent(), settings(5)) as attempts:
            async for _ in attempts:
                ended += 1
                assert len(read) <= ended + 5

    run(scenario())

    assert len(read) == 100


def test_a_slow_consumer_slows_the_run_down_and_results_do_not_pile_up() -> None:
    agent = Agent()

    async def scenario() -> None:
        fetched = 0
        async with Dispatch(rows_of(100), agent, settings(5)) as attempts:
            async for _ in attempts:
                fetched += 1
                assert len(agent.started) <= fetched + 5
                await asyncio.sleep(10)

    run(scenario())

    assert len(agent.started) == 100


def test_ten_times_the_rows_take_no_more_memory() -> None:
    async def answer(row: Row) -> Any:
        return {"reward": 1.0}

    async def scenario(count: int) -> int:
        gc.collect()
        tracemalloc.start()
        async with Dispatch((row_of(task) for task in range(count)), answer, settings(64)) as attempts:
            async for _ in attempts:
                pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    few, many = run(scenario(500)), run(scenario(5_000))

    assert many < 1.2 * few


def test_the_caps_of_agents_hold_each_for_itself() -> None:
    running: dict[str, int] = {"a": 0, "b": 0, "c": 0}
    most = dict(running)

    async def answer(row: Row) -> Any:
        name = row["agent_ref"]["name"]
        running[name] += 1
        most[name] = max(most[name], running[name])
        await asyncio.sleep(1)
        running[name] -= 1
        return {}

    rows = [row_of(task, "abc"[task % 3]) for task in range(90)]
    caps = Concurrency(total=None, per_agent={"a": 1, "b": 4}, each_other=2)

    attempts = run(collect(Dispatch(rows, answer, settings(concurrency=caps))))

    assert len(attempts) == 90
    assert most == {"a": 1, "b": 4, "c": 2}


def test_an_agent_at_its_cap_does_not_hold_up_the_others() -> None:
    ended: dict[str, list[float]] = {"slow": [], "quick": []}

    async def answer(row: Row) -> Any:
        name = row["agent_ref"]["name"]
        await asyncio.sleep(100 if name == "slow" else 1)
        ended[name].append(now_s())
        return {}

    rows = [*rows_of(50, "slow"), *rows_of(50, "quick")]

    run(collect(Dispatch(rows, answer, settings(concurrency=Concurrency(None, {"slow": 1}, 10)))))

    assert max(ended["quick"]) < min(ended["slow"])
    assert len(ended["slow"]) == 50


def test_a_failed_call_is_tried_again_and_every_attempt_is_handed_out() -> None:
    agent = Agent(refuse)

    attempts = run(collect(Dispatch([row_of(3)], agent, settings(), attempts_left=lambda row: 3)))

    assert [attempt.is_final for attempt in attempts] == [False, False, True]
    assert [row.get("_ng_attempt_index") for row in agent.started] == [None, 1, 2]
    records = [attempt.record() for attempt in attempts]
    assert [record["_ng_failure_class"] for record in records] == ["server_gone"] * 3
    assert [record.get("_ng_attempt_index") for record in records] == [None, 1, 2]
    assert all("reward" not in record for record in records)


def test_attempts_of_earlier_runs_are_counted_on() -> None:
    agent = Agent(refuse)

    run(collect(Dispatch([{**row_of(0), "_ng_attempt_index": 2}], agent, settings(), attempts_left=lambda row: 2)))

    assert [row["_ng_attempt_index"] for row in agent.started] == [2, 3]


def test_the_row_of_an_attempt_stays_as_it_was_sent() -> None:
    row = row_of(0)

    attempts = run(collect(Dispatch([row], Agent(refuse), settings())))

    assert attempts[0].row is row
    assert "_ng_attempt_index" not in row


def test_a_failure_that_the_agent_reports_is_not_tried_again() -> None:
    async def report(row: Row) -> Any:
        return {"_ng_failure_class": "transient", "reward": 0.0}

    attempts = run(collect(Dispatch(rows_of(2), Agent(report), settings())))

    assert [attempt.is_final for attempt in attempts] == [True, True]
    assert attempts[0].failure is None


def test_a_rollout_that_waits_for_its_retry_leaves_its_place_to_others() -> None:
    async def fail_first(row: Row) -> Any:
        if row["_ng_task_index"] == 0 and "_ng_attempt_index" not in row:
            raise ConnectionResetError
        return {}

    pauses = RetryPauses(first_s=60, longest_s=60)

    attempts = run(collect(Dispatch(rows_of(10), Agent(fail_first), settings(1, pauses=pauses))))

    assert tasks_of(attempts) == [0, *range(1, 10), 0]


def test_pauses_grow_between_attempts() -> None:
    started: list[float] = []

    async def fail(row: Row) -> Any:
        started.append(now_s())
        raise ConnectionResetError

    pauses = RetryPauses(first_s=10, longest_s=100)
    run(collect(Dispatch([row_of(0)], fail, settings(pauses=pauses), attempts_left=lambda row: 4)))

    gaps = [later - earlier for earlier, later in pairwise(started)]
    assert [5 <= gaps[0] <= 10, 10 <= gaps[1] <= 20, 20 <= gaps[2] <= 40] == [True] * 3


def test_when_everything_fails_rows_do_not_pile_up_waiting_for_their_retry() -> None:
    read = 0

    def rows() -> Iterator[Row]:
        nonlocal read
        for task in range(5_000):
            read += 1
            yield row_of(task)

    async def scenario() -> None:
        pauses = RetryPauses(first_s=3600, longest_s=3600)
        async with Dispatch(rows(), Agent(refuse), settings(64, pauses=pauses)) as attempts:
            for _ in range(1_024):
                await anext(attempts)
            assert attempts.awaiting_retry <= 1_024 + 64
            assert read <= 1_024 + 64

    run(scenario())


@pytest.mark.parametrize("answer", [None, [], "text"])
def test_an_answer_that_is_no_object_is_a_failure(answer: object) -> None:
    async def reply(row: Row) -> Any:
        return answer

    attempts = run(collect(Dispatch([row_of(0)], reply, settings(), attempts_left=lambda row: 1)))

    assert attempts[0].failure is not None
    assert attempts[0].failure.failure_class is FailureClass.INVALID_RESPONSE


def test_the_first_failure_of_each_kind_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(row: Row) -> Any:
        raise ConnectionResetError("gone\x1b[2J") if row["_ng_task_index"] % 2 else KeyError("missing")

    run(collect(Dispatch(rows_of(50), Agent(fail), settings(1))))

    assert sorted(record.getMessage() for record in caplog.records) == [
        "a, task 0, rollout 0 failed (agent_error): KeyError: 'missing'",
        "a, task 1, rollout 0 failed (server_gone): ConnectionResetError: gone\\x1b[2J",
    ]


def test_a_row_that_is_refused_concerns_itself_alone() -> None:
    async def refuse_odd_rows(row: Row) -> Any:
        if row["_ng_task_index"] % 2:
            raise ServerResponseError("http://agent/run", 422, b"no such field")
        return {}

    attempts = run(collect(Dispatch(rows_of(100), Agent(refuse_odd_rows), settings(8), attempts_left=lambda row: 1)))

    assert len(attempts) == 100
    assert sum(attempt.failure is not None for attempt in attempts) == 50


def test_settings_come_from_the_options_of_the_command() -> None:
    config = RolloutCollectionConfig.model_validate(
        {
            "input_jsonl_fpath": "in.jsonl",
            "output_jsonl_fpath": "out.jsonl",
            "num_samples_in_parallel": 7,
            "rollout_timeout_s": 5,
            "run_timeout_s": 60,
            "fail_fast": True,
            "max_failure_fraction": 0.5,
        }
    )

    assert DispatchSettings.of(config) == DispatchSettings(
        concurrency=Concurrency(total=7),
        rollout_timeout_s=5,
        run_timeout_s=60,
        fail_fast=True,
        max_failure_fraction=0.5,
    )


def test_nothing_to_do_is_done_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    assert run(collect(Dispatch([], Agent(), settings()))) == []
    assert caplog.text == ""


def test_caps_can_change_while_rollouts_are_made() -> None:
    in_flight: list[int] = []

    async def changing() -> None:
        async with Dispatch(rows_of(20), Agent(), settings(0)) as attempts:
            asyncio.get_running_loop().call_later(5, attempts.set_concurrency, Concurrency(total=6))
            async for _ in attempts:
                in_flight.append(attempts.in_flight)
                if len(in_flight) == 8:
                    attempts.set_concurrency(Concurrency(total=2))

    run(changing())

    assert len(in_flight) == 20
    assert max(in_flight) == 6
    assert max(in_flight[12:]) <= 2
