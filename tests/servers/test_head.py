"""The head server: what it tells, what it hides, and who holds its port."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import nemo_gym.global_config
from nemo_gym.config_types import BaseServerConfig, ConfigError
from nemo_gym.global_config import find_open_port
from nemo_gym.server_utils import HeadServer, ServerClient


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, HeadServer]]:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({}))
    port = find_open_port()
    config = {
        "head_server": {"host": "127.0.0.1", "port": port},
        "policy_api_key": "sk-very-secret",
        "model_url": "${base}/v1",
        "base": "http://me:hunter2@host",
        "run_id": "a-run",
        "limits": {"max_output_tokens": 7},
    }
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create(config))
    server, thread, instance = HeadServer.run_webserver()
    yield f"http://127.0.0.1:{port}", instance
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def test_the_config_is_a_json_string_of_yaml_with_secrets_masked(head: tuple[str, HeadServer]) -> None:
    text = get(f"{head[0]}/global_config_dict_yaml")

    assert isinstance(text, str)
    shown = yaml.safe_load(text)
    assert shown["policy_api_key"] == "****"
    assert shown["base"] == "http://me:****@host"
    assert shown["model_url"] == "${base}/v1"
    assert shown["limits"] == {"max_output_tokens": 7}


def test_instances_are_published(head: tuple[str, HeadServer]) -> None:
    assert get(f"{head[0]}/server_instances") == []
    head[1].set_server_instances([{"process_name": "x", "port": 3}])
    assert get(f"{head[0]}/server_instances") == [{"process_name": "x", "port": 3}]


def test_who_is_being_started_is_published(head: tuple[str, HeadServer]) -> None:
    assert get(f"{head[0]}/server_states") == {"starting": [], "edition": 0}
    head[1].set_starting(["x"])
    head[1].set_server_instances([])
    assert get(f"{head[0]}/server_states") == {"starting": ["x"], "edition": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell less about processes")
def test_what_processes_do_is_told_on_request(head: tuple[str, HeadServer]) -> None:
    burning = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with (
        subprocess.Popen([sys.executable, "-c", burning], start_new_session=True) as busy,
        subprocess.Popen(["sleep", "600"], start_new_session=True) as idle,
    ):
        pids = {"busy": busy.pid, "idle": idle.pid, "gone": 2**22 + 1, "none": None}
        head[1].set_server_instances([{"process_name": name, "pid": pid} for name, pid in pids.items()])
        try:
            idle.send_signal(signal.SIGSTOP)
            deadline_s = time.monotonic() + 60
            first = later = get(f"{head[0]}/server_states?cpu=true")["processes"]
            while later["busy"] == first["busy"] or not later["idle"]["is_stopped"]:
                assert time.monotonic() < deadline_s
                later = get(f"{head[0]}/server_states?cpu=true")["processes"]
        finally:
            os.killpg(busy.pid, signal.SIGKILL)
            idle.kill()

    assert set(later) == {"busy", "idle"}
    assert later["busy"]["cpu_s"] > first["busy"]["cpu_s"]
    assert later["idle"]["cpu_s"] == first["idle"]["cpu_s"]
    assert not later["busy"]["is_stopped"]


def test_health_says_which_run_it_is(head: tuple[str, HeadServer]) -> None:
    health = get(f"{head[0]}/health")

    assert (health["status"], health["run_id"], health["pid"]) == ("ok", "a-run", os.getpid())
    assert get(f"{head[0]}/") == {"status": "ok"}


def test_a_client_learns_the_config_from_the_head(head: tuple[str, HeadServer]) -> None:
    host, port = head[0].removeprefix("http://").split(":")
    client = ServerClient.load_from_global_config(BaseServerConfig(host=host, port=int(port)))

    assert client.global_config_dict.run_id == "a-run"


def test_a_busy_port_is_reported_at_once_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = OmegaConf.create({"head_server": {"host": "127.0.0.1", "port": port}})
        monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", config)
        expected = rf"port {port} for the head server.*process {os.getpid()}.*head_server.port"
        with pytest.raises(ConfigError, match=expected):
            HeadServer.run_webserver()
