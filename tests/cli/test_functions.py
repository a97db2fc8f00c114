"""The commands as functions, as programs written for the original call them."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import nemo_gym.cli
from nemo_gym import global_config
from nemo_gym.config_types import BaseNeMoGymCLIConfig
from nemo_gym.paths import PARENT_DIR

FUNCTIONS = (
    "run e2e_rollout_collection test test_all dev_test init_resources_server dump_config display_help status pip_list "
    "version"
)
ELSEWHERE = """
    nemo_gym.benchmarks:prepare_benchmark nemo_gym.prompt:materialize_prompts_cli nemo_gym.train_data_utils:prepare_data
    nemo_gym.reward_profile:reward_profile nemo_gym.dataset_orchestrator:upload_jsonl_dataset_to_hf_cli
    nemo_gym.dataset_orchestrator:download_jsonl_dataset_from_hf_cli
    nemo_gym.dataset_orchestrator:delete_jsonl_dataset_from_gitlab_cli
    nemo_gym.dataset_orchestrator:upload_jsonl_dataset_to_hf_and_delete_gitlab_cli
    nemo_gym.rollout_collection:collect_rollouts nemo_gym.rollout_collection:aggregate_rollouts
"""


def every_function() -> list[Any]:
    from importlib import import_module

    elsewhere = [name.split(":") for name in ELSEWHERE.split()]
    named = [("nemo_gym.cli", name) for name in FUNCTIONS.split()]
    return [pytest.param(getattr(import_module(module), name), id=name) for module, name in [*named, *elsewhere]]


@pytest.mark.parametrize("function", every_function())
def test_every_function_shows_its_help_page_when_the_process_asks_for_it(
    function: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({"h": True}))
    monkeypatch.setattr(sys, "argv", ["program"])

    with pytest.raises(SystemExit) as ended:
        function()

    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith("Usage: ")


def test_functions_do_what_their_scripts_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    monkeypatch.setattr(sys, "argv", ["program", "+json=true"])
    nemo_gym.cli.version()
    assert json.loads(capsys.readouterr().out)["installation_path"] == str(PARENT_DIR)
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)  # what one command has read, the next would use
    monkeypatch.setattr(sys, "argv", ["program", "+no_such_option=1"])
    with pytest.raises(SystemExit) as ended:
        nemo_gym.cli.version()
    assert ended.value.code == 2


def test_reinstall_installs_the_checkout_with_its_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    with pytest.raises(SystemExit) as ended:
        nemo_gym.cli.reinstall()

    assert ended.value.code == 7
    assert capfd.readouterr().out.split() == ["pip", "install", "--python", sys.executable, "-e", f"{PARENT_DIR}[dev]"]


def test_arguments_have_the_fields_of_the_original() -> None:
    tests = nemo_gym.cli.TestConfig(entrypoint="resources_servers/mine", should_validate_data=True)
    assert isinstance(tests, nemo_gym.cli.RunConfig)
    assert tests.dir_path == Path("resources_servers/mine")
    assert issubclass(nemo_gym.cli.PipListConfig, nemo_gym.cli.RunConfig)
    assert nemo_gym.cli.TestAllConfig().delete_venvs_after_each_test is False
    assert nemo_gym.cli.VersionConfig.model_validate({"json": True}).json_format is True


class Mine(BaseNeMoGymCLIConfig):
    """What my program does."""

    number: int
    """How many."""


@pytest.mark.parametrize("asked", [{"help": True}, {"h": True}, OmegaConf.create({"help": "yes"})])
def test_arguments_that_ask_for_help_show_it(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Mine.model_validate(asked)
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith("Displaying help for Mine\n")
    assert all(text in shown for text in ("What my program does.", "number", "How many."))
    with pytest.raises(SystemExit):
        BaseNeMoGymCLIConfig.model_validate({"help": True})
    assert Mine.model_validate({"number": 3, "help": False, "h": None}).number == 3
