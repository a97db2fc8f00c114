"""Every command in the README of every benchmark, typed in an empty folder; eight rows are enough."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.benchmarks import BENCHMARKS_DIR
from tests.readmes import commands_in, modules, play

Rows = list[dict[str, Any]]


@pytest.mark.parametrize("name", modules("benchmarks"))
def test_every_command_of_a_readme_runs(
    name: str,
    tmp_path: Path,
    hub_with_benchmarks: Any,
    published: dict[str, Rows],
    as_file: Callable[[str, Rows], bytes],
) -> None:
    readme = BENCHMARKS_DIR / name / "README.md"
    commands = commands_in(readme.read_text())
    assert {"ng_prepare_benchmark", "ng_e2e_collect_rollouts"} <= {command for command, *_ in commands}
    for source in re.findall(r"\+source=(\S+)", readme.read_text()):
        (tmp_path / source).parent.mkdir(exist_ok=True)
        (tmp_path / source).write_bytes(as_file(source, published[name]))

    rollouts = play(readme, tmp_path, {}, "+limit=8")[f"results/{name}.jsonl"]

    assert rollouts
    assert {rollout["reward"] for rollout in rollouts} <= {0.0, 1.0}
