"""Isolated processes as a server uses them: bounded, used again, replaced when lost, ended with the pool."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.config_types import ConfigError
from nemo_gym.sandbox.child import Limits
from nemo_gym.sandbox.confine import LAYERS
from nemo_gym.sandbox.process import IsolatedPool, IsolatedProcess, SandboxError, SandboxUnavailableError, Work

WORK = """
import os, time
prepared = []

def prepare(payload):
    prepared.append(payload)

def run(payload):
    time.sleep(payload if isinstance(payload, (int, float)) else 0)
    return {"prepared": list(prepared), "parent": os.getppid()}
"""
LIMITS = Limits(wall_s=30, cpu_s=5)

MakePool = Callable[..., IsolatedPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    (tmp_path / "pool_work.py").write_text(WORK)
    pools: list[IsolatedPool] = []

    def make(size: int = 1, module: str = "pool_work", **options: Any) -> IsolatedPool:
        settings = {"require_isolation": False, "layers": ["seccomp"], **options}
        pools.append(IsolatedPool(Work(module, (tmp_path,)), size, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def call(payload: Any) -> Callable[[IsolatedProcess], Any]:
    return lambda process: process.call(payload, LIMITS).value


def pid_of(process: IsolatedProcess) -> int:
    return process._process.pid


def test_a_process_is_used_again_and_remembers_only_what_was_prepared(make_pool: MakePool) -> None:
    pool = make_pool()

    first = asyncio.run(pool.run(call("a")))
    second = asyncio.run(pool.run(call("b")))  # another event loop, the same pool

    assert (first["prepared"], second["prepared"]) == (["a"], ["a", "b"])
    assert first["parent"] == second["parent"]


def test_no_more_processes_run_than_allowed(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    running: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def job(process: IsolatedProcess) -> int:
        with lock:
            running.append(1)
            most.append(len(running))
        process.call(0.02, LIMITS)
        with lock:
            running.pop()
        return pid_of(process)

    async def flood() -> list[int]:
        return list(await asyncio.gather(*(pool.run(job) for _ in range(8))))

    assert len(set(asyncio.run(flood()))) == max(most) == 2


def test_a_lost_process_is_an_error_of_its_own_and_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool()

    def lose(process: IsolatedProcess) -> None:
        os.kill(pid_of(process), signal.SIGKILL)
        process.call("x", LIMITS)

    with pytest.raises(SandboxError, match="ended unexpectedly"):
        asyncio.run(pool.run(lose))
    assert asyncio.run(pool.run(call("again")))["prepared"] == ["again"]


def test_work_that_cannot_be_imported_is_named(make_pool: MakePool) -> None:
    with pytest.raises(SandboxError, match="No module named 'not_there'"):
        make_pool(module="not_there").start()


def test_too_little_isolation_is_refused_where_isolation_is_required(make_pool: MakePool) -> None:
    pool = make_pool(require_isolation=True)

    with pytest.raises(SandboxUnavailableError, match=r"either Landlock .* or unprivileged user namespaces"):
        pool.start()
    assert issubclass(SandboxUnavailableError, ConfigError)


def test_what_is_missing_is_told(make_pool: MakePool, tmp_path: Path) -> None:
    process = make_pool(layers=LAYERS).start()

    assert set(process.layers) | set(process.problems) == set(LAYERS)
    assert not set(process.layers) & set(process.problems)


def test_closing_ends_work_in_progress_and_every_process(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    idle = pid_of(pool.start())
    seen: list[int] = []
    both_sleep = threading.Barrier(3)

    def sleep(process: IsolatedProcess) -> None:
        seen.append(pid_of(process))
        both_sleep.wait(20)
        process.call(25, LIMITS)

    async def close_meanwhile() -> None:
        work = [asyncio.ensure_future(pool.run(sleep)) for _ in range(2)]
        await asyncio.to_thread(both_sleep.wait, 20)
        await asyncio.to_thread(pool.close)
        for task in work:
            with pytest.raises(SandboxError):
                await task

    asyncio.run(close_meanwhile())

    for pid in {idle, *seen}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_forgotten_pool_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "pool_work.py").write_text(WORK)
    pool = IsolatedPool(Work("pool_work", (tmp_path,)), 1, require_isolation=False)
    process = pool.start()
    pid, folder = pid_of(process), process._folder

    del pool, process

    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
