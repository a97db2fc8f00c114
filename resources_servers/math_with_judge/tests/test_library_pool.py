"""The pool of math-verify processes: used again, killed when stuck, replaced when dead, gone at the end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from resources_servers.math_with_judge.library_pool import (
    WORKER,
    LibraryPool,
    LibraryVerdict,
    LibraryVerifierError,
)

STUCK = r"\boxed{9^{9^{9^{9}}}}"
"""Takes longer than the universe."""


@pytest.fixture
def make_pool() -> Iterator[Callable[..., LibraryPool]]:
    pools: list[LibraryPool] = []

    def make(workers: int = 1, timeout_s: float = 30.0, **options: Any) -> LibraryPool:
        pools.append(LibraryPool(workers, timeout_s, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def run(work: Any) -> Any:
    """On uvloop, as in a host process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def is_there(pid: int) -> bool:
    """Also as a zombie."""
    return psutil.pid_exists(pid)


def wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + 30
    while _is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # an orphan's end is not ours to collect
    except psutil.NoSuchProcess:
        return False


def test_equal_forms_are_equal_and_one_process_does_all(make_pool: Callable[..., LibraryPool]) -> None:
    pool = make_pool()
    cases = [
        ("1/2", r"So it is \boxed{0.5}.", 1.0, "1/2"),
        (r"\frac{1}{2}", r"Hence $\frac{2}{4}$", 1.0, "1/2"),
        ("a^2+4a+4", r"\boxed{(a+2)^2}", 1.0, "(a + 2)**2"),
        ("1,000", "It is 1000", 1.0, "1000"),
        ("3", r"\boxed{4}", 0.0, "4"),
        ("3", "I do not know", 0.0, None),
        ("3", "", 0.0, None),
        ("3", r"\boxed{" * 50, 0.0, None),
    ]

    async def grade_all() -> list[tuple[LibraryVerdict, set[int]]]:
        return [(await pool.grade(expected, text), pool.pids) for expected, text, *_ in cases]

    graded = run(grade_all())

    assert [verdict for verdict, _ in graded] == [LibraryVerdict(reward, shown) for *_, reward, shown in cases]
    assert len({pid for _, pids in graded for pid in pids}) == 1


def test_a_stuck_process_is_killed_and_replaced(make_pool: Callable[..., LibraryPool]) -> None:
    pool = make_pool(timeout_s=1.0)

    async def grade() -> tuple[LibraryVerdict, set[int], LibraryVerdict]:
        await pool.grade("1", "1")
        (before,) = pool.pids
        stuck = await pool.grade("2", STUCK)
        assert not is_there(before)
        return stuck, {before}, await pool.grade("2", "it is 2")

    stuck, before, after = run(grade())

    assert stuck == LibraryVerdict(0.0, None, timed_out=True)
    assert after == LibraryVerdict(1.0, "2")
    assert pool.pids.isdisjoint(before)


def test_a_process_that_gets_no_processor_says_nothing_about_an_answer(make_pool: Callable[..., LibraryPool]) -> None:
    pool = make_pool(clock_limit_s=1.0)

    async def grade() -> None:
        assert (await pool.grade("1", "1")).reward == 1.0
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LibraryVerifierError, match="the machine is overloaded"):
            await pool.grade("2", "it is 2")
        assert (await pool.grade("2", "it is 2")).reward == 1.0

    run(grade())


def test_there_are_never_more_processes_than_allowed(make_pool: Callable[..., LibraryPool]) -> None:
    pool = make_pool(workers=2)

    async def grade_many() -> list[LibraryVerdict]:
        return list(await asyncio.gather(*(pool.grade(str(number), f"it is {number}") for number in range(20))))

    assert [verdict.reward for verdict in run(grade_many())] == [1.0] * 20
    assert len(pool.pids) <= 2


def test_a_process_that_was_killed_from_outside_is_replaced(
    make_pool: Callable[..., LibraryPool], caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()

    async def grade() -> LibraryVerdict:
        await pool.grade("1", "1")
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        return await pool.grade("7", "it is 7")

    assert run(grade()) == LibraryVerdict(1.0, "7")
    assert "died" in caplog.text


def test_an_answer_over_which_every_process_dies_is_not_equal(
    make_pool: Callable[..., LibraryPool], tmp_path: Path
) -> None:
    program = tmp_path / "dies.py"
    program.write_text("print('ready', flush=True); input()")
    pool = make_pool(program=program)

    assert run(pool.grade("1", "1")) == LibraryVerdict(0.0, None)
    assert pool.pids == set()


def test_an_answer_whose_processes_are_killed_has_no_verdict(
    make_pool: Callable[..., LibraryPool], tmp_path: Path
) -> None:
    program = tmp_path / "is_killed.py"
    program.write_text("import os; print('ready', flush=True); input(); os.kill(os.getpid(), 9)")

    with pytest.raises(LibraryVerifierError, match="killed, most often because this machine has not enough memory"):
        run(make_pool(program=program).grade("1", "1"))


def test_a_library_that_cannot_be_loaded_is_an_error_with_a_remedy(
    make_pool: Callable[..., LibraryPool], tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(3)")

    with pytest.raises(LibraryVerifierError, match="pip install math-verify"):
        run(make_pool(program=program).grade("1", "1"))


def test_closing_ends_processes_at_work_and_opening_starts_anew(make_pool: Callable[..., LibraryPool]) -> None:
    pool = make_pool(workers=2)

    async def grade() -> set[int]:
        await pool.grade("1", "1")
        pids = pool.pids
        stuck = asyncio.create_task(pool.grade("2", STUCK))
        await asyncio.sleep(0.2)
        pool.close()
        with pytest.raises(LibraryVerifierError, match="stopping"):
            await stuck
        with pytest.raises(LibraryVerifierError, match="stopping"):
            await pool.grade("1", "1")
        return pids

    for pid in run(grade()):
        assert not is_there(pid)
    pool.open()
    assert run(pool.grade("1", "1")).reward == 1.0


USE_A_POOL = """
import asyncio, os, signal, sys
from resources_servers.math_with_judge.library_pool import LibraryPool
pool = LibraryPool(1, 60.0)
asyncio.run(pool.grade("1", "1"))
print(*pool.pids, flush=True)
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exits", "is killed"])
def test_no_process_outlives_the_server(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", USE_A_POOL + end],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.stderr == ""
    wait_until_ended(int(done.stdout))


def test_a_stuck_process_that_nobody_watches_ends_itself() -> None:
    request = json.dumps({"expected": "2", "generated": STUCK, "cpu_limit_s": 0.2}) + "\n"

    done = subprocess.run(
        [sys.executable, str(WORKER)], input=request, capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.stdout, done.returncode) == ("ready\n", -signal.SIGPROF)
