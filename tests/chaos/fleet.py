"""The servers under attack: what `ng_run` starts, one by one addressable, on ports that survive a restart."""

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from nemo_gym.paths import PARENT_DIR
from tests.chaos.processes import PATIENCE_S, Command, HungError, program

ENVIRONMENT = "resources_servers/example_session_state_mgmt"
AGENT = "example_session_state_mgmt_simple_agent"
RESOURCES = "example_session_state_mgmt_resources_server"
MODEL = "policy_model"
KIND_OF = {
    AGENT: ("responses_api_agents", "simple_agent"),
    RESOURCES: ("resources_servers", "example_session_state_mgmt"),
    MODEL: ("responses_api_models", "scripted_model"),
}
PATIENT_CLIENT = {
    "http_retry_first_delay_s": 0.05,
    "http_retry_max_delay_s": 0.5,
    "http_retry_max_elapsed_s": 40.0,
    "http_connect_timeout_s": 5.0,
}


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def right_answers(**more: Any) -> dict[str, Any]:
    """The script of a model that solves every row of the environment: any other reward is a fault's doing."""
    script: dict[str, Any] = yaml.safe_load((PARENT_DIR / ENVIRONMENT / "scripts" / "right_answers.yaml").read_text())
    return {**script, "latency_s": {"uniform": [0.02, 0.12]}, **more}


def counter_config(*, alone: bool = False, script: dict[str, Any] | None = None) -> dict[str, Any]:
    """The counter environment with its agent and a scripted model, each in its own process if `alone`."""
    config: dict[str, Any] = {
        "config_paths": [f"{ENVIRONMENT}/configs/example_session_state_mgmt.yaml"],
        **PATIENT_CLIENT,
    }
    for name, (server_type, implementation) in KIND_OF.items():
        block: dict[str, Any] = {"host": "127.0.0.1", "port": free_port()}
        if alone:
            block["isolation"] = "process"
        if name == MODEL:
            block |= {"entrypoint": "app.py", "script": script or right_answers()}
        config[name] = {server_type: {implementation: block}}
    return config


class Fleet:
    """Servers that were started together."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        *options: str,
        is_watched: bool = True,
        env: dict[str, str] | None = None,
    ) -> None:
        """`is_watched` is what `ng_run` does: it notices servers that end. Otherwise nobody does."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "servers.yaml").write_text(yaml.safe_dump(config))
        self.folder = folder
        self.head_port = free_port()
        self._options = ["+config_paths=[servers.yaml]", f"+head_server.port={self.head_port}", *options]
        self._is_watched = is_watched
        self._env = env
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start them, again if need be: ports of killed servers may take a moment to be free."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            self._starts += 1
            first = [program("ng_run")] if self._is_watched else [sys.executable, "-m", "tests.chaos.unwatched"]
            env = {"PYTHONPATH": str(PARENT_DIR), **(self._env or {})}
            self.launcher = Command([*first, *self._options], self.folder, f"run{self._starts}", env=env)
            if self.launcher.wait_until(lambda: "servers ready!" in self.launcher.stdout_path.read_text()):
                return
            if time.monotonic() > deadline_s:
                raise HungError(f"the servers do not start:\n{self.launcher.printed[-3000:]}")

    def pids(self) -> dict[str, int]:
        """The process of every server, as the head server tells them."""
        return self.pids_at(self.head_port)

    @staticmethod
    def pids_at(head_port: int) -> dict[str, int]:
        """The same of any head server."""
        with urllib.request.urlopen(f"http://127.0.0.1:{head_port}/server_instances", timeout=10) as answer:
            return {entry["process_name"]: entry["pid"] for entry in json.load(answer)}

    def signal_server(self, name: str, number: signal.Signals) -> int:
        """Signal the process of a server, once it is there if it is being started again; its pid."""
        self.launcher.wait_until(lambda: name in self.pids())
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def stop(self) -> None:
        """End all of them."""
        self.launcher.stop()
