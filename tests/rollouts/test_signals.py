"""Signals that are really sent: to this process where it survives them, to another one where it does not."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nemo_gym.runtime import stopping_on_signals

PROGRAM = """
import asyncio, logging, sys
from nemo_gym.runs.options import Concurrency
from nemo_gym.collect.dispatch import Dispatch, DispatchSettings
from nemo_gym.runtime import stopping_on_signals

logging.basicConfig()
attempts = None

async def post(row):
    print("started", flush=True)
    while sys.argv[1] == "never" or attempts.stopped is None:
        await asyncio.sleep(0.01)
    return {"reward": 1.0}

async def main():
    global attempts
    rows = ({"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}} for task in range(100))
    finished = 0
    attempts = Dispatch(rows, post, DispatchSettings(concurrency=Concurrency(total=2)))
    async with attempts:
        with stopping_on_signals(attempts.request_stop):
            async for attempt in attempts:
                finished += 1
    print(f"finished {finished}, {attempts.stopped.kind}", flush=True)

asyncio.run(main())
"""


async def requests_after(*numbers: int) -> list[bool]:
    """What is asked for when these signals arrive one after the other."""
    asked: list[bool] = []

    def request_stop(*, at_once: bool) -> None:
        asked.append(at_once)

    with stopping_on_signals(request_stop):
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
    return asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_to_stop_and_the_second_to_stop_at_once(number: int) -> None:
    assert asyncio.run(requests_after(number, number)) == [False, True]


def test_a_third_signal_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(requests_after(signal.SIGINT, signal.SIGINT, signal.SIGINT))


def test_afterwards_signals_do_what_they_did_before() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    asyncio.run(requests_after(signal.SIGTERM))

    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(requests_after(signal.SIGHUP, signal.SIGTERM)) == [False]
    finally:
        signal.signal(signal.SIGHUP, former)


def test_in_another_thread_nothing_changes() -> None:
    handlers = []

    async def scenario() -> None:
        with stopping_on_signals(lambda *, at_once: None):
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: asyncio.run(scenario()))
    thread.start()
    thread.join(10)

    assert handlers == [before]


def start(answers: str, tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    started = subprocess.Popen(
        [sys.executable, str(script), answers], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "started\n"
    return started


def test_ctrl_c_lets_what_is_in_flight_finish_and_ends_the_run(tmp_path: Path) -> None:
    with start("once stopped", tmp_path) as run:
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=30)

    assert out.splitlines()[-1] == "finished 2, interrupted"
    assert "2 in flight get 10 s" in err
    assert run.returncode == 0


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with start("never", tmp_path) as run:
        run.send_signal(signal.SIGINT)
        assert run.stderr is not None
        assert "Stopping" in run.stderr.readline()
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=9)

    assert "finished 0, interrupted" in out
