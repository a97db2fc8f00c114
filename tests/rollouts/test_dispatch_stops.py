"""Everything that ends: a rollout, a run, a consumer's patience; and the word about what does not."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_gym.collect.dispatch import GRACE_S, Dispatch
from nemo_gym.collect.failures import Attempt, RetryPauses
from nemo_gym.collect.stopping import StopKind
from nemo_gym.http.errors import ServerResponseError
from nemo_gym.runs.record import Row
from tests.rollouts.dispatch_fakes import (
    Agent,
    collect,
    for_ever,
    now_s,
    refuse,
    row_of,
    rows_of,
    run,
    settings,
    tasks_of,
)


def test_a_rollout_that_takes_too_long_is_cancelled_and_tried_again() -> None:
    agent = Agent(for_ever)

    attempts = run(collect(Dispatch([row_of(0)], agent, settings(rollout_timeout_s=5), attempts_left=lambda row: 2)))

    assert len(agent.cancelled) == 2
    assert [attempt.record()["_ng_failure_class"] for attempt in attempts] == ["timeout", "timeout"]
    assert "rollout_timeout_s=5" in attempts[0].record()["_ng_failure_message"]


def test_a_timeout_of_the_client_is_not_taken_for_that_of_the_rollout() -> None:
    async def time_out(row: Row) -> Any:
        raise TimeoutError("of a socket")

    attempts = run(collect(Dispatch([row_of(0)], time_out, settings(), attempts_left=lambda row: 1)))

    assert "of a socket" in attempts[0].record()["_ng_failure_message"]


def test_a_call_cancelled_from_within_is_a_failed_attempt_and_no_hang() -> None:
    async def cancel_itself(row: Row) -> Any:
        raise asyncio.CancelledError

    attempts = run(collect(Dispatch([row_of(0)], cancel_itself, settings(), attempts_left=lambda row: 1)))

    assert attempts[0].failure is not None


def test_without_a_rollout_timeout_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run(collect(Dispatch([], Agent(), settings(rollout_timeout_s=None))))

    assert "rollout_timeout_s" in caplog.text


def test_the_run_ends_when_its_time_is_over_and_leaves_the_rest() -> None:
    agent = Agent(seconds=10)

    async def scenario() -> tuple[list[Attempt], Dispatch, float]:
        started_s = now_s()
        dispatch = Dispatch(rows_of(100), agent, settings(2, run_timeout_s=35))
        return await collect(dispatch), dispatch, now_s() - started_s

    attempts, dispatch, took_s = run(scenario())

    assert sorted(tasks_of(attempts)) == [0, 1, 2, 3, 4, 5]
    assert took_s == pytest.approx(35)
    assert len(agent.cancelled) == 2
    assert dispatch.stopped is not None
    assert dispatch.stopped.kind is StopKind.RUN_TIMEOUT


async def interrupt(dispatch: Dispatch, after_s: float, *, at_once: bool = False) -> None:
    await asyncio.sleep(after_s)
    dispatch.request_stop(at_once=at_once)


def test_a_stop_lets_what_is_in_flight_finish_and_starts_nothing_new() -> None:
    agent = Agent(seconds=8)

    async def scenario() -> tuple[list[Attempt], Dispatch]:
        dispatch = Dispatch(rows_of(100), agent, settings(3))
        attempts, _ = await asyncio.gather(collect(dispatch), interrupt(dispatch, 1))
        return attempts, dispatch

    attempts, dispatch = run(scenario())

    assert sorted(tasks_of(attempts)) == [0, 1, 2]
    assert len(agent.started) == 3
    assert dispatch.stopped is not None
    assert dispatch.stopped.kind is StopKind.INTERRUPTED


def test_what_is_not_finished_ten_seconds_after_a_stop_is_let_go() -> None:
    async def slow_for_odd_ones(row: Row) -> Any:
        await asyncio.sleep(1_000 if row["_ng_task_index"] % 2 else 5)
        return {}

    agent = Agent(slow_for_odd_ones)

    async def scenario() -> tuple[list[Attempt], float]:
        dispatch = Dispatch(rows_of(4), agent, settings(4))
        attempts, _ = await asyncio.gather(collect(dispatch), interrupt(dispatch, 2))
        return attempts, now_s()

    attempts, ended_s = run(scenario())

    assert sorted(tasks_of(attempts)) == [0, 2]
    assert ended_s == pytest.approx(1_000 + 2 + GRACE_S)
    assert len(agent.cancelled) == 2


def test_a_second_stop_does_not_wait() -> None:
    agent = Agent(for_ever)

    async def scenario() -> float:
        dispatch = Dispatch(rows_of(4), agent, settings(4))
        await asyncio.gather(collect(dispatch), interrupt(dispatch, 2), interrupt(dispatch, 3, at_once=True))
        return now_s()

    assert run(scenario()) == pytest.approx(1_003)
    assert len(agent.cancelled) == 4


def test_a_stop_ends_the_wait_for_a_retry() -> None:
    pauses = RetryPauses(first_s=3600, longest_s=3600)

    async def scenario() -> tuple[list[Attempt], float]:
        dispatch = Dispatch([row_of(0)], Agent(refuse), settings(pauses=pauses))
        attempts, _ = await asyncio.gather(collect(dispatch), interrupt(dispatch, 5))
        return attempts, now_s()

    attempts, ended_s = run(scenario())

    assert [attempt.is_final for attempt in attempts] == [False]
    assert ended_s == pytest.approx(1_005)


def test_what_has_ended_is_handed_out_even_after_a_stop_at_once() -> None:
    async def scenario() -> list[int]:
        async with Dispatch(rows_of(3), Agent(), settings(3)) as attempts:
            first = await anext(attempts)
            attempts.request_stop(at_once=True)
            return sorted(tasks_of([first, *[attempt async for attempt in attempts]]))

    assert run(scenario()) == [0, 1, 2]


def test_the_run_stops_when_an_agent_cannot_succeed(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse_key(row: Row) -> Any:
        raise ServerResponseError("http://agent/run", 401, b"wrong key")

    agent = Agent(refuse_key)

    async def scenario() -> Dispatch:
        dispatch = Dispatch(rows_of(1_000), agent, settings(4))
        await collect(dispatch)
        return dispatch

    dispatch = run(scenario())

    assert dispatch.stopped is not None
    assert dispatch.stopped.kind is StopKind.DOOMED_AGENT
    assert len(agent.started) <= 8
    assert caplog.text.count("wrong key") == 1


def test_failing_fast_stops_at_the_first_rollout_that_failed_for_good() -> None:
    agent = Agent(refuse)

    async def scenario() -> Dispatch:
        dispatch = Dispatch(rows_of(100), agent, settings(1, fail_fast=True), attempts_left=lambda row: 2)
        await collect(dispatch)
        return dispatch

    dispatch = run(scenario())

    assert dispatch.stopped is not None
    assert dispatch.stopped.kind is StopKind.FAIL_FAST
    assert len(agent.started) < 10


def test_an_error_of_the_row_source_comes_after_what_was_in_flight() -> None:
    def rows() -> Iterator[Row]:
        yield from rows_of(2)
        raise OSError("disk on fire")

    async def scenario() -> list[int]:
        async with Dispatch(rows(), Agent(), settings(8)) as attempts:
            seen = tasks_of([await anext(attempts), await anext(attempts)])
            with pytest.raises(OSError, match="disk on fire"):
                await anext(attempts)
        return sorted(seen)

    assert run(scenario()) == [0, 1]


def test_leaving_the_block_cancels_what_is_in_flight_and_closes_the_row_source() -> None:
    closed = False

    def rows() -> Iterator[Row]:
        nonlocal closed
        try:
            yield from rows_of(100)
        finally:
            closed = True

    agent = Agent()

    async def scenario() -> None:
        async with Dispatch(rows(), agent, settings(4)) as attempts:
            async for _ in attempts:
                raise ValueError("no room on the disk")

    with pytest.raises(ValueError, match="no room"):
        run(scenario())

    assert closed
    assert agent.running == 0


def test_a_cancelled_consumer_takes_everything_with_it() -> None:
    agent = Agent(for_ever)

    async def scenario() -> None:
        consumer = asyncio.create_task(collect(Dispatch(rows_of(10), agent, settings(3))))
        await asyncio.sleep(5)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())

    assert len(agent.cancelled) == 3


def test_a_call_that_resists_cancellation_does_not_keep_the_run_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def resist(row: Row) -> Any:
        for _ in range(100):
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue
        return {}

    async def scenario() -> float:
        await collect(Dispatch([row_of(0)], resist, settings(run_timeout_s=3)))
        ended_s = now_s()
        await asyncio.sleep(200)
        return ended_s

    assert run(scenario()) == pytest.approx(1_000 + 3 + 5)
    assert "could not be cancelled" in caplog.text


def test_a_stall_names_the_oldest_rollouts_and_how_their_agents_are(caplog: pytest.LogCaptureFixture) -> None:
    async def probe(agent: str) -> str:
        if agent == "dead":
            raise ConnectionRefusedError
        await asyncio.sleep(0 if agent == "alive" else 1_000)
        return "answers /health"

    rows = [
        row_of(0, "alive"),
        row_of(1, "dead"),
        row_of(2, "stuck"),
        *(row_of(task, "alive") for task in range(3, 20)),
    ]

    run(collect(Dispatch(rows, Agent(for_ever), settings(50, run_timeout_s=450), probe=probe)))

    stalls = [record.getMessage() for record in caplog.records if "No rollout finished" in record.getMessage()]
    assert len(stalls) == 1
    assert "for 300 s" in stalls[0]
    assert "20 in flight" in stalls[0]
    assert "alive, task 0, rollout 0" in stalls[0]
    assert "task 5," not in stalls[0]
    assert "alive answers /health" in stalls[0]
    assert "dead does not answer /health (ConnectionRefusedError)" in stalls[0]
    assert "stuck does not answer /health within 5 s" in stalls[0]


def test_a_stall_that_lasts_is_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    run(collect(Dispatch([row_of(0)], Agent(for_ever), settings(run_timeout_s=1_000))))

    assert caplog.text.count("No rollout finished") == 3


def test_a_run_in_which_rollouts_finish_does_not_stall(caplog: pytest.LogCaptureFixture) -> None:
    run(collect(Dispatch(rows_of(20), Agent(seconds=200), settings(1))))

    assert "No rollout finished" not in caplog.text
