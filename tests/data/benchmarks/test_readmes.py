"""Every command in the README of every benchmark, typed in an empty folder.

Only two things are added to a command that collects: a port, since tests run side by side, and a limit.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.benchmarks import BENCHMARKS_DIR
from nemo_gym.cli.commands.prepare_benchmark import main as prepare_benchmark

NAMES = sorted(path.parent.name for path in BENCHMARKS_DIR.glob("*/README.md"))
Rows = list[dict[str, Any]]


def commands_in(readme: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", readme.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name(program)
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_readme_runs(
    name: str,
    tmp_path: Path,
    hub_with_benchmarks: Any,
    published: dict[str, Rows],
    as_file: Callable[[str, Rows], bytes],
) -> None:
    commands = commands_in(BENCHMARKS_DIR / name / "README.md")
    assert any(command.startswith("ng_prepare_benchmark") for command in commands)
    assert any(command.startswith("ng_e2e_collect_rollouts") for command in commands)
    for source in re.findall(r"\+source=(\S+)", " ".join(commands)):
        (tmp_path / source).parent.mkdir(exist_ok=True)
        (tmp_path / source).write_bytes(as_file(source, published[name]))

    for command in commands:
        program, *arguments = shlex.split(command)
        if program == "ng_prepare_benchmark":
            prepare_benchmark.run(arguments)
        else:
            done = run(program, *arguments, "+head_server.port=0", "+limit=8")
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    rollouts = [json.loads(line) for line in (tmp_path / f"results/{name}.jsonl").read_text().splitlines()]
    assert rollouts
    assert {rollout["reward"] for rollout in rollouts} <= {0.0, 1.0}
