"""The processes of a run: hosts with several servers each, and servers alone in theirs.

A unit knows how to start its process and how to learn that its servers are ready: a host tells, one
JSON object per line through a pipe; a server that is alone is asked over HTTP until it answers.

Hosts that are added while others run are forked by a process that has loaded what they need, where the system can do
that safely: they share its memory and are there at once.
"""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from omegaconf import DictConfig

from nemo_gym.config.handover import child_environment
from nemo_gym.config.secrets import auth_token
from nemo_gym.http.addresses import Address, fetch, probe
from nemo_gym.keys import (
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME,
    NEMO_GYM_PARENT_PID_ENV_VAR_NAME,
    NEMO_GYM_RUN_ID_ENV_VAR_NAME,
    REPLICABLE_PATH,
    RESOURCES_TYPE,
    RUN_ID_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
)
from nemo_gym.launch import waiting_host
from nemo_gym.launch.plan import PlannedServer, root_of
from nemo_gym.launch.process import ChildProcess, CommandLine, ServerOutput
from nemo_gym.launch.requirements import own_root_for_path, running_site_packages, search_path
from nemo_gym.launch.warden import Warden
from nemo_gym.paths import OWN_PACKAGE_FIRST
from nemo_gym.process_inputs import inherited_environment
from nemo_gym.runtime import usable_cores
from nemo_gym.schemas.cli_config import RunConfig

logger = logging.getLogger(__name__)

ASK_EVERY_S = 0.05
_FEW_CORES = 2
_FORK_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.01
_MOST_BYTES = 4096
_STILL_BUSY_S = 1.7
"""A host that is busy says so every second."""
_BUSY_LONG_S = 0.9
_ANSWER_TIMEOUT_S = 2.0
_EVENTS_TIMEOUT_S = 1.0
_EXIT_REFUSED, _REFUSAL = 2, "Error: "  # how `servers/run.py` ends when the config is wrong


@dataclass(frozen=True)
class Event:
    """Something that happened to one server of a process."""

    child: ChildProcess
    kind: str
    """`ready`, `declined` (it must have a process of its own), `refused` (its block of the config) or `failed`; of a
    whole host, `busy`."""
    server: str
    details: dict[str, Any] = field(default_factory=dict)


class HostCount(NamedTuple):
    """How many hosts a run begins with, and how many it may come to have."""

    first: int = 1
    most: int = 1

    @classmethod
    def of(cls, num_replicas: int | str) -> "HostCount":
        """What the option says: a number, `auto` (as many as there are cores, if these are many) or `auto:<most>`."""
        if isinstance(num_replicas, int):
            return cls(num_replicas, num_replicas)
        bound = num_replicas.partition(":")[2]
        if bound:
            return cls(1, int(bound))
        cores = usable_cores()
        return cls(1, cores if cores > _FEW_CORES else 1)

    @property
    def may_grow(self) -> bool:
        """Whether hosts are added when those that run are busy."""
        return self.most > self.first


@dataclass(frozen=True)
class RunContext:
    """What every process of a run is started with."""

    config: DictConfig
    config_file: Path
    settings: RunConfig
    warden: Warden
    log_folder: Path | None = None
    hosts: HostCount = field(default_factory=HostCount)
    events: "SimpleQueue[Event]" = field(default_factory=SimpleQueue)


@dataclass(frozen=True)
class ReadyServer:
    """A server that accepts connections."""

    address: Address
    pid: int
    start_time: float
    """When its process was started, in seconds since the epoch."""
    took_s: float
    is_replicable: bool = False
    """Whether it declares that several processes may have one of it."""


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
            pid, is_replicable = int(event.details["pid"]), bool(event.details.get("replicable"))
            self.ready[event.server] = ReadyServer(address, pid, self._start_time, took_s, is_replicable)
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
    is_spare = False
    """It is being added to others, and the run goes on without it if it cannot be started."""
    spawner: "Spawner | None" = None
    """The process that forks it, if one does."""
    _first_busy_s = _last_busy_s = float("-inf")

    def take(self, event: Event) -> None:
        """Also note that it is busy."""
        if event.kind != "busy":
            super().take(event)
            return
        now_s = time.monotonic()
        if now_s - self._last_busy_s > _STILL_BUSY_S:
            self._first_busy_s = now_s
        self._last_busy_s = now_s

    @property
    def is_busy(self) -> bool:
        """Whether it has been so for two seconds."""
        is_busy_now = time.monotonic() - self._last_busy_s < _STILL_BUSY_S
        return is_busy_now and self._last_busy_s - self._first_busy_s > _BUSY_LONG_S

    def exit_code(self) -> int | None:
        """None while the process runs; once it has ended, everything it told has arrived."""
        code = super().exit_code()
        if code is not None and self._listener is not None:
            self._listener.join(_EVENTS_TIMEOUT_S)
        return code

    def _launch(self) -> None:
        self.child, reading = self._waiting() or self._started()
        child = self.child
        self._listener = threading.Thread(target=self._listen, args=(reading, child), name="host events", daemon=True)
        self._listener.start()

    def _waiting(self) -> tuple[ChildProcess, int] | None:
        """The process that has been started for this already, if there is one, and where it tells events."""
        waiting = None if self.replica else waiting_host.take()
        if waiting is None or not waiting.is_there:
            return None
        process = waiting.become(self._arguments(), self._host_environment(self._context.hosts.first))
        return ChildProcess(process, self.output.write, self._context.warden), waiting.events

    def _started(self) -> tuple[ChildProcess, int]:
        reading, writing = os.pipe()
        try:
            return ChildProcess(self._process(writing), self.output.write, self._context.warden), reading
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def _process(self, events: int) -> "CommandLine | Forked":
        hosts = max(self._context.hosts.first, self.replica + 1)
        if self.spawner is not None and self.spawner.is_usable:
            try:
                return self.spawner.fork(self.replica, hosts, events)
            except OSError as error:
                logger.warning("%s is started anew, since it cannot be forked: %s", self.name, error)
        return self.command(["--events-fd", str(events), *self._arguments()], hosts, events)

    def _arguments(self) -> list[str]:
        load = ["--tell-load"] if self._context.hosts.may_grow else []
        return ["--replica", str(self.replica), *load, *self.servers]

    def command(self, arguments: Sequence[str], hosts: int, descriptor: int) -> CommandLine:
        """How the program of hosts is started, one of so many, with a descriptor that stays open in it."""
        program = [sys.executable, "-P", "-m", "nemo_gym.servers.host"]
        return CommandLine([*program, *arguments], None, self._host_environment(hosts), (descriptor,))

    def _host_environment(self, hosts: int) -> dict[str, str]:
        environment = self._environment("")
        del environment[NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME]
        environment[NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME] = str(hosts)
        environment["PYTHONPATH"] = host_python_path(environment.get("PYTHONPATH"))
        return environment

    def _listen(self, descriptor: int, child: ChildProcess) -> None:
        with os.fdopen(descriptor, encoding="utf-8") as stream:
            for line in stream:
                if not line.endswith("\n"):  # killed while it was writing
                    return
                told = json.loads(line)
                self._context.events.put(Event(child, told.pop("event"), told.pop("name"), told))


class Forked:
    """A host that a spawner has forked, in the words of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes], spawner: "Spawner") -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self._spawner = spawner

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._spawner.exit_code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it runs longer.
        """
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"host {self.pid}", timeout or 0.0)
            time.sleep(_LOOK_EVERY_S)
        return code


class Spawner:
    """The process that hosts are forked from: it has loaded what they need, and shares it with them."""

    def __init__(self, like: Host, context: RunContext) -> None:
        """Start it; its hosts are `like` one that runs."""
        self.started_s = time.monotonic()
        self.refusal: str | None = None
        """Why it cannot be used."""
        self._is_ready = False
        self._codes: dict[int, int] = {}
        self._forked: int | None = None
        self._lock = threading.RLock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = ServerOutput("host", like.servers, context.log_folder)
        with theirs:
            arguments = ["--forks-fd", str(theirs.fileno()), *like.servers]
            command = like.command(arguments, context.hosts.first, theirs.fileno())
            self._process = ChildProcess(command, self._output.write, context.warden)

    @staticmethod
    def is_possible() -> bool:
        """Whether this system forks safely: libraries of macOS start threads behind one's back."""
        return sys.platform == "linux"

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it can fork hosts."""
        self._read(0.0)
        return self._is_ready and self.refusal is None

    def fork(self, replica: int, hosts: int, events: int) -> Forked:
        """A new host, one of so many, that tells its events there.

        Raises:
            OSError: it cannot be forked.
        """
        reading, writing = os.pipe()
        order = json.dumps({"replica": replica, "hosts": hosts}).encode()
        try:
            with self._lock:
                self._forked = None
                socket.send_fds(self._socket, [order], [writing, events])
                deadline_s = time.monotonic() + _FORK_TIMEOUT_S
                while self._forked is None:
                    self._read(_LOOK_EVERY_S)
                    if self.refusal is not None or time.monotonic() > deadline_s:
                        raise OSError(self.refusal or f"there is no answer within {_FORK_TIMEOUT_S:g} s")
                return Forked(self._forked, os.fdopen(reading, "rb"), self)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def exit_code_of(self, pid: int) -> int | None:
        """How a host that was forked here has ended; None while it runs."""
        with self._lock:
            self._read(0.0)
            if self.refusal is not None and pid not in self._codes and not _lives(pid):
                self._codes[pid] = -signal.SIGKILL  # nobody is left who knows it better
            return self._codes.get(pid)

    def close(self) -> None:
        """End it; hosts that still run end with it."""
        self._socket.close()
        self.refusal = self.refusal or "it was stopped"
        if self._process.wait(_EVENTS_TIMEOUT_S) is None:
            self._process.kill()
        self._output.close()

    def _read(self, wait_s: float) -> None:
        with self._lock, contextlib.suppress(TimeoutError, BlockingIOError):
            try:
                while self.refusal is None:
                    self._socket.settimeout(wait_s)
                    self._take(self._socket.recv(_MOST_BYTES))
                    wait_s = 0.0
            except ConnectionError as error:
                self.refusal = str(error)

    def _take(self, message: bytes) -> None:
        if not message:
            self.refusal = "the process that forks hosts has ended"
            return
        told = json.loads(message)
        self._is_ready = True
        self.refusal = told.get("refused")
        self._forked = told.get("forked", self._forked)
        if "ended" in told:
            self._codes[told["ended"]] = told["code"]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
                details["replicable"] = self._is_replicable(address)
                self._context.events.put(Event(child, "ready", server.name, details))
                return

    def _is_replicable(self, address: Address) -> bool:
        """Whether an environment says that it is; asked only where it matters."""
        if self.server.server_type != RESOURCES_TYPE or not self._context.hosts.may_grow:
            return False
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            return fetch(address, REPLICABLE_PATH, _ANSWER_TIMEOUT_S, auth_token(self._context.config))[1] == b"true"
        return False
