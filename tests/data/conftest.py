"""Every test here starts in an empty folder, in a process without a configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nemo_gym.global_config
from nemo_gym.keys import NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME
from nemo_gym.keys import NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME

WriteRows = Callable[..., Path]


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", None)
    monkeypatch.chdir(tmp_path)
    for name in (
        NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
        NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
        NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME,
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write a JSONL file below the current folder: rows as objects, or as the text of a line."""

    def write(name: str, *rows: dict[str, Any] | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


@pytest.fixture
def agent_config() -> Callable[..., dict[str, Any]]:
    """The config of agents, each with the data sets given for it, and a stand-in model."""

    def make(**datasets_of_agent: list[dict[str, Any]]) -> dict[str, Any]:
        agents = {
            agent: {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "datasets": datasets}}}
            for agent, datasets in datasets_of_agent.items()
        }
        return {**agents, "policy_model": {"responses_api_models": {"dummy_model": {"entrypoint": "app.py"}}}}

    return make
