"""What takes too long is told by the processor's time: a busy machine changes no verdict."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.workers.pool import (
    PatternMatcher,
    WorkerDeathError,
    WorkerKilledError,
    WorkerPool,
    WorkerStalledError,
    WorkerTimeoutError,
)

PROGRAM = """
import os
import time
from nemo_gym.workers.worker import serve

def work(request):
    if request.get("crashes"):
        os.abort()
    time.sleep(request["sleeps_s"])
    until = time.process_time() + request["works_s"]
    while time.process_time() < until:
        pass
    return {"done": True}

serve(lambda: work)
"""


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., WorkerPool]]:
    program = tmp_path / "works.py"
    program.write_text(PROGRAM)
    pools: list[WorkerPool] = []

    def make(**options: Any) -> WorkerPool:
        pools.append(WorkerPool("working", program, 1, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_request_that_has_to_wait_for_the_processor_is_answered(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(cpu_limit_s=0.5)

    assert asyncio.run(pool.ask(sleeps_s=1.5, works_s=0.1)) == {"done": True}


def test_a_request_that_takes_too_much_of_the_processor_is_given_up(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(cpu_limit_s=0.3)

    with pytest.raises(WorkerTimeoutError, match=r"used up its 0\.3 s of processor time"):
        asyncio.run(pool.ask(sleeps_s=0, works_s=60))
    assert pool.pids == set()
    assert asyncio.run(pool.ask(sleeps_s=0, works_s=0)) == {"done": True}


def test_each_request_has_the_whole_limit_to_itself(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(cpu_limit_s=1.0)

    async def use() -> list[Any]:
        return [await pool.ask(sleeps_s=0, works_s=0.4) for _ in range(4)]

    assert asyncio.run(use()) == [{"done": True}] * 4
    assert len(pool.pids) == 1


def test_a_worker_that_gets_no_processor_is_the_machines_failure(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(cpu_limit_s=30.0, clock_limit_s=0.5)

    with pytest.raises(WorkerStalledError, match=r"no answer within 0\.5 s.*the machine is overloaded"):
        asyncio.run(pool.ask(sleeps_s=60, works_s=0))
    assert pool.pids == set()


def test_processes_that_are_killed_say_nothing_about_the_request_and_are_replaced() -> None:
    matcher = PatternMatcher(timeout_s=60.0, processes=1)

    async def use() -> None:
        wanted = asyncio.create_task(matcher.last_match("(a+)+$", "a" * 60 + "b"))
        killed: set[int] = set()
        while not wanted.done():
            for pid in matcher.pids - killed:
                if psutil.Process(pid).cpu_times().user > 1.0:  # it has long begun to match
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            await asyncio.sleep(0.01)
        await wanted

    try:
        with pytest.raises(WorkerKilledError, match=r"2 pattern processes were lost .* not enough memory"):
            asyncio.run(asyncio.wait_for(use(), 60))
        assert asyncio.run(matcher.last_match("b", "abc")) == ["b"]
    finally:
        matcher.close()


def test_processes_that_crash_do_so_over_the_request(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(cpu_limit_s=30.0)

    with pytest.raises(WorkerDeathError, match="2 working processes died over one request"):
        asyncio.run(pool.ask(crashes=True))
    assert asyncio.run(pool.ask(sleeps_s=0, works_s=0)) == {"done": True}


def test_a_request_that_is_cancelled_ends_its_process_or_is_never_begun(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(cpu_limit_s=60.0)

    async def use() -> set[int]:
        first = asyncio.create_task(pool.ask(sleeps_s=0, works_s=50))
        waiting = asyncio.create_task(pool.ask(sleeps_s=0, works_s=50))
        for _ in range(3_000):
            await asyncio.sleep(0.01)
            if any(psutil.Process(pid).cpu_times().user > 0.2 for pid in pool.pids):
                break
        busy = pool.pids
        waiting.cancel()
        first.cancel()
        await asyncio.wait([first, waiting])
        assert first.cancelled()
        assert waiting.cancelled()
        assert await asyncio.wait_for(pool.ask(sleeps_s=0, works_s=0), 30) == {"done": True}
        return busy & pool.pids

    assert asyncio.run(use()) == set()
