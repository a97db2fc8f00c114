"""The event loop that work runs on, work that is done for several at once, and the limit on open files."""

import asyncio
import subprocess
import sys

import pytest

from nemo_gym import runtime

WITHOUT_UVLOOP = """
import asyncio, sys
sys.modules["uvloop"] = None
from nemo_gym import runtime

async def work():
    return type(asyncio.get_running_loop()).__module__

print(runtime.run(work()))
"""


async def module_of_the_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_used_where_it_is_installed() -> None:
    assert runtime.run(module_of_the_loop()).startswith("uvloop")


def test_without_uvloop_pythons_own_loop_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_UVLOOP], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("asyncio")


RAISE_LIMIT = """
import resource, sys
from nemo_gym.runtime import raise_open_file_limit

resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
raise_open_file_limit(int(sys.argv[2]))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def soft_limit_after(hard: int, target: int) -> int:
    return int(subprocess.check_output([sys.executable, "-c", RAISE_LIMIT, str(hard), str(target)], text=True))


def test_the_limit_is_raised_to_what_is_wanted() -> None:
    assert soft_limit_after(hard=4096, target=1024) == 1024


def test_the_systems_limit_is_as_far_as_it_goes() -> None:
    assert soft_limit_after(hard=2048, target=65_535) == 2048


def test_a_limit_that_is_high_enough_stays() -> None:
    assert soft_limit_after(hard=4096, target=100) == 256


def test_what_several_wait_for_is_done_at_once_in_their_order_and_not_for_who_has_gone() -> None:
    told: list[str] = []

    def each(name: str) -> None:
        told.append(name)
        if name == "bad":
            raise ValueError(name)

    together = runtime.Together(each, lambda: told.append("."))

    async def caller(name: str) -> str:
        with together:
            await asyncio.sleep(0)
            await together.done(name)
        return name

    async def all_of_them() -> list[str | BaseException]:
        tasks = [asyncio.create_task(caller(name)) for name in ("a", "gone", "bad", "b")]
        with together:  # one more, which never waits
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            tasks[1].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    first, gone, bad, last = runtime.run(all_of_them())

    assert [first, last] == ["a", "b"]
    assert isinstance(gone, asyncio.CancelledError)
    assert isinstance(bad, ValueError)
    assert told == ["a", "bad", "b", "."]
    assert runtime.run(caller("alone")) == "alone"
    assert told[-2:] == ["alone", "."]


def test_when_the_end_of_it_fails_all_who_wait_are_told() -> None:
    def finish() -> None:
        raise OSError("no")

    together = runtime.Together[int](lambda item: None, finish)

    async def caller(item: int) -> None:
        with together:
            await asyncio.sleep(0)
            await together.done(item)

    async def two() -> list[BaseException | None]:
        return list(await asyncio.gather(caller(1), caller(2), return_exceptions=True))

    assert [type(error) for error in runtime.run(two())] == [OSError, OSError]
    with pytest.raises(OSError, match="no"):
        runtime.run(caller(3))
