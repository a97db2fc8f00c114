"""The dispatcher on a clock that jumps: pauses, timeouts and stalls of hours pass in no time."""

import asyncio
import gc
import logging
import selectors
import tracemalloc
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from nemo_gym.rollouts.config import Concurrency, RolloutCollectionConfig
from nemo_gym.rollouts.dispatch import GRACE_S, Attempt, Dispatch, DispatchSettings
from nemo_gym.rollouts.failures import RetryPauses
from nemo_gym.rollouts.record import FailureClass, Row
from nemo_gym.rollouts.stop_rules import StopKind

T = TypeVar("T")
NO_PAUSE = RetryPauses(first_s=0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Where there is nothing to do until a timer, its time is now."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits and no timer is set: this would hang for ever"
            self._loop.jump(timeout)
        return ready


def run(main: Awaitable[T]) -> T:
    async def body() -> T:
        return await main

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(body())


def now_s() -> float:
    return asyncio.get_running_loop().time()


def row_of(task: int, agent: str = "a") -> Row:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": agent}}


def rows_of(count: int, agent: str = "a") -> list[Row]:
    return [row_of(task, agent) for task in range(count)]


def settings(total: int | None = 4, **options: Any) -> DispatchSettings:
    return DispatchSettings(**{"concurrency": Concurrency(total=total), "pauses": NO_PAUSE, **options})


async def collect(dispatch: Dispatch) -> list[Attempt]:
    async with dispatch as attempts:
        return [attempt async for attempt in attempts]


def tasks_of(attempts: Iterable[Attempt]) -> list[int]:
    return [attempt.row["_ng_task_index"] for attempt in attempts]


class Agent:
    """Counts what it is sent; each call takes a second unless told otherwise."""

    def __init__(self, behave: Callable[[Row], Awaitable[Any]] | None = None, seconds: float = 1.0) -> None:
        self.started: list[Row] = []
        self.cancelled: list[Row] = []
        self.running = 0
        self.most_running = 0
        self._behave = behave
        self._seconds = seconds

    async def __call__(self, row: Row) -> Any:
        self.started.append(row)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._seconds)
            return {"reward": 1.0} if self._behave is None else await self._behave(row)
        except asyncio.CancelledError:
            self.cancelled.append(row)
            raise
        finally:
            self.running -= 1


async def refuse(row: Row) -> Any:
    raise ConnectionResetError("gone")


async def for_ever(row: Row) -> Any:
    await asyncio.Event().wait()


def test_rows_start_in_input_order_and_never_more_than_the_cap_at_once() -> None:
    agent = Agent()

    attempts = run(collect(Dispatch(rows_of(20), agent, settings(3))))

    assert [row["_ng_task_index"] for row in agent.started] == list(range(20))
    assert agent.most_running == 3
    assert sorted(tasks_of(attempts)) == list(range(20))
    assert all(attempt.is_final and attempt.record() == {"reward": 1.0} for attempt in attempts)


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
    from nemo_gym.http.errors import ServerResponseError

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


def test_a_row_that_is_refused_concerns_itself_alone() -> None:
    from nemo_gym.http.errors import ServerResponseError

    async def refuse_odd_rows(row: Row) -> Any:
        if row["_ng_task_index"] % 2:
            raise ServerResponseError("http://agent/run", 422, b"no such field")
        return {}

    attempts = run(collect(Dispatch(rows_of(100), Agent(refuse_odd_rows), settings(8), attempts_left=lambda row: 1)))

    assert len(attempts) == 100
    assert sum(attempt.failure is not None for attempt in attempts) == 50


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
