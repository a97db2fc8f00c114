"""Many servers in one process: each keeps its own port, calls between them stay in memory.

Started by the launcher as `python -m nemo_gym.servers.host --events-fd N --replica R NAME...`.
It tells the launcher, one JSON object per line, which instances are ready, which it cannot
host (these get a process of their own), which refuse their block of the config and which cannot be started at
all. One handler that blocks the event loop stops every server in here, and nothing else would show why: it is
noticed, and its server named with what helps.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import IO, Any

import uvicorn
from fastapi import FastAPI

from nemo_gym import runtime
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser, get_global_config_dict
from nemo_gym.http.addresses import Address
from nemo_gym.http.session import close_global_aiohttp_client
from nemo_gym.http.transports.memory import register_local_app
from nemo_gym.keys import DRY_RUN_KEY_NAME, VERBOSE_KEY_NAME
from nemo_gym.log import setup_logging
from nemo_gym.paths import search_servers_in_all_roots
from nemo_gym.servers.auth import AuthMiddleware
from nemo_gym.servers.base import NotOneServerClassError, SimpleServer, one_server_class
from nemo_gym.servers.context import prefix_output, running_as
from nemo_gym.servers.direct import DirectLane
from nemo_gym.servers.listening import listen
from nemo_gym.servers.middleware import DisconnectMiddleware
from nemo_gym.servers.run import end_with_parent, uvicorn_settings

logger = logging.getLogger(__name__)

BLOCKED_AFTER_S = 2.0
_CHECK_EVERY_S = 0.25


@contextmanager
def watch_loop(loop: asyncio.AbstractEventLoop, folders: Mapping[Path, str]) -> Iterator[None]:
    """While inside, log who blocks `loop`; `folders` says which server's code lives where."""
    last_beat = time.monotonic()
    stopped = threading.Event()
    loop_thread = threading.get_ident()

    def beat() -> None:
        nonlocal last_beat
        last_beat = time.monotonic()
        timers[0] = loop.call_later(_CHECK_EVERY_S, beat)

    def watch() -> None:
        reported = False
        while not stopped.wait(_CHECK_EVERY_S):
            blocked_s = time.monotonic() - last_beat
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

    def tell(self, event: str, name: str, **details: Any) -> None:
        """Send one event."""
        self._stream.write(json.dumps({"event": event, "name": name, **details}) + "\n")
        self._stream.flush()


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Host the named instances until stopped."""
    parser = argparse.ArgumentParser(prog="nemo_gym.servers.host")
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("names", nargs="+")
    given = parser.parse_args(arguments)
    prefix_output("host")
    config = get_global_config_dict()
    setup_logging(verbose=bool(config.get(VERBOSE_KEY_NAME)))
    runtime.raise_open_file_limit()
    end_with_parent()
    search_servers_in_all_roots()
    with os.fdopen(given.events_fd, "w") as stream:
        return runtime.run(_host(given.names, given.replica, Events(stream)))


async def _host(names: list[str], replica: int, events: Events) -> int:
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
    with watch_loop(loop, {Path(sys.modules[type(i.server).__module__].__file__ or "").parent: i.name for i in hosted}):
        await _serve(hosted, events, stop)
    return 0


async def _serve(hosted: list[Hosted], events: Events, stop: asyncio.Event) -> None:
    runtime.collect_garbage_less_often()
    servers = []
    for item in hosted:
        lane = DirectLane(item.app, item.name)
        config = item.server.config
        host, port = item.socket.getsockname()[:2]
        addresses = {Address(config.host, config.port), Address(host, port)}
        paths = item.server.CANCELLABLE_PATHS
        register_local_app(item.name, lane, addresses, cancellable_paths=paths, direct=lane)
        served = AuthMiddleware(DisconnectMiddleware(lane, paths), **item.server.who_may_call(item.app))
        servers.append(_HostedServer(uvicorn.Config(served, **uvicorn_settings())))
    tasks = [
        asyncio.create_task(server.serve(sockets=[item.socket])) for server, item in zip(servers, hosted, strict=True)
    ]
    for server, item in zip(servers, hosted, strict=True):
        await server.settled.wait()
        if server.started:
            host, port = item.socket.getsockname()[:2]
            events.tell("ready", item.name, host=host, port=port, pid=os.getpid())
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
