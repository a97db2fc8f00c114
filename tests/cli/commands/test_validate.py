import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Script = Callable[..., subprocess.CompletedProcess[str]]

AGENT = """
my_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: my_tools}
      model_server: {type: responses_api_models, name: policy_model}
"""
TOOLS = """
my_tools:
  resources_servers:
    tools: {entrypoint: app.py, domain: other}
"""
MODEL = """
policy_model:
  responses_api_models:
    real_model: {entrypoint: app.py}
"""


def test_a_sound_config_is_said_to_be_valid_with_its_servers(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(AGENT + TOOLS)
    done = script("ng_validate", "+config_paths=[mine.yaml]")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Config is valid."
    assert sorted(line.split(maxsplit=2) for line in lines[1:]) == [
        ["my_agent", "responses_api_agents/simple_agent"],
        ["my_tools", "resources_servers/tools"],
        ["policy_model", "responses_api_models/dummy_model", "(stand-in: no model is configured)"],
    ]


def test_a_model_of_ones_own_takes_the_place_of_the_stand_in(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(AGENT + TOOLS + MODEL)
    assert "stand-in" not in script("ng_validate", "+config_paths=[mine.yaml]").stdout


def test_every_problem_is_listed_at_once_and_numbered(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(AGENT + TOOLS.replace("my_tools:", "other_tools:"))
    done = script("ng_validate", "+config_paths=[mine.yaml]", "+num_repaets=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: 2 problems in the configuration:\n1. unknown option 'num_repaets'")
    assert "\n2. Could not find 'my_tools'" in done.stderr


def test_a_single_problem_stands_alone(script: Script) -> None:
    done = script("ng_validate", "+config_paths=[missing.yaml]")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: config_paths entry 'missing.yaml'")


def test_a_config_without_servers_is_valid_but_nothing_to_start(script: Script) -> None:
    assert script("ng_validate").stdout == (
        "Config is valid.\nIt configures no server, so there is nothing to start.\n"
    )


def test_it_is_the_named_files_that_are_checked_not_what_a_launcher_handed_over(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", "{}")
    (tmp_path / "mine.yaml").write_text(AGENT)
    assert script("ng_validate", "+config_paths=[mine.yaml]").returncode == 2


def test_nothing_is_written(script: Script, tmp_path: Path) -> None:
    script("ng_validate")
    assert list(tmp_path.iterdir()) == []
