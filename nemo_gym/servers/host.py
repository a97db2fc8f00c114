"""Many servers in one process: each keeps its own port, calls between them stay in memory.

Started by the launcher as `python -m nemo_gym.servers.host --events-fd N --replica R NAME...`.
It tells the launcher, one JSON object per line, which instances are ready, which it cannot
host (these get a process of their own) and which cannot be started at all.
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
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import IO, Any

import uvicorn
from fastapi import FastAPI

from nemo_gym import event_loop
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser, get_global_config_dict
from nemo_gym.http.addresses import Address
from nemo_gym.http.local import register_local_app
from nemo_gym.http.session import close_global_aiohttp_client
from nemo_gym.keys import DRY_RUN_KEY_NAME, VERBOSE_KEY_NAME
from nemo_gym.log import setup_logging
from nemo_gym.open_files import raise_open_file_limit
from nemo_gym.paths import component_search_roots
from nemo_gym.servers.auth import guarded
from nemo_gym.servers.base import SimpleServer
from nemo_gym.servers.classes import NotOneServerClassError, one_server_class
from nemo_gym.servers.context import prefix_output, running_as
from nemo_gym.servers.direct import DirectLane
from nemo_gym.servers.listening import listen
from nemo_gym.servers.loop_watch import watch_loop
from nemo_gym.servers.middleware import DisconnectMiddleware
from nemo_gym.servers.run import end_with_parent, uvicorn_settings

logger = logging.getLogger(__name__)


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
    raise_open_file_limit()
    end_with_parent()
    for root in component_search_roots():
        if str(root) not in sys.path:
            sys.path.append(str(root))
    with os.fdopen(given.events_fd, "w") as stream:
        return event_loop.run(_host(given.names, given.replica, Events(stream)))


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
    event_loop.collect_garbage_less_often()
    servers = []
    for item in hosted:
        lane = DirectLane(item.app, item.name)
        config = item.server.config
        host, port = item.socket.getsockname()[:2]
        addresses = {Address(config.host, config.port), Address(host, port)}
        paths = item.server.CANCELLABLE_PATHS
        register_local_app(item.name, lane, addresses, cancellable_paths=paths, direct=lane)
        served = guarded(DisconnectMiddleware(lane, paths), item.server.required_token(), item.name)
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
            events.tell("failed", name, reason=str(error))
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
            events.tell("failed", name, reason=str(error))
            return None
    return Hosted(name, server, app, bound)


def _server_class(name: str) -> type[SimpleServer]:
    config = get_global_config_dict()
    instance = next(
        item for item in GlobalConfigDictParser().filter_for_server_instance_configs(config) if item.name == name
    )
    stem = Path(instance.get_inner_run_server_config().entrypoint).with_suffix("")
    module = f"{instance.SERVER_TYPE}.{instance.implementation}.{'.'.join(stem.parts)}"
    return one_server_class(importlib.import_module(module))


if __name__ == "__main__":
    sys.exit(main())
