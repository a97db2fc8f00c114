"""The tutorial, word for word: its files are written and its commands typed, in its order, in an empty folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

TUTORIAL = PARENT_DIR / "docs" / "first-environment.md"
_BLOCK = re.compile(r"^```(bash|python|yaml)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def type_in(commands: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.usefixtures("bare_pytest")
def test_a_newcomer_can_follow_the_tutorial(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("head_server:\n  port: 0\n")  # tests run side by side
    printed = ""
    for kind, name, text in _BLOCK.findall(TUTORIAL.read_text(encoding="utf-8")):
        if kind == "bash":
            printed += type_in(text, tmp_path)
        else:
            assert name, text
            (tmp_path / name).write_text(text)

    assert printed.count(" passed") == 3
    assert "The example data of resources_servers/word_count is complete." in printed
    rollouts = [json.loads(line) for line in (tmp_path / "results/word_count.jsonl").read_text().splitlines()]
    assert len(rollouts) == 100
    assert 0.6 < sum(rollout["reward"] for rollout in rollouts) / 100 < 0.9
    interval = re.search(r"mean/reward +\S+ +\[(\S+), (\S+)\] +100", printed)
    assert interval is not None
    assert float(interval[1]) < 0.75 < float(interval[2])
    assert re.search(
        r"mean/words_found|words_found", (tmp_path / "results/word_count_aggregate_metrics.json").read_text()
    )
