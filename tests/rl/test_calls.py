import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from nemo_gym.rl.calls import DaemonThreads, call, deadline, gather_or_cancel, in_thread


class Handle:
    """Looks like a method of a Ray actor."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *arguments: Any, **options: Any) -> Any:
        return self._answer(*arguments, **options)


async def double(number: int, *, more: int = 0) -> int:
    return 2 * number + more


@pytest.mark.parametrize("method", [lambda number, more=0: 2 * number + more, double, Handle(double)])
def test_a_method_is_called_wherever_it_runs(method: Any) -> None:
    assert asyncio.run(call(method, 3, more=1)) == 7


def test_a_handle_may_answer_at_once() -> None:
    assert asyncio.run(call(Handle(lambda: 5))) == 5


def test_plain_methods_block_neither_each_other_nor_the_loop() -> None:
    all_there = threading.Barrier(20)

    async def main() -> list[int]:
        async with asyncio.timeout(30):
            return list(await asyncio.gather(*(call(all_there.wait) for _ in range(20))))

    assert sorted(asyncio.run(main())) == list(range(20))


@pytest.mark.parametrize(("raised", "seen"), [(KeyError("k"), KeyError), (StopIteration(1), RuntimeError)])
def test_what_a_plain_method_raises_reaches_the_caller(raised: Exception, seen: type[Exception]) -> None:
    def fail() -> None:
        raise raised

    with pytest.raises(seen):
        asyncio.run(call(fail))


def test_a_call_that_never_returns_does_not_keep_the_program_from_ending() -> None:
    program = """
import asyncio, threading
from nemo_gym.rl.calls import call, deadline

async def main():
    async with deadline(0.05, lambda: KeyError("too long")):
        await call(threading.Event().wait)

try:
    asyncio.run(main())
except KeyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "'too long'\n"


def test_threads_are_used_again_and_end_when_there_is_nothing_to_do() -> None:
    threads, seen = DaemonThreads(idle_for_s=0.05), []
    for number in range(50):
        done = threading.Event()

        def job(number: int = number, done: threading.Event = done) -> None:
            seen.append((number, threading.current_thread()))
            done.set()

        threads.submit(job)
        assert done.wait(10)
        if number % 10 == 0:
            time.sleep(0.1)
    assert [number for number, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen}) < 50
    deadline_s = time.monotonic() + 10
    while any(thread.is_alive() for _, thread in seen):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_results_come_in_order_whatever_the_order_of_ending() -> None:
    async def main() -> list[int]:
        second_is_done = asyncio.Event()

        async def first() -> int:
            await second_is_done.wait()
            return 1

        async def second() -> int:
            second_is_done.set()
            return 2

        return await gather_or_cancel([first(), second()])

    assert asyncio.run(main()) == [1, 2]


def test_siblings_of_a_failure_have_ended_before_it_is_raised() -> None:
    ended: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("first")

    async def main() -> None:
        with pytest.raises(KeyError, match="first"):
            await gather_or_cancel([waits("a"), fails(), waits("b")])
        assert ended == ["a", "b"]

    asyncio.run(main())


def test_whoever_is_cancelled_cancels_what_it_waits_for() -> None:
    ended: list[int] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(1)

    async def main() -> None:
        task = asyncio.create_task(gather_or_cancel([waits(), waits()]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [1, 1]


def test_a_timeout_of_the_work_itself_is_not_taken_for_the_deadline() -> None:
    async def main() -> None:
        async with deadline(60, lambda: KeyError("deadline")):
            raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        asyncio.run(main())


def test_a_thread_whose_caller_is_gone_disturbs_nobody() -> None:
    go_on = threading.Event()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await in_thread(lambda: go_on.wait(10))

    asyncio.run(main())
    go_on.set()
