import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_gym.cli.config import safe_yaml
from nemo_gym.errors import ConfigInterpolationError

Script = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = """
policy_api_key: top-secret
policy_model_name: m
place: https://user:${word}@host/${policy_model_name}
word: hunter2
max_output_tokens: 7
model:
  responses_api_models:
    some_model:
      entrypoint: app.py
      openai_api_key: ${policy_api_key}
      note: the key is ${policy_api_key}
      model: ${policy_model_name}
"""


def test_the_config_is_printed_resolved_complete_and_without_its_secrets(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    done = script("ng_dump_config", "+config_paths=[mine.yaml]", "+policy_model_name=other", "+head_server.port=12345")
    assert (done.returncode, done.stderr) == (0, "")
    assert "top-secret" not in done.stdout
    assert "hunter2@" not in done.stdout
    shown = yaml.safe_load(done.stdout)
    block = shown["model"]["responses_api_models"]["some_model"]
    assert (block["openai_api_key"], block["note"], block["model"]) == ("****", "the key is ****", "other")
    assert shown["place"] == "https://user:****@host/other"
    assert shown["max_output_tokens"] == 7
    assert shown["head_server"] == {"host": "127.0.0.1", "port": 12345}
    assert block["port"] > 0


def test_a_launchers_secrets_are_masked_too(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", '{"policy_api_key": "top-secret"}')
    assert script("ng_dump_config").stdout == "policy_api_key: '****'\n"


def test_what_cannot_be_resolved_is_a_mistake_of_the_user(script: Script, tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("a: ${nowhere}\n")
    done = script("ng_dump_config")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_resolved_in_a_launchers_config_is_named() -> None:
    with pytest.raises(ConfigInterpolationError, match=r"'nowhere' is not set, but outer\.a"):
        safe_yaml(OmegaConf.create({"outer": {"a": "${nowhere}"}}))
