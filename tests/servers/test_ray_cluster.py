"""Ray by request only: a stand-in for the library shows what it is asked."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import nemo_gym.global_config
from nemo_gym.config_types import ConfigError
from nemo_gym.server_utils import initialize_ray

STAND_IN = """
calls = []
connected = False


def is_initialized():
    return connected


def init(**options):
    global connected
    connected = True
    calls.append(options)


def shutdown():
    calls.append("shutdown")


class Context:
    gcs_address = "127.0.0.1:6379"


def get_runtime_context():
    return Context()
"""


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_a_cluster_is_started_once_and_its_address_recorded(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create({})
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", config)
    initialize_ray()
    initialize_ray()

    assert config.ray_head_node_address == "127.0.0.1:6379"
    assert sys.modules["ray"].calls == [{"ignore_reinit_error": True}]


def test_a_given_cluster_is_connected_to(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create({"ray_head_node_address": "10.0.0.1:6379"})
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", config)
    initialize_ray()

    assert sys.modules["ray"].calls == [{"address": "10.0.0.1:6379", "ignore_reinit_error": True}]


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"\.\[ray\]"):
        initialize_ray()
