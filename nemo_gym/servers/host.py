"""Many servers in one process: each keeps its own port, calls between them stay in memory.

Started by the launcher as `python -m nemo_gym.servers.host --events-fd N --replica R NAME...`; or with `--orders-fd N`
before the launcher knows the rest, which it tells there; or forked by a process that the launcher started with
`--forks-fd N`: it has loaded what hosts need, has no threads and no event loop, and never becomes a host itself. What
it has loaded, the hosts that it forks share.

It tells the launcher, one JSON object per line, which instances are ready, which it cannot
host (these get a process of their own), which refuse their block of the config and which cannot be started at
all; and, where there may be more hosts, while this one is busy. One handler that blocks the event loop stops every
server in here, and nothing else would show why: it is noticed, and its server named with what helps.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket as sockets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import IO, Any, NamedTuple

import uvicorn
from fastapi import FastAPI

from nemo_gym import runtime
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser, get_global_config_dict
from nemo_gym.http.addresses import Address
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.http.session import close_global_aiohttp_client
from nemo_gym.keys import DRY_RUN_KEY_NAME, NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME, VERBOSE_KEY_NAME
from nemo_gym.log import prefix_output, setup_logging
from nemo_gym.paths import search_servers_in_all_roots
from nemo_gym.process_inputs import running_as
from nemo_gym.runtime import listen
from nemo_gym.servers.base import NotOneServerClassError, SimpleServer, one_server_class
from nemo_gym.servers.run import end_with_parent, uvicorn_settings

logger = logging.getLogger(__name__)

BLOCKED_AFTER_S = 2.0
_CHECK_EVERY_S = 0.25
BUSY_FROM = 0.85
"""The part of a core from which on a host is busy."""
BUSY_FOR_S = 1.0
"""How long it is busy before it says so, and again after that."""
BUSY_LATE_S = 0.1
"""How late its event loop comes round, on average, from which on it is busy, too."""
_MOST_BYTES = 4096
_OF_EVERY_SERVER = (
    "nemo_gym.base_resources_server",
    "nemo_gym.base_responses_api_agent",
    "nemo_gym.base_responses_api_model",
)


class _Load:
    """Whether this process has had all it can do, for a second at a time: a core, or an event loop that comes too late.

    The latter also shows work that blocks the loop, and a machine that has more to do than cores.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._begin(time.monotonic())

    def _begin(self, now_s: float) -> None:
        self._since_s, self._cpu_s = now_s, time.process_time()
        self._beats, self._late_s = 0, 0.0

    def beat(self, late_s: float) -> None:
        """The event loop has come round, so much later than it should have."""
        self._beats, self._late_s = self._beats + 1, self._late_s + late_s

    def look(self, now_s: float) -> None:
        """Say how the last second was, if it was a busy one."""
        passed_s = now_s - self._since_s
        if passed_s < BUSY_FOR_S:
            return
        share = (time.process_time() - self._cpu_s) / passed_s
        if share >= BUSY_FROM or not self._beats or self._late_s / self._beats >= BUSY_LATE_S:
            self._tell(share)
        self._begin(now_s)


@contextmanager
def watch_loop(
    loop: asyncio.AbstractEventLoop, folders: Mapping[Path, str], tell_busy: Callable[[float], None] | None = None
) -> Iterator[None]:
    """While inside, log who blocks `loop`, and tell every second that the process is busy, as long as it is.

    `folders` says which server's code lives where.
    """
    last_beat = time.monotonic()
    stopped = threading.Event()
    loop_thread = threading.get_ident()
    load = None if tell_busy is None else _Load(tell_busy)

    def beat() -> None:
        nonlocal last_beat
        now_s = time.monotonic()
        if load is not None:
            load.beat(now_s - last_beat - _CHECK_EVERY_S)
        last_beat = now_s
        timers[0] = loop.call_later(_CHECK_EVERY_S, beat)

    def watch() -> None:
        reported = False
        while not stopped.wait(_CHECK_EVERY_S):
            now_s = time.monotonic()
            blocked_s = now_s - last_beat
            if load is not None:
                load.look(now_s)
            if blocked_s < BLOCKED_AFTER_S:
                reported = False
            elif not reported:
                reported = True
                _report(sys._current_frames().get(loop_thread), blocked_s, folders)

    timers = [loop.call_later(0, beat)]
    threading.Thread(target=watch, name="loop watch", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
        timers[0].cancel()


def _report(frame: object, blocked_s: float, folders: Mapping[Path, str]) -> None:
    stack = traceback.extract_stack(frame) if frame is not None else []  # type: ignore[arg-type]
    for entry in reversed(stack):
        for folder, name in folders.items():
            if Path(entry.filename).is_relative_to(folder):
                logger.warning(
                    "server %r has blocked its process for %.1f s in %s (%s, line %s); all servers in the process "
                    "wait. Use `await asyncio.to_thread(...)` for blocking work, or give the server a process of its "
                    "own with `isolation: process` in its block",
                    name,
                    blocked_s,
                    entry.name,
                    entry.filename,
                    entry.lineno,
                )
                return
    where = f"{stack[-1].filename}, line {stack[-1].lineno}" if stack else "unknown place"
    logger.warning("the event loop of this process has been blocked for %.1f s at %s", blocked_s, where)


@dataclass
class Hosted:
    """One instance, ready to be served."""

    name: str
    server: SimpleServer
    app: FastAPI
    socket: socket


class Events:
    """What the launcher is told, as it happens."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._one_at_a_time = threading.Lock()

    def tell(self, event: str, name: str, **details: Any) -> None:
        """Send one event."""
        with self._one_at_a_time:
            self._stream.write(json.dumps({"event": event, "name": name, **details}) + "\n")
            self._stream.flush()

    def tell_busy(self, share: float) -> None:
        """Say that this process is busy, with that part of a core; a launcher that is gone needs not know it."""
        with contextlib.suppress(OSError):
            self.tell("busy", "", share=round(share, 2))


class _HostedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its host and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way of saying that the app's start-up code failed
            self.should_exit = True
        finally:
            self.settled.set()


class Place(NamedTuple):
    """What makes one host different from the others."""

    replica: int
    events_fd: int
    tells_load: bool = False
    parent_pid: int | None = None
    """The process whose end this one does not survive, if that is not the launcher."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Host the named instances until stopped."""
    parser = argparse.ArgumentParser(prog="nemo_gym.servers.host")
    parser.add_argument("--orders-fd", type=int)
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--forks-fd", type=int)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--tell-load", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    if given.orders_fd is not None:
        orders = _await_orders(given.orders_fd)
        if orders is None:
            return 0
        given = parser.parse_args(orders)
    prefix_output("host")
    config = get_global_config_dict()
    setup_logging(verbose=bool(config.get(VERBOSE_KEY_NAME)))
    runtime.raise_open_file_limit()
    search_servers_in_all_roots()
    place: Place | None = Place(given.replica, given.events_fd, given.tell_load)
    if given.forks_fd is not None:
        with sockets.socket(fileno=given.forks_fd) as launcher:
            try:
                place = _fork_hosts(launcher, given.names)
            except (BrokenPipeError, ConnectionResetError):  # the launcher is gone
                return 0
    if place is None:
        return 0
    end_with_parent(place.parent_pid)
    with os.fdopen(place.events_fd, "w") as stream:
        return runtime.run(_host(given.names, place, Events(stream)))


def _await_orders(descriptor: int) -> list[str] | None:
    """Load what every server is made of, then wait for the arguments of this process; None if it is not needed.

    Its environment comes with them, and takes the place of the one that it was started with.
    """
    for module in _OF_EVERY_SERVER:
        importlib.import_module(module)
    with os.fdopen(descriptor, "rb") as stream:
        text = stream.read()
    if not text:
        return None
    orders = json.loads(text)
    os.environ.clear()
    os.environ.update(orders["environment"])
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    return list(orders["arguments"])


def _fork_hosts(launcher: sockets.socket, names: list[str]) -> Place | None:
    """Fork a host whenever the launcher asks, and tell it how each ends, until it is gone: then None.

    In a host that was forked: where its place is.
    """
    for name in names:
        with contextlib.suppress(Exception), running_as(name):  # what cannot be loaded, the host is to report
            _server_class(name)
    if threading.active_count() > 1 or _tasks() > 1:
        launcher.send(json.dumps({"refused": "a library that its servers use has started threads"}).encode())
        return None
    gc.collect()
    gc.freeze()
    told, signals = os.pipe()
    for end in (told, signals):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    launcher.send(b"{}")
    while True:
        ready, _, _ = select.select([launcher.fileno(), told], [], [])
        if told in ready:
            os.read(told, _MOST_BYTES)
            _tell_ends(launcher)
        if launcher.fileno() not in ready:
            continue
        message, descriptors, _, _ = sockets.recv_fds(launcher, _MOST_BYTES, 2)
        if not message:
            return None
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(told)
            os.close(signals)
            return _take_place(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        launcher.send(json.dumps({"forked": pid}).encode())


def _take_place(order: Mapping[str, int], output: int, events: int) -> Place:
    """Become a process of its own in the launcher's eyes: group, output, events."""
    parent = os.getppid()
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ[NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME] = str(order["hosts"])
    return Place(order["replica"], events, tells_load=True, parent_pid=parent)


def _tell_ends(launcher: sockets.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            launcher.send(json.dumps({"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}).encode())


def _tasks() -> int:
    """The threads of this process, also those that Python does not know of."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - each is a name, not a path


async def _host(names: list[str], place: Place, events: Events) -> int:
    replica = place.replica
    hosted = [item for name in names if (item := _build(name, replica, events)) is not None]
    if get_global_config_dict().get(DRY_RUN_KEY_NAME):
        for item in hosted:
            events.tell("ready", item.name, host=item.server.config.host, port=item.server.config.port, pid=os.getpid())
        return 0
    if not hosted:
        return 0
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    folders = {Path(sys.modules[type(item.server).__module__].__file__ or "").parent: item.name for item in hosted}
    with watch_loop(loop, folders, events.tell_busy if place.tells_load else None):
        await _serve(hosted, events, stop)
    return 0


async def _serve(hosted: list[Hosted], events: Events, stop: asyncio.Event) -> None:
    runtime.collect_garbage_less_often()
    servers = []
    for item in hosted:
        config = item.server.config
        host, port = item.socket.getsockname()[:2]
        addresses = {Address(config.host, config.port), Address(host, port)}
        register_local_app(item.name, item.app, addresses, cancellable_paths=item.server.CANCELLABLE_PATHS)
        servers.append(_HostedServer(uvicorn.Config(item.app, **uvicorn_settings())))
    tasks = [
        asyncio.create_task(server.serve(sockets=[item.socket])) for server, item in zip(servers, hosted, strict=True)
    ]
    for server, item in zip(servers, hosted, strict=True):
        await server.settled.wait()
        if server.started:
            host, port = item.socket.getsockname()[:2]
            is_replicable = item.server.is_replicable()
            events.tell("ready", item.name, host=host, port=port, pid=os.getpid(), replicable=is_replicable)
        else:
            events.tell("failed", item.name, reason="its start-up code failed; its log says why")
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks, return_exceptions=True)
    await close_global_aiohttp_client()


def _build(name: str, replica: int, events: Events) -> Hosted | None:
    """The instance, built; None when the launcher was told that it is not here."""
    with running_as(name):
        try:
            server = _server_class(name).from_global_config()
            app = server.complete_app()
        except (NotOneServerClassError, ImportError) as error:
            events.tell("declined", name, reason=f"{type(error).__name__}: {error}")
            return None
        except ConfigError as error:
            events.tell("refused", name, reason=str(error))
            return None
        except Exception as error:  # noqa: BLE001 - an author's code may raise anything; the launcher is told what
            traceback.print_exc()
            events.tell("failed", name, reason=f"{type(error).__name__}: {error}")
            return None
        config = server.config
        try:
            port = config.port if replica == 0 else 0
            bound = listen(config.host, port, f"server {name!r}", f"++{name}.….port=<port>")
        except ConfigError as error:
            events.tell("refused", name, reason=str(error))
            return None
    return Hosted(name, server, app, bound)


def _server_class(name: str) -> type[SimpleServer]:
    config = get_global_config_dict()
    instance = next(
        item for item in GlobalConfigDictParser().filter_for_server_instance_configs(config) if item.name == name
    )
    return one_server_class(importlib.import_module(instance.module_name))


if __name__ == "__main__":
    sys.exit(main())
