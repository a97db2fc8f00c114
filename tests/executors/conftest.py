"""An environment, its rows and a model that takes its time, in an empty folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
AGENT = "example_single_tool_call_simple_agent"
TASKS = 8


def write_environment(folder: Path, latency_s: float = 0.0, model: dict[str, Any] | None = None) -> None:
    rows = [{"responses_create_params": {"input": [{"role": "user", "content": f"task {n}"}]}} for n in range(TASKS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets = [{"name": "t", "type": "train", "jsonl_fpath": "train.jsonl", "license": "MIT"}]
    config: dict[str, Any] = {
        "config_paths": [ENVIRONMENT],
        AGENT: {"responses_api_agents": {"simple_agent": {"datasets": datasets}}},
        "policy_model": {
            "responses_api_models": model
            or {"scripted_model": {"entrypoint": "app.py", "script": {"latency_s": latency_s}}}
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keys_in(path: Path) -> list[tuple[int, int]]:
    return sorted((line["_ng_task_index"], line["_ng_rollout_index"]) for line in lines_in(path))


def clean_environment() -> dict[str, str]:
    """This process's, without what a launcher or a user has set for the package."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "WANDB", "RAY_"))}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("NEMO_GYM", "WANDB")):
            monkeypatch.delenv(name)
