"""What the keys of a config say is secret is shown nowhere: not by a command, not by the head server, not in a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from omegaconf import OmegaConf

import nemo_gym.global_config
from nemo_gym.cli.command import command_named
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.servers.head import HeadServer

dump_config = command_named("dump_config")


SECRETS = {
    "tavily_key": "hidden-tavily",
    "subscription_key": "hidden-subscription",
    "key": "hidden-key",
    "hf_token": "hidden-token",
    "db_password": "hidden-password",
    "token_file": "hidden-file",
    "search": {"keys": ["hidden-first", "hidden-second"], "azureKey": "hidden-azure"},
}
SHOWN = {"max_output_tokens": 77, "return_token_id_information": True, "tokenizer": "org/shown"}


def test_ng_dump_config_masks_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", None)
    config = tmp_path / "secrets.yaml"
    config.write_text(OmegaConf.to_yaml(OmegaConf.create({**SECRETS, **SHOWN})))
    monkeypatch.setattr("sys.argv", ["ng_dump_config", f"+config_paths=[{config}]"])

    dump_config()

    assert_masked(OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out)))


def test_the_head_server_masks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create({**SECRETS, **SHOWN})
    monkeypatch.setattr("nemo_gym.server_utils.get_global_config_dict", lambda: config)
    head = HeadServer(config=BaseServerConfig(host="127.0.0.1", port=1))
    text = json.loads(TestClient(head.setup_webserver()).get("/global_config_dict_yaml").text)

    assert_masked(OmegaConf.to_container(OmegaConf.create(text)))


def test_a_config_is_masked_as_programs_ask_for_it() -> None:
    config = OmegaConf.create({**SECRETS, **SHOWN})

    GlobalConfigDictParser()._recursively_hide_secrets(config)

    assert_masked(OmegaConf.to_container(config))


def assert_masked(shown: Any) -> None:
    assert {name: shown[name] for name in SHOWN} == SHOWN
    assert shown.pop("search") == {"keys": ["****", "****"], "azureKey": "****"}
    assert {name for name, value in shown.items() if value == "****"} >= set(SECRETS) - {"search"}
    assert "hidden" not in str(shown)
