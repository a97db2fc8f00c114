import asyncio
import contextlib
import gc
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from nemo_gym.collect.examples import run_examples
from nemo_gym.runs.record import Result, Row


def rows_of(count: int) -> list[Row]:
    return [{"_rowidx": number} for number in range(count)]


class Agent:
    """Answers after as many turns of the event loop as a row asks for, and remembers what it saw."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.cancelled = 0
        self.running = 0
        self.most_running = 0

    async def __call__(self, row: Row) -> Result:
        self.started.append(row["_rowidx"])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if row.get("hangs"):
                await asyncio.Event().wait()
            for _ in range(row.get("turns", 3)):
                await asyncio.sleep(0)
            if row.get("fails"):
                raise ValueError("no")
            return {"answer_to": row["_rowidx"]}
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


async def nothing_is_left_running() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture(autouse=True)
def _no_warnings_from_the_garbage() -> Iterator[None]:
    yield
    gc.collect()


def test_each_awaitable_gives_the_row_that_was_passed_in_and_its_result() -> None:
    rows = rows_of(5)

    async def scenario() -> list[tuple[Row, Result]]:
        return [await rollout for rollout in run_examples(rows, Agent())]

    answers = asyncio.run(scenario())

    assert sorted(result["answer_to"] for _, result in answers) == [0, 1, 2, 3, 4]
    assert all(row is rows[result["answer_to"]] for row, result in answers)


def test_rollouts_come_in_the_order_in_which_they_finish() -> None:
    rows = [{"_rowidx": number, "turns": 50 - 10 * number} for number in range(5)]

    async def scenario() -> list[int]:
        return [(await rollout)[0]["_rowidx"] for rollout in run_examples(rows, Agent())]

    assert asyncio.run(scenario()) == [4, 3, 2, 1, 0]


def test_nothing_starts_before_the_first_item_is_asked_for() -> None:
    agent = Agent()

    async def scenario() -> None:
        rollouts = run_examples(rows_of(3), agent)
        await asyncio.sleep(0.01)
        assert agent.started == []
        await next(rollouts)
        assert len(agent.started) == 3

    asyncio.run(scenario())


def test_without_a_semaphore_all_rows_are_in_flight_together() -> None:
    agent = Agent()

    async def scenario() -> None:
        rows = [{"_rowidx": number, "turns": 50} for number in range(1_000)]
        for rollout in run_examples(rows, agent):
            await rollout

    asyncio.run(scenario())

    assert agent.most_running == 1_000


def test_the_semaphore_is_the_limit_and_rows_start_in_input_order() -> None:
    agent = Agent()

    async def scenario() -> None:
        semaphore = asyncio.Semaphore(3)
        for rollout in run_examples(rows_of(50), agent, semaphore):
            await rollout
        assert not semaphore.locked()

    asyncio.run(scenario())

    assert agent.most_running == 3
    assert agent.started == list(range(50))


def test_rows_become_tasks_only_as_the_semaphore_frees_up() -> None:
    read = 0

    def rows() -> Iterator[Row]:
        nonlocal read
        for row in rows_of(1_000):
            read += 1
            yield row

    async def scenario() -> None:
        for fetched, rollout in enumerate(run_examples(rows(), Agent(), asyncio.Semaphore(2))):
            await rollout
            if fetched == 10:
                assert read < 30
                assert len(asyncio.all_tasks()) <= 4

    asyncio.run(scenario())

    assert read == 1_000


def test_an_endless_generator_may_be_left_at_any_point() -> None:
    agent = Agent()

    def rows() -> Iterator[Row]:
        number = 0
        while True:
            yield {"_rowidx": number}
            number += 1

    async def scenario() -> None:
        for fetched, rollout in enumerate(run_examples(rows(), agent, asyncio.Semaphore(4))):
            await rollout
            if fetched == 20:
                break
        del rollout
        await nothing_is_left_running()

    asyncio.run(scenario())

    assert len(agent.started) < 60


def test_two_calls_may_share_a_semaphore() -> None:
    agent = Agent()

    async def drain(semaphore: asyncio.Semaphore) -> int:
        return len([await rollout for rollout in run_examples(rows_of(20), agent, semaphore)])

    async def scenario() -> list[int]:
        semaphore = asyncio.Semaphore(2)
        return list(await asyncio.gather(drain(semaphore), drain(semaphore)))

    assert asyncio.run(scenario()) == [20, 20]
    assert agent.most_running == 2


@pytest.mark.parametrize("size", [None, 2])
def test_any_async_context_manager_serves_as_semaphore(size: int | None) -> None:
    agent = Agent()

    class Own:
        def __init__(self) -> None:
            self._slots = asyncio.Semaphore(size or 1)

        async def __aenter__(self) -> None:
            await self._slots.acquire()

        async def __aexit__(self, *_: object) -> None:
            self._slots.release()

    async def scenario() -> int:
        guard: Any = nullcontext() if size is None else Own()
        return len([await rollout for rollout in run_examples(rows_of(10), agent, guard)])

    assert asyncio.run(scenario()) == 10
    assert agent.most_running == (10 if size is None else size)


def test_a_failed_rollout_raises_the_original_exception_with_its_row_and_the_others_go_on() -> None:
    rows = [{"_rowidx": number, "fails": number == 1} for number in range(3)]
    failures: list[ValueError] = []

    async def scenario() -> list[int]:
        answered = []
        for rollout in run_examples(rows, Agent()):
            try:
                answered.append((await rollout)[0]["_rowidx"])
            except ValueError as error:
                failures.append(error)
        return answered

    assert sorted(asyncio.run(scenario())) == [0, 2]
    assert [(error.args, error.row) for error in failures] == [(("no",), rows[1])]  # type: ignore[attr-defined]


def test_the_first_rollout_can_be_awaited_without_holding_on_to_the_iterator() -> None:
    async def scenario() -> Any:
        return await next(run_examples([{"_rowidx": 0, "fails": True}], Agent()))

    with pytest.raises(ValueError, match="no"):
        asyncio.run(scenario())


def test_awaitables_may_be_gathered() -> None:
    async def scenario() -> list[Any]:
        return list(await asyncio.gather(*run_examples(rows_of(10), Agent(), asyncio.Semaphore(2))))

    assert sorted(row["_rowidx"] for row, _ in asyncio.run(scenario())) == list(range(10))


def test_awaitables_may_become_tasks() -> None:
    async def scenario() -> int:
        tasks = [asyncio.create_task(rollout) for rollout in run_examples(rows_of(10), Agent())]
        done, _ = await asyncio.wait(tasks)
        return len(done)

    assert asyncio.run(scenario()) == 10


def test_awaitables_may_be_awaited_out_of_order() -> None:
    async def scenario() -> list[int]:
        rollouts = list(run_examples(rows_of(5), Agent()))
        return [(await rollout)[0]["_rowidx"] for rollout in reversed(rollouts)]

    assert sorted(asyncio.run(scenario())) == [0, 1, 2, 3, 4]


def test_awaitables_that_nobody_awaits_warn_of_nothing() -> None:
    async def scenario() -> None:
        for number, rollout in enumerate(run_examples(rows_of(5), Agent())):
            if number == 2:
                await rollout

    with complaints() as told:
        asyncio.run(scenario())
    assert told == []


@contextlib.contextmanager
def complaints() -> Iterator[list[str]]:
    """What Python, at last when it looks for garbage, has to say of coroutines and tasks that were dropped."""
    told: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda found: told.append(str(found.exc_value))
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield told
            gc.collect()
        told += [str(warning.message) for warning in warned]
    finally:
        sys.unraisablehook = before


def test_a_consumer_that_stops_early_leaves_no_tasks_behind() -> None:
    agent = Agent()
    rows = [{"_rowidx": 0}, *({"_rowidx": number, "hangs": True} for number in range(1, 10))]

    async def scenario() -> None:
        semaphore = asyncio.Semaphore(4)
        for rollout in run_examples(rows, agent, semaphore):
            await rollout
            break
        del rollout
        await nothing_is_left_running()
        assert semaphore._value == 4

    asyncio.run(scenario())

    assert agent.cancelled >= 3


def test_cancelling_the_consumer_cancels_what_is_in_flight() -> None:
    agent = Agent()

    async def consume(rows: list[Row]) -> None:
        for rollout in run_examples(rows, agent):
            await rollout

    async def scenario() -> None:
        consumer = asyncio.create_task(consume([{"_rowidx": number, "hangs": True} for number in range(5)]))
        for _ in range(5):
            await asyncio.sleep(0)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await nothing_is_left_running()

    asyncio.run(scenario())

    assert agent.cancelled == 5


def test_a_wait_that_was_given_up_can_be_taken_up_again() -> None:
    release = asyncio.Event()

    async def answer(row: Row) -> Result:
        await release.wait()
        return {}

    async def scenario() -> list[Row]:
        rollouts = run_examples(rows_of(2), answer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(next(rollouts), 0.02)
        release.set()
        return [(await rollout)[0] for rollout in rollouts]

    assert asyncio.run(scenario()) == rows_of(2)


def test_a_call_cancelled_from_within_does_not_pass_for_a_cancelled_consumer() -> None:
    async def cancel_itself(row: Row) -> Result:
        raise asyncio.CancelledError

    async def scenario() -> None:
        with pytest.raises(Exception, match="cancelled from within") as raised:
            await next(run_examples(rows_of(1), cancel_itself))
        assert raised.value.row == {"_rowidx": 0}  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_an_error_of_the_row_source_comes_in_place_of_the_next_awaitable() -> None:
    def rows() -> Iterator[Row]:
        yield from rows_of(2)
        raise OSError("disk on fire")

    async def scenario() -> None:
        rollouts = run_examples(rows(), Agent())
        await next(rollouts)
        await next(rollouts)
        with pytest.raises(OSError, match="disk on fire"):
            await next(rollouts)

    asyncio.run(scenario())


def test_no_rows_give_no_awaitables() -> None:
    async def scenario() -> list[Any]:
        return list(run_examples([], Agent()))

    assert asyncio.run(scenario()) == []


def test_it_works_in_an_event_loop_of_another_thread() -> None:
    answers: list[int] = []

    async def scenario() -> None:
        for rollout in run_examples(rows_of(5), Agent(), asyncio.Semaphore(2)):
            answers.append((await rollout)[0]["_rowidx"])

    thread = threading.Thread(target=lambda: asyncio.run(scenario()))
    thread.start()
    thread.join(10)

    assert sorted(answers) == [0, 1, 2, 3, 4]


def test_an_iterator_that_outlives_its_event_loop_does_no_harm() -> None:
    async def scenario() -> Any:
        rollouts = run_examples([{"_rowidx": 0, "hangs": True}], Agent())
        return rollouts, next(rollouts)

    with complaints() as told:
        kept = asyncio.run(scenario())
        del kept
    assert told == []


def test_a_main_task_that_ends_early_takes_its_rollouts_with_it() -> None:
    agent = Agent()

    async def scenario() -> None:
        rows = [{"_rowidx": 0}, {"_rowidx": 1, "hangs": True}]
        await next(run_examples(rows, agent))

    asyncio.run(scenario())

    assert agent.running == 0


def test_an_observer_is_told_of_every_rollout_and_of_the_end() -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def finished(self, row: Row, result: Result | None) -> None:
            self.seen.append((row["_rowidx"], result is None))

        def close(self) -> None:
            self.seen.append("closed")

    observer = Observer()

    async def scenario() -> None:
        rows = [{"_rowidx": 0}, {"_rowidx": 1, "fails": True, "turns": 9}]
        for rollout in run_examples(rows, Agent(), None, observer):
            await asyncio.gather(rollout, return_exceptions=True)

    asyncio.run(scenario())

    assert observer.seen == [(0, False), (1, True), "closed"]


def test_a_long_lived_task_keeps_no_trace_of_finished_calls() -> None:
    async def scenario() -> None:
        task = asyncio.current_task()
        assert task is not None
        for _ in range(50):
            for rollout in run_examples(rows_of(2), Agent()):
                await rollout
        del rollout
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()
        assert not [held for held in gc.get_objects() if type(held).__name__ == "_Work"]

    asyncio.run(scenario())
