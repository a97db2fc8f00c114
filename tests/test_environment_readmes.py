"""The commands in the READMEs of environments, word for word, in a folder that has nothing of ours in it."""

from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR
from tests.readmes import modules, play

ENVIRONMENTS = "resources_servers"


@pytest.mark.parametrize("module", modules(ENVIRONMENTS))
def test_every_command_works_and_the_examples_are_all_right(module: str, tmp_path: Path) -> None:
    collected = play(PARENT_DIR / ENVIRONMENTS / module / "README.md", tmp_path)

    assert [rollout["reward"] for rollout in collected[f"results/{module}.jsonl"]] == [1.0] * 5
