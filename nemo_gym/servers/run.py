"""One server in its own process: app, uvicorn, workers, and Ray for a server that uses it.

Any launcher can start it: the config and the instance's name arrive in environment variables. Ray is connected to or
started when a server asks, and never otherwise.
"""

import asyncio
import atexit
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.http.settings import replaceable
from nemo_gym.keys import (
    DRY_RUN_KEY_NAME,
    NUM_WORKERS_ENV_VAR_NAME,
    RAY_HEAD_NODE_ADDRESS_KEY_NAME,
    VERBOSE_KEY_NAME,
)
from nemo_gym.log import prefix_output, setup_logging, tell_what_was_counted
from nemo_gym.paths import install_command
from nemo_gym.process_inputs import launcher_pid, num_replicas, num_workers, require_instance
from nemo_gym.runtime import collect_garbage_less_often, raise_open_file_limit
from nemo_gym.servers.auth import CallerCheck
from nemo_gym.servers.base import one_server_class
from nemo_gym.servers.gateway import Duties, Gateway, duties_of
from nemo_gym.terminal import harmless

if TYPE_CHECKING:
    from nemo_gym.servers.base import SimpleServer

logger = logging.getLogger(__name__)

IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME = "IS_NEMO_GYM_FASTAPI_WORKER"
IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME = "IS_NEMO_GYM_FASTAPI_ENTRYPOINT"
WORKER_FILE = "NEMO_GYM_FASTAPI_ENTRYPOINT_FILE"
NEMO_GYM_FASTAPI_NUM_WORKERS = NUM_WORKERS_ENV_VAR_NAME


def run_webserver(server_class: "type[SimpleServer]") -> FastAPI | None:
    """Serve `server_class` as the process's config says, until stopped."""
    config = get_global_config_dict()
    setup_logging(verbose=bool(config.get(VERBOSE_KEY_NAME)))
    if is_nemo_gym_fastapi_worker():
        server = server_class.from_global_config()
        prefix_output(server.config.name)
        app = server.complete_app()
        collect_garbage_less_often()
        return app
    with _refusing_its_config():
        server = server_class.from_global_config()
    if config.get(DRY_RUN_KEY_NAME):
        return None
    raise_open_file_limit()
    prefix_output(server.config.name)
    end_with_parent()
    if (server.config.num_workers or 1) > 1:
        _run_workers(server_class, server.config)
        return None
    with _refusing_its_config():
        app = server.complete_app()
    collect_garbage_less_often()
    _end_with_everything_told()
    uvicorn.run(app, host=server.config.host, port=server.config.port, **uvicorn_settings())
    return app


def _end_with_everything_told() -> None:
    """Have SIGTERM, which uvicorn lets do its work once it has served all, end the process with nothing left to say."""

    def end(number: int, frame: object) -> None:
        tell_what_was_counted()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


@contextmanager
def _refusing_its_config() -> Iterator[None]:
    """End the process with one line and exit code 2 when the config is not as the server needs it."""
    try:
        yield
    except ConfigError as error:
        sys.stderr.write(harmless(f"Error: {error}\n"))
        raise SystemExit(2) from None


def uvicorn_settings() -> dict[str, Any]:
    """How every server here runs uvicorn."""
    config = get_global_config_dict()
    return {
        "log_level": "info" if config.get("uvicorn_logging_show_200_ok") else "warning",
        "access_log": bool(config.get("uvicorn_logging_show_200_ok")),
        "timeout_graceful_shutdown": 0.5,
        "timeout_keep_alive": 300,  # far longer than our clients keep a connection (15 s), however far they lag behind
        "timeout_worker_healthcheck": int(config.get("uvicorn_timeout_worker_healthcheck", 30)),
        "backlog": 16_384,
        "ws": "none",
        "proxy_headers": False,
        "server_header": False,
        "date_header": False,
    }


def _run_workers(server_class: "type[SimpleServer]", config: BaseRunServerInstanceConfig) -> None:
    """Start uvicorn's workers; each builds the app anew by importing the server's module."""
    entrypoint = Path(sys.modules[server_class.__module__].__file__ or "").resolve()
    root = entrypoint.parent.parent.parent
    set_is_nemo_gym_fastapi_worker()
    set_is_nemo_gym_fastapi_entrypoint(str(entrypoint.relative_to(root)))
    set_nemo_gym_fastapi_num_workers(config.num_workers or 1)
    os.environ[WORKER_FILE] = str(entrypoint)
    uvicorn.run(
        "nemo_gym.servers.run:worker_app",
        factory=True,
        workers=config.num_workers,
        host=config.host,
        port=config.port,
        **uvicorn_settings(),
    )


def worker_app() -> ASGIApp:
    """The app of one worker: the one its module offers as `app`, else built from its one server class."""
    end_with_parent(os.getppid())
    module = _load(os.environ[IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME], Path(os.environ[WORKER_FILE]))
    offered = getattr(module, "app", None)
    app = offered if isinstance(offered, FastAPI) else cast(FastAPI, run_webserver(one_server_class(module)))
    if duties_of(app) is None:
        callers = CallerCheck(get_global_config_dict(), require_instance(), described_by=app)
        app.add_middleware(Gateway, duties=Duties(require_instance(), callers=callers))
    return _telling_at_its_end(app)


def _telling_at_its_end(app: ASGIApp) -> ASGIApp:
    """The same app; its end says what was counted, since a worker is asked for its app when uvicorn has its signals."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_at_last(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                tell_what_was_counted()
            await send(message)

        await app(scope, receive, send_at_last if scope["type"] == "lifespan" else send)

    return served


def _load(relative: str, entrypoint: Path) -> ModuleType:
    sys.path.append(str(entrypoint.parents[2]))
    return importlib.import_module(relative.removesuffix(".py").replace(os.sep, "."))


def is_nemo_gym_fastapi_entrypoint(file: str) -> bool:
    """Whether `file` is the module that a worker process must offer its `app` from."""
    entrypoint = os.environ.get(IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME, "\0")
    return is_nemo_gym_fastapi_worker() and file.endswith(entrypoint)


def is_nemo_gym_fastapi_worker() -> bool:
    """Whether this process is one of several that serve the same server."""
    return bool(os.environ.get(IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME))


def set_is_nemo_gym_fastapi_worker() -> None:
    """Make this process's children workers."""
    os.environ[IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME] = "1"


def set_is_nemo_gym_fastapi_entrypoint(file: str) -> None:
    """Say which module workers offer their `app` from."""
    os.environ[IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME] = file


def get_nemo_gym_fastapi_num_workers() -> int:
    """How many processes serve this server."""
    return num_workers()


def set_nemo_gym_fastapi_num_workers(num_workers: int) -> None:
    """Say how many processes serve this server."""
    os.environ[NEMO_GYM_FASTAPI_NUM_WORKERS] = str(num_workers)


def per_process_cap(cap: int | None) -> int | None:
    """A cap on the whole server, divided among the processes it runs in; at least 1."""
    if not cap:
        return cap
    return max(1, -(-cap // num_serving_processes()))


def num_serving_processes() -> int:
    """How many processes serve this server now: its workers, in every replica."""
    return num_replicas() * num_workers()


class SharedSlots(asyncio.Semaphore):
    """A cap on the whole server, of which this process lets in its part, also when there come to be more processes."""

    def __init__(self, cap: int) -> None:
        """`cap` is what all processes together may have under way."""
        self._cap = cap
        self._part = per_process_cap(cap) or 1
        super().__init__(self._part)

    def release(self) -> None:
        """Let the next one in, unless this process has more than its part by now."""
        if self._part > (per_process_cap(self._cap) or 1):
            self._part -= 1
        else:
            super().release()


def end_with_parent(parent_pid: int | None = None) -> None:
    """Stop this process when its parent is gone, so that a killed launcher leaves nothing behind."""
    parent = parent_pid or launcher_pid()
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def initialize_ray() -> None:
    """Connect to the cluster that `ray_head_node_address` names, or start one on this machine and record its address.

    Does nothing when this process is connected already. The process that started a cluster stops it at its end.
    """
    ray = _ray()
    if ray.is_initialized():
        logger.debug("this process is connected to Ray already")
        return
    config = replaceable("get_global_config_dict", get_global_config_dict)()
    address = config.get(RAY_HEAD_NODE_ADDRESS_KEY_NAME)
    if address:
        ray.init(address=address, ignore_reinit_error=True)
        return
    ray.init(ignore_reinit_error=True)
    atexit.register(ray.shutdown)
    config[RAY_HEAD_NODE_ADDRESS_KEY_NAME] = ray.get_runtime_context().gcs_address
    logger.info("started a Ray cluster at %s", config[RAY_HEAD_NODE_ADDRESS_KEY_NAME])


def maybe_ray_cluster_exit() -> None:
    """Leave the cluster this process is connected to, if it ever loaded Ray and is connected."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a server asks for Ray, which is not installed; install it with: {install_command('ray')}"
        ) from error
