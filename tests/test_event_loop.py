"""Work runs on uvloop where it is installed, and on Python's own loop where it is not."""

import asyncio
import subprocess
import sys

from nemo_gym import event_loop

WITHOUT_UVLOOP = """
import asyncio, sys
sys.modules["uvloop"] = None
from nemo_gym import event_loop

async def work():
    return type(asyncio.get_running_loop()).__module__

print(event_loop.run(work()))
"""


async def module_of_the_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_used_where_it_is_installed() -> None:
    assert event_loop.run(module_of_the_loop()).startswith("uvloop")


def test_without_uvloop_pythons_own_loop_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_UVLOOP], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("asyncio")
