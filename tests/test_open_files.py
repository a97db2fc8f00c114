"""The open-file limit, in processes of their own so that nothing else is affected."""

import subprocess
import sys

PROGRAM = """
import resource, sys
from nemo_gym.open_files import raise_open_file_limit

resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
raise_open_file_limit(int(sys.argv[2]))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def soft_limit_after(hard: int, target: int) -> int:
    return int(subprocess.check_output([sys.executable, "-c", PROGRAM, str(hard), str(target)], text=True))


def test_the_limit_is_raised_to_what_is_wanted() -> None:
    assert soft_limit_after(hard=4096, target=1024) == 1024


def test_the_systems_limit_is_as_far_as_it_goes() -> None:
    assert soft_limit_after(hard=2048, target=65_535) == 2048


def test_a_limit_that_is_high_enough_stays() -> None:
    assert soft_limit_after(hard=4096, target=100) == 256
