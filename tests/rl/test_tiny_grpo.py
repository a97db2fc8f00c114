"""The programs of docs/training.md do what the page says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

pytest.importorskip("torch", reason="the policy is a torch module: install the extra `rl` (make test-rl)")

CLEARLY_ABOVE_CHANCE = 0.6
"""One answer in ten is right by chance. With twelve other seeds the accuracy after training was between 0.79 and 1."""


@pytest.mark.parametrize("path", ["native", "servers"])
def test_the_policy_learns_sums_it_has_never_seen(path: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}
    done = subprocess.run(
        [sys.executable, PARENT_DIR / "docs" / "examples" / "tiny_grpo.py", path],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    accuracy = json.loads(done.stdout.splitlines()[-1])
    assert accuracy["before"] < 0.3
    assert accuracy["after"] > CLEARLY_ABOVE_CHANCE


def test_the_program_that_shows_a_group_runs_as_it_stands(tmp_path: Path) -> None:
    page = (PARENT_DIR / "docs" / "training.md").read_text()
    (program,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "asyncio.run(" in block)
    (tmp_path / "program.py").write_text(program)

    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(\d tensor\(\[\d+\]\) tensor\(\[-2.3026\]\) [01].0 \S+\n){4}", done.stdout), done.stdout
