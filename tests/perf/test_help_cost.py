"""A help page costs little more than the library it is described with: at most 3 x `import pydantic`."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.cli.registry import installed_scripts

BUDGET = 3.0
ROUNDS = 10


def test_a_help_page_costs_at_most_three_imports_of_pydantic(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(sys.executable).parent
    commands = {"import pydantic": [sys.executable, "-c", "import pydantic"]}
    commands |= {
        f"{script} --help": [str(folder / script), "--help"]
        for script in installed_scripts()
        if script.startswith("ng_")
    }
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(ROUNDS):  # interleaved, so that a busy moment of the machine hits all alike
        for name, command in commands.items():
            best[name] = min(best[name], cpu_seconds(command))
    base = best["import pydantic"]
    with capsys.disabled():
        for name, cost in best.items():
            sys.stdout.write(f"\n{name:<24}{cost * 1000:7.0f} ms  {cost / base:5.2f} x")
    assert max(best.values()) <= BUDGET * base


def cpu_seconds(command: list[str]) -> float:
    """Processor time, which unlike the clock does not count what else the machine is doing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
