"""The event loop that work runs on, and the limit on open files."""

import asyncio
import subprocess
import sys

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
