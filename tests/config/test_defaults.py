"""Settings nobody gave have a value; settings somebody gave keep theirs."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.instances import fill_defaults
from nemo_gym.errors import ConfigError
from nemo_gym.paths import CACHE_DIR, RESULTS_DIR, WORKING_DIR


def filled(**settings: Any) -> DictConfig:
    config = OmegaConf.create(settings)
    fill_defaults(config)
    return config


def test_an_empty_config_gets_exactly_these() -> None:
    config = filled()

    pins = config.pop("head_server_deps")
    assert config == {
        "use_absolute_ip": False,
        "skip_venv_if_present": False,
        "dry_run": False,
        "allow_openai_version_skew": False,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "model_endpoint_readiness_timeout_seconds": 600,
        "uv_venv_dir": str(WORKING_DIR),
        "results_dir": str(RESULTS_DIR),
        "cache_dir": str(CACHE_DIR),
        "uv_cache_dir": str(CACHE_DIR / "uv"),
    }
    assert f"openai=={version('openai')}" in pins


def test_what_the_user_set_stays() -> None:
    given = {
        "use_absolute_ip": True,
        "skip_venv_if_present": True,
        "dry_run": True,
        "allow_openai_version_skew": True,
        "python_version": "3.12",
        "model_endpoint_readiness_timeout_seconds": 0,
        "uv_venv_dir": "venvs",
        "uv_cache_dir": "uv",
        "results_dir": "/results",
        "cache_dir": "/cache",
        "head_server_deps": [],
    }

    assert filled(**given) == given


def test_null_is_as_good_as_unset() -> None:
    unset = filled()

    assert filled(**dict.fromkeys(unset)) == unset


def test_folders_are_absolute_and_the_home_folder_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    config = filled(results_dir="out", cache_dir="~/cache")

    assert config.results_dir == str(tmp_path / "out")
    assert config.cache_dir == "/home/me/cache"
    assert config.uv_cache_dir == "/home/me/cache/uv"


@pytest.mark.parametrize("value", ["", "  ", 5, ["a"]])
def test_a_folder_must_be_a_path(value: object) -> None:
    with pytest.raises(ConfigError, match=r"results_dir is .*path of a folder"):
        filled(results_dir=value)


@pytest.mark.parametrize(
    ("text", "value"), [("no", False), ("off", False), ("False", False), ("0", False), ("yes", True), (1, True)]
)
def test_switches_understand_words(text: object, value: bool) -> None:
    assert filled(dry_run=text).dry_run is value


@pytest.mark.parametrize("value", ["maybe", "", 2, [True]])
def test_a_switch_is_either_on_or_off(value: object) -> None:
    with pytest.raises(ConfigError, match=r"dry_run is .*either true or false"):
        filled(dry_run=value)
