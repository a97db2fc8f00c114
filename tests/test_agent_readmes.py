"""The commands in the READMEs of agents, word for word, in a folder that has nothing of ours in it."""

from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR
from tests.ports import free_port
from tests.readmes import modules, play

AGENTS = "responses_api_agents"


@pytest.mark.parametrize("agent", modules(AGENTS))
def test_every_command_works_and_the_examples_are_all_right(agent: str, tmp_path: Path) -> None:
    replaced = {"8123": str(free_port())} if agent == "remote_agent" else {}

    collected = play(PARENT_DIR / AGENTS / agent / "README.md", tmp_path, replaced)

    assert [[rollout["reward"] for rollout in rollouts] for rollouts in collected.values()] == [[1.0] * 5]
