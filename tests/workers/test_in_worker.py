"""Functions of authors, called in other processes."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.workers import WorkerFunctionError, WorkerKilledError, WorkerTimeoutError, in_worker


class OddError(ValueError):
    """Cannot be made again from what pickle keeps of it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def pid_and_sum(*numbers: int, start: int = 0) -> tuple[int, int]:
    return os.getpid(), sum(numbers, start)


def fail(kind: str) -> None:
    if kind == "odd":
        raise OddError("cannot", "be copied")
    raise KeyError(kind)


def spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def returns_a_lambda() -> Any:
    return lambda: None


async def coroutine() -> None:
    """No function for a worker."""


def test_a_function_is_called_in_another_process_that_stays() -> None:
    first, total = asyncio.run(in_worker(pid_and_sum, 1, 2))
    second, more = asyncio.run(in_worker(functools.partial(pid_and_sum, start=10), 1, 2))

    assert (total, more) == (3, 13)
    assert first == second != os.getpid()


def test_what_it_raises_is_raised_here_and_says_where() -> None:
    with pytest.raises(KeyError, match="x") as caught:
        asyncio.run(in_worker(fail, "x"))
    assert "in fail" in caught.value.__notes__[0]

    with pytest.raises(WorkerFunctionError, match="OddError: cannot be copied"):
        asyncio.run(in_worker(fail, "odd"))


@pytest.mark.parametrize(
    ("function", "words"),
    [(lambda: 1, "at the top of a module"), (coroutine, "is a coroutine function"), (returns_a_lambda, "lambda")],
    ids=["lambda", "coroutine", "result"],
)
def test_what_cannot_travel_is_refused(function: Any, words: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=words):
        asyncio.run(in_worker(function))


def test_one_that_takes_too_long_is_ended_and_waiting_is_not_working() -> None:
    async def use() -> list[Any]:
        # Four times the limit, one after the other on two processors: each has the whole limit to itself.
        return await asyncio.gather(
            *(in_worker(spin, 0.3, timeout_s=1.0) for _ in range(8)),
            in_worker(spin, 60.0, timeout_s=0.3),
            return_exceptions=True,
        )

    *done, endless = asyncio.run(use())
    assert done == [None] * 8
    assert isinstance(endless, WorkerTimeoutError)


def test_one_whose_processes_are_killed_fails_alone() -> None:
    async def use() -> list[Any]:
        return await asyncio.gather(
            in_worker(kill_itself), *(in_worker(pid_and_sum, 1) for _ in range(5)), return_exceptions=True
        )

    killed, *others = asyncio.run(use())
    assert isinstance(killed, WorkerKilledError)
    assert [total for _, total in others] == [1] * 5


def test_a_function_of_the_main_module_is_found(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text("""
import asyncio
from dataclasses import dataclass
import helper_beside
from nemo_gym.workers import in_worker

@dataclass
class Verdict:
    reward: float

class Mine(Exception):
    pass

def score(text):
    if not text:
        raise Mine("nothing said")
    return Verdict(helper_beside.worth(text))

async def main():
    print(await in_worker(score, "abc") == Verdict(3.0))
    try:
        await in_worker(score, "")
    except Mine as error:
        print(error)

if __name__ == "__main__":
    asyncio.run(main())
""")
    (tmp_path / "helper_beside.py").write_text("def worth(text):\n    return float(len(text))\n")

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\nnothing said\n"
