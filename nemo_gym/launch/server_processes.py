"""The processes of a run: hosts with several servers each, and servers alone in theirs.

A unit knows how to start its process and how to learn that its servers are ready: a host tells, one
JSON object per line through a pipe; a server that is alone is asked over HTTP until it answers.
"""

import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from omegaconf import DictConfig

from nemo_gym.config.handover import child_environment
from nemo_gym.http.addresses import Address, probe
from nemo_gym.keys import (
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME,
    NEMO_GYM_PARENT_PID_ENV_VAR_NAME,
    NEMO_GYM_RUN_ID_ENV_VAR_NAME,
    RUN_ID_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
)
from nemo_gym.launch.plan import PlannedServer, root_of
from nemo_gym.launch.process import ChildProcess, CommandLine, ServerOutput
from nemo_gym.launch.requirements import own_root_for_path, running_site_packages, search_path
from nemo_gym.launch.warden import Warden
from nemo_gym.paths import OWN_PACKAGE_FIRST
from nemo_gym.process_inputs import inherited_environment
from nemo_gym.schemas.cli_config import RunConfig

ASK_EVERY_S = 0.05
_ANSWER_TIMEOUT_S = 2.0
_EVENTS_TIMEOUT_S = 1.0
_EXIT_REFUSED, _REFUSAL = 2, "Error: "  # how `servers/run.py` ends when the config is wrong


@dataclass(frozen=True)
class Event:
    """Something that happened to one server of a process."""

    child: ChildProcess
    kind: str
    """`ready`, `declined` (it must have a process of its own), `refused` (its block of the config) or `failed`."""
    server: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """What every process of a run is started with."""

    config: DictConfig
    config_file: Path
    settings: RunConfig
    warden: Warden
    log_folder: Path | None = None
    events: "SimpleQueue[Event]" = field(default_factory=SimpleQueue)


@dataclass(frozen=True)
class ReadyServer:
    """A server that accepts connections."""

    address: Address
    pid: int
    start_time: float
    """When its process was started, in seconds since the epoch."""
    took_s: float


class Unit(ABC):
    """One process of a run and the servers in it."""

    def __init__(self, name: str, servers: Sequence[PlannedServer], replica: int, context: RunContext) -> None:
        self.name = name
        self.replica = replica
        self.servers = {server.name: server for server in servers}
        self.ready: dict[str, ReadyServer] = {}
        self.child: ChildProcess | None = None
        self.started_s = 0.0
        self._start_time = 0.0
        self._context = context
        self.output = ServerOutput(name, self.servers, context.log_folder)

    @property
    def is_ready(self) -> bool:
        """Whether every server in it is."""
        return self.servers.keys() <= self.ready.keys()

    @property
    def log_files(self) -> list[Path]:
        """The log files of the process and of its servers that exist."""
        names = dict.fromkeys([self.name, *self.servers])
        return [file for name in names if (file := self.output.log_file(name)) is not None and file.exists()]

    def start(self) -> None:
        """Start the process; readiness is reported as events."""
        self.ready.clear()
        self.started_s, self._start_time = time.monotonic(), time.time()
        self._launch()

    def take(self, event: Event) -> None:
        """Note that a server is ready or that it is not to be here."""
        if event.kind == "ready":
            address = Address(str(event.details["host"]), int(event.details["port"]))
            took_s = time.monotonic() - self.started_s
            self.ready[event.server] = ReadyServer(address, int(event.details["pid"]), self._start_time, took_s)
        else:
            self.servers.pop(event.server, None)

    def exit_code(self) -> int | None:
        """None while the process runs."""
        return None if self.child is None else self.child.exit_code()

    def close(self) -> None:
        """Release what belongs to the process once it has ended."""
        self.output.close()

    @abstractmethod
    def _launch(self) -> None: ...

    def _environment(self, instance: str) -> dict[str, str]:
        environment = child_environment(
            self._context.config, self._context.config_file, instance, inherited_environment()
        )
        environment["PYTHONUNBUFFERED"] = "1"
        environment[NEMO_GYM_PARENT_PID_ENV_VAR_NAME] = str(os.getpid())
        environment[NEMO_GYM_RUN_ID_ENV_VAR_NAME] = str(self._context.config.get(RUN_ID_KEY_NAME) or "")
        environment.pop(NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME, None)
        if cache := self._context.config.get(UV_CACHE_DIR_KEY_NAME):
            environment["UV_CACHE_DIR"] = str(cache)
        return environment


class Host(Unit):
    """Several servers in one process."""

    _listener: threading.Thread | None = None

    def exit_code(self) -> int | None:
        """None while the process runs; once it has ended, everything it told has arrived."""
        code = super().exit_code()
        if code is not None and self._listener is not None:
            self._listener.join(_EVENTS_TIMEOUT_S)
        return code

    def _launch(self) -> None:
        reading, writing = os.pipe()
        arguments = [sys.executable, "-P", "-m", "nemo_gym.servers.host", "--events-fd", str(writing)]
        arguments += ["--replica", str(self.replica), *self.servers]
        environment = self._environment("")
        del environment[NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME]
        environment[NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME] = str(self._context.settings.num_replicas)
        environment["PYTHONPATH"] = host_python_path(environment.get("PYTHONPATH"))
        command = CommandLine(arguments, None, environment, (writing,))
        try:
            child = ChildProcess(command, self.output.write, self._context.warden)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.child = child
        self._listener = threading.Thread(target=self._listen, args=(reading, child), name="host events", daemon=True)
        self._listener.start()

    def _listen(self, descriptor: int, child: ChildProcess) -> None:
        with os.fdopen(descriptor, encoding="utf-8") as stream:
            for line in stream:
                if not line.endswith("\n"):  # killed while it was writing
                    return
                told = json.loads(line)
                self._context.events.put(Event(child, told.pop("event"), told.pop("name"), told))


def host_python_path(inherited: str | None) -> str:
    """Where servers that share a process find modules; theirs are imported from the search roots."""
    return search_path([OWN_PACKAGE_FIRST, inherited, own_root_for_path()])


def python_path_of(server: PlannedServer, inherited: str | None) -> str:
    """Where a server that is alone in its process finds modules: beside itself first."""
    source = server.folder / "src"
    root = root_of(server.folder, server.server_type)
    return search_path(
        [
            OWN_PACKAGE_FIRST,
            server.folder,
            source if source.is_dir() else None,
            inherited,
            None if root in running_site_packages() else root,
            own_root_for_path(),
        ]
    )


class Alone(Unit):
    """One server in a process of its own, with its folder as working directory and first on its path."""

    def __init__(self, server: PlannedServer, python: Path, context: RunContext) -> None:
        super().__init__(server.name, [server], 0, context)
        self.server = server
        self._python = python
        self._asking = threading.Event()

    def refusal(self, exit_code: int) -> str | None:
        """What the server has against its block of the config, if that is why it ended before it was ready."""
        lines = self.output.last_lines
        starts = [at for at, line in enumerate(lines) if line.startswith(_REFUSAL)]
        if exit_code != _EXIT_REFUSED or not starts:
            return None
        return "\n".join(lines[starts[-1] :]).removeprefix(_REFUSAL)

    def close(self) -> None:
        """Also stop asking whether it answers."""
        self._asking.set()
        super().close()

    def _launch(self) -> None:
        self._asking.set()
        self._asking = threading.Event()
        command = CommandLine([str(self._python), self.server.entrypoint], self.server.folder, self._variables())
        self.child = ChildProcess(command, self.output.write, self._context.warden)
        if not self._context.settings.dry_run:
            threading.Thread(
                target=self._ask_until_ready, args=(self.child, self._asking), name=f"ask {self.name}", daemon=True
            ).start()

    def _variables(self) -> dict[str, str]:
        environment = self._environment(self.name)
        environment["PYTHONPATH"] = python_path_of(self.server, environment.get("PYTHONPATH"))
        if str(self._python) != sys.executable:
            programs = self._python.parent
            environment["VIRTUAL_ENV"] = str(programs.parent)
            environment["PATH"] = search_path([programs, environment.get("PATH")])
            environment.pop("PYTHONHOME", None)
        return environment

    def _ask_until_ready(self, child: ChildProcess, enough: threading.Event) -> None:
        server = self.server
        address = Address(server.host, server.port)
        while not enough.wait(ASK_EVERY_S):
            if probe(address, _ANSWER_TIMEOUT_S) == "success":
                details = {"host": server.host, "port": server.port, "pid": child.pid}
                self._context.events.put(Event(child, "ready", server.name, details))
                return
