"""The head server: tells everybody what the run's config is and which servers are up.

It runs in a thread of the launching process. Secrets in the config are masked: whoever asks needs
names and addresses only.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import socket
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf
from pydantic import PrivateAttr

from nemo_gym.config.secrets import mask_tree
from nemo_gym.config_types import BaseServerConfig, ConfigError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.http.client import ServerClient
from nemo_gym.http.settings import process_config, replaceable
from nemo_gym.keys import RUN_ID_KEY_NAME, SERVER_STATES_PATH
from nemo_gym.runtime import listen
from nemo_gym.servers.auth import CallerCheck
from nemo_gym.servers.base import BaseServer
from nemo_gym.servers.gateway import Duties, Gateway
from nemo_gym.servers.run import uvicorn_settings

START_TIMEOUT_S = 30.0


class HeadServer(BaseServer):
    """Serves the config and the list of instances of one run."""

    config: BaseServerConfig  # type: ignore[assignment]
    _server_instances: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _starting: list[str] = PrivateAttr(default_factory=list)
    _edition: int = PrivateAttr(0)

    @classmethod
    def run_webserver(cls, held: socket | None = None) -> tuple[uvicorn.Server, threading.Thread, "HeadServer"]:
        """Start the head server of the process's config in a thread and return once it answers.

        `held` is its port, if that has been taken already.
        """
        head = cls(config=ServerClient.load_head_server_config())
        held = held or listen(
            head.config.host, head.config.port, "the head server", "+head_server.port=<port> (0: any free one)"
        )
        server = uvicorn.Server(uvicorn.Config(head.setup_webserver(), **uvicorn_settings()))
        thread = threading.Thread(target=server.run, args=([held],), name="head server", daemon=True)
        thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError(f"the head server did not start on {head.config.host}:{head.config.port}")
            time.sleep(0.005)
        return server, thread, head

    def setup_webserver(self) -> FastAPI:
        """The app with the head server's routes."""
        app = FastAPI(title="head server")
        app.get("/global_config_dict_yaml")(self.global_config_dict_yaml)
        app.get("/server_instances")(self.get_server_instances)
        app.get(SERVER_STATES_PATH)(self.server_states)
        app.get("/health")(self.health)
        app.get("/", include_in_schema=False)(self.alive)
        callers = CallerCheck(process_config(), "the head server", described_by=app)
        app.add_middleware(Gateway, duties=Duties("the head server", callers=callers))
        return app

    async def global_config_dict_yaml(self) -> str:
        """The run's config as YAML, interpolations unresolved, secrets masked."""
        config = replaceable("get_global_config_dict", get_global_config_dict)()
        return OmegaConf.to_yaml(OmegaConf.create(mask_tree(OmegaConf.to_container(config, resolve=False))))

    async def get_server_instances(self) -> list[dict[str, Any]]:
        """Every running server."""
        return self._server_instances

    def set_server_instances(self, instances: list[dict[str, Any]]) -> None:
        """Publish the running servers."""
        self._server_instances = instances
        self._edition += 1

    def set_starting(self, names: Sequence[str]) -> None:
        """Publish which servers are being started, for the first time or again."""
        self._starting = list(names)

    async def server_states(self, cpu: bool = False) -> dict[str, Any]:
        """Which servers are being started, and how often the list of the others has changed.

        With `cpu` also what the processes of the others do.
        """
        states: dict[str, Any] = {"starting": self._starting, "edition": self._edition}
        if cpu:
            states["processes"] = self._processes()
        return states

    def _processes(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for instance in self._server_instances:
            name, activity = instance.get("process_name"), activity_of(instance.get("pid"))
            if name is not None and activity is not None:
                so_far = found.setdefault(name, {"cpu_s": 0.0, "is_stopped": False})
                so_far["cpu_s"] += activity.cpu_s
                so_far["is_stopped"] |= activity.is_stopped
        return found

    async def health(self) -> dict[str, Any]:
        """That the head is up, and which run it belongs to."""
        config = replaceable("get_global_config_dict", get_global_config_dict)()
        return {"status": "ok", "run_id": config.get(RUN_ID_KEY_NAME), "folder": str(Path.cwd()), "pid": os.getpid()}

    async def alive(self) -> dict[str, str]:
        """That the head is up."""
        return {"status": "ok"}


class Activity(NamedTuple):
    """What a process does, with all that it started."""

    cpu_s: float
    """CPU time so far."""
    is_stopped: bool
    """By a signal, or a debugger."""


def activity_of(pid: int | None) -> Activity | None:
    """What the process `pid` of this machine does; None where nobody can tell (it is gone, or this is not Linux)."""
    if pid is None or (own := _stat(pid)) is None:
        return None
    everybody = [own, *(stat for child in _descendants(pid) if (stat := _stat(child)) is not None)]
    ticks = sum(int(number) for stat in everybody for number in stat[11:15])  # own and of children that have ended
    return Activity(ticks / os.sysconf("SC_CLK_TCK"), own[0] in "Tt")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the third, the state, on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _descendants(pid: int) -> Iterator[int]:
    to_visit = [pid]
    while to_visit:
        try:
            lists = [each.read_text() for each in Path(f"/proc/{to_visit.pop()}/task").glob("*/children")]
        except OSError:
            continue
        children = [int(child) for text in lists for child in text.split()]
        yield from children
        to_visit += children
