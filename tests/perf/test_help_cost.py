"""A help page costs little more than the library it is described with: at most 2.5 x `import pydantic`."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.cli.registry import installed_scripts
from tests.perf.side_by_side.estimates import Target, hold

BUDGET = 2.5
ROUNDS = 5


def test_a_help_page_costs_little_more_than_pydantic(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(sys.executable).parent
    commands = {"import pydantic": [sys.executable, "-c", "import pydantic"]}
    commands |= {
        f"{script} --help": [str(folder / script), "--help"]
        for script in installed_scripts()
        if script.startswith("ng_")
    }

    def over_pydantic() -> list[float]:  # in turn, so that a busy moment of the machine hits all alike
        base, *pages = [cpu_seconds(command) for command in commands.values()]
        return [page / base for page in pages]

    with capsys.disabled():
        hold(over_pydantic, *(Target(name, most=BUDGET) for name in list(commands)[1:]), rounds=ROUNDS, more=ROUNDS)


def cpu_seconds(command: list[str]) -> float:
    """Processor time, which unlike the clock does not count what else the machine is doing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
