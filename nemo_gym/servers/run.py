"""One server in its own process: app, uvicorn, workers.

Any launcher can start it: the config and the instance's name arrive in environment variables.
"""

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.errors import ConfigError
from nemo_gym.event_loop import collect_garbage_less_often
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.keys import (
    DRY_RUN_KEY_NAME,
    NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME,
    NEMO_GYM_PARENT_PID_ENV_VAR_NAME,
    VERBOSE_KEY_NAME,
)
from nemo_gym.log import setup_logging
from nemo_gym.open_files import raise_open_file_limit
from nemo_gym.servers.auth import AuthMiddleware, guarded
from nemo_gym.servers.classes import one_server_class
from nemo_gym.servers.context import prefix_output
from nemo_gym.servers.direct import DirectLane
from nemo_gym.servers.middleware import DisconnectMiddleware
from nemo_gym.terminal import harmless

if TYPE_CHECKING:
    from nemo_gym.servers.base import SimpleServer

WORKER_FLAG = "IS_NEMO_GYM_FASTAPI_WORKER"
WORKER_ENTRYPOINT = "IS_NEMO_GYM_FASTAPI_ENTRYPOINT"
WORKER_FILE = "NEMO_GYM_FASTAPI_ENTRYPOINT_FILE"
NUM_WORKERS = "NEMO_GYM_FASTAPI_NUM_WORKERS"


def run_webserver(server_class: "type[SimpleServer]") -> FastAPI | None:
    """Serve `server_class` as the process's config says, until stopped."""
    config = get_global_config_dict()
    setup_logging(verbose=bool(config.get(VERBOSE_KEY_NAME)))
    if os.environ.get(WORKER_FLAG):
        server = server_class.from_global_config()
        prefix_output(server.config.name)
        app = server.complete_app()
        app.add_middleware(DisconnectMiddleware, paths=server_class.CANCELLABLE_PATHS)
        if (token := server.required_token()) is not None:
            app.add_middleware(AuthMiddleware, token=token, instance_name=server.config.name)
        collect_garbage_less_often()
        return app
    try:
        server = server_class.from_global_config()
    except ConfigError as error:
        sys.stderr.write(harmless(f"Error: {error}\n"))
        raise SystemExit(2) from None
    if config.get(DRY_RUN_KEY_NAME):
        return None
    raise_open_file_limit()
    prefix_output(server.config.name)
    end_with_parent()
    if (server.config.num_workers or 1) > 1:
        _run_workers(server_class, server.config)
        return None
    app = server.complete_app()
    lane = DirectLane(app, server.config.name)
    served = guarded(DisconnectMiddleware(lane, server.CANCELLABLE_PATHS), server.required_token(), server.config.name)
    collect_garbage_less_often()
    uvicorn.run(served, host=server.config.host, port=server.config.port, **uvicorn_settings())
    return app


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
    os.environ[WORKER_FLAG] = "1"
    os.environ[WORKER_ENTRYPOINT] = str(entrypoint.relative_to(root))
    os.environ[NUM_WORKERS] = str(config.num_workers)
    os.environ[WORKER_FILE] = str(entrypoint)
    uvicorn.run(
        "nemo_gym.servers.run:worker_app",
        factory=True,
        workers=config.num_workers,
        host=config.host,
        port=config.port,
        **uvicorn_settings(),
    )


def worker_app() -> FastAPI:
    """The app of one worker: the one its module offers as `app`, else built from its one server class."""
    end_with_parent(os.getppid())
    module = _load(os.environ[WORKER_ENTRYPOINT], Path(os.environ[WORKER_FILE]))
    offered = getattr(module, "app", None)
    return offered if isinstance(offered, FastAPI) else cast(FastAPI, run_webserver(one_server_class(module)))


def _load(relative: str, entrypoint: Path) -> ModuleType:
    sys.path.append(str(entrypoint.parents[2]))
    return importlib.import_module(relative.removesuffix(".py").replace(os.sep, "."))


def is_nemo_gym_fastapi_entrypoint(file: str) -> bool:
    """Whether `file` is the module that a worker process must offer its `app` from."""
    return bool(os.environ.get(WORKER_FLAG)) and file.endswith(os.environ.get(WORKER_ENTRYPOINT, "\0"))


def per_process_cap(cap: int | None) -> int | None:
    """A cap on the whole server, divided among the processes it runs in; at least 1."""
    if not cap:
        return cap
    processes = int(os.environ.get(NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME) or 1) * int(os.environ.get(NUM_WORKERS) or 1)
    return max(1, -(-cap // processes))


def end_with_parent(parent_pid: int | None = None) -> None:
    """Stop this process when its parent is gone, so that a killed launcher leaves nothing behind."""
    parent = parent_pid or int(os.environ.get(NEMO_GYM_PARENT_PID_ENV_VAR_NAME) or 0)
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
