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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
except ImportError:  # without httptools uvicorn has another way, and this module says nothing about it
    HttpToolsProtocol = RequestResponseCycle = STATUS_LINE = None  # type: ignore[assignment, misc]

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.http.settings import replaceable
from nemo_gym.http.transports.memory import Answer
from nemo_gym.http.transports.response import RawHeaders
from nemo_gym.http.transports.wire_connection import LONGEST_AT_ONCE_BYTES, LongBody
from nemo_gym.keys import (
    DRY_RUN_KEY_NAME,
    NUM_WORKERS_ENV_VAR_NAME,
    RAY_HEAD_NODE_ADDRESS_KEY_NAME,
    VERBOSE_KEY_NAME,
)
from nemo_gym.log import prefix_output, setup_logging, tell_what_was_counted
from nemo_gym.process_inputs import launcher_pid, num_replicas, num_workers, require_instance
from nemo_gym.runtime import collect_garbage_less_often, raise_open_file_limit
from nemo_gym.servers.auth import AuthMiddleware
from nemo_gym.servers.base import one_server_class
from nemo_gym.servers.direct import DirectLane
from nemo_gym.servers.middleware import CALLER, DisconnectMiddleware
from nemo_gym.terminal import harmless

if TYPE_CHECKING:
    from nemo_gym.servers.base import SimpleServer

logger = logging.getLogger(__name__)

IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME = "IS_NEMO_GYM_FASTAPI_WORKER"
IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME = "IS_NEMO_GYM_FASTAPI_ENTRYPOINT"
WORKER_FILE = "NEMO_GYM_FASTAPI_ENTRYPOINT_FILE"
NEMO_GYM_FASTAPI_NUM_WORKERS = NUM_WORKERS_ENV_VAR_NAME
_COPIED_UP_TO_BYTES = 64 * 1024
_LONG_BODY_BYTES = 128 * 1024
_AT_ONCE_BYTES = 4_000_000
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})


def run_webserver(server_class: "type[SimpleServer]") -> FastAPI | None:
    """Serve `server_class` as the process's config says, until stopped."""
    config = get_global_config_dict()
    setup_logging(verbose=bool(config.get(VERBOSE_KEY_NAME)))
    if is_nemo_gym_fastapi_worker():
        server = server_class.from_global_config()
        prefix_output(server.config.name)
        app = server.complete_app()
        app.add_middleware(DisconnectMiddleware, paths=server_class.CANCELLABLE_PATHS)
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
    lane = DirectLane(app, server.config.name)
    served = AuthMiddleware(DisconnectMiddleware(lane, server.CANCELLABLE_PATHS), **server.who_may_call(app))
    collect_garbage_less_often()
    _end_with_everything_told()
    uvicorn.run(served, host=server.config.host, port=server.config.port, **uvicorn_settings())
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
        "http": "auto" if HttpToolsProtocol is None else HttpProtocol,
        "ws": "none",
        "proxy_headers": False,
        "server_header": False,
        "date_header": False,
    }


class _HeadWithBody:
    """The connection as the answer to one request sees it: its head waits for the body, and goes out together with it.

    That is one write instead of two for nearly every answer. Where no length is announced, the head goes first.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: "RequestResponseCycle", transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """Keep the head; send it with whatever follows, and be out of the way from then on."""
        cycle = self._cycle
        if not self._head and cycle.response_started:
            if cycle.chunked_encoding is False and cycle.scope["method"] != "HEAD":
                self._head = data
                return
            cycle.transport = self._transport
        elif self._head:
            self._flush(data)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Send what there is, and close."""
        if self._head:
            self._flush(b"")
        self._transport.close()

    def _flush(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        head, self._head = self._head, b""
        _write(self._transport, head, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _write(transport: asyncio.Transport, head: bytes, body: bytes) -> None:
    if len(body) < _COPIED_UP_TO_BYTES:
        transport.write(head + body)
    else:
        transport.writelines((head, body))


if HttpToolsProtocol is not None:

    class HttpProtocol(HttpToolsProtocol):
        """Uvicorn's HTTP, with one write per answer; to servers, the `Caller` of what comes over a connection."""

        when_gone: Callable[[], object] | None = None

        def data_received(self, data: bytes) -> None:
            """Asyncio: some bytes; if a long body begins with them, its rest need not come in pieces."""
            super().data_received(data)
            cycle = self.cycle
            if cycle is not None and cycle.more_body and cycle.body and not self.pipeline:
                length = _announced_length(cycle)
                if _LONG_BODY_BYTES <= length <= LONGEST_AT_ONCE_BYTES:
                    cycle.receive = _WholeBody(self, cycle, length)  # type: ignore[method-assign]

        def read_on(self, beginning: bytearray, length: int) -> "asyncio.Future[bytes | None]":
            """All of a body; None when its caller goes before it is there."""
            whole: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

            def end(body: bytes, is_complete: bool) -> None:
                if not whole.done():
                    whole.set_result(body if is_complete else None)

            self.parser = httptools.HttpRequestParser(self)  # which has seen nothing of this request
            if hasattr(self.parser, "set_dangerous_leniencies"):
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            LongBody(self, self.transport, length, beginning, end)
            self.flow.resume_reading()
            return whole

        def on_headers_complete(self) -> None:
            """Parser: there is a request, whose task does not run before this has returned."""
            super().on_headers_complete()
            cycle = self.cycle
            if cycle is not None and cycle.scope is self.scope:
                scope: Any = self.scope
                scope[CALLER] = self
                cycle.transport = cast(asyncio.Transport, _HeadWithBody(cycle, self.transport))

        def connection_lost(self, exc: Exception | None) -> None:
            """Asyncio: the connection is gone; whoever works for its caller is told."""
            super().connection_lost(exc)
            if self.when_gone is not None and self.cycle.disconnected:
                self.when_gone()

        def take(self, answer: Answer) -> bool:
            """Send a whole answer as uvicorn would, without looking at every part of it."""
            cycle = self.cycle
            status, headers, body, _ = answer
            is_usual = cycle.keep_alive and not (cycle.response_started or cycle.disconnected or cycle.access_log)
            if not is_usual or self.pipeline or self.flow.write_paused or cycle.scope["method"] != "POST":
                return False
            head = _head(status, headers, len(body))
            if head is None or cycle.default_headers:
                return False
            cycle.transport = self.transport
            cycle.response_started = cycle.response_complete = True
            cycle.waiting_for_100_continue = cycle.chunked_encoding = False
            _write(self.transport, head, body)
            cycle.message_event.set()
            cycle.on_response()
            return True


class _WholeBody:
    """The `receive` of a request whose long body has begun to come: who asks for it gets it in one piece.

    Nothing more of it is read before, so that nobody has to keep what nobody wants.
    """

    def __init__(self, protocol: "HttpProtocol", cycle: "RequestResponseCycle", length: int) -> None:
        self._protocol, self._cycle, self._length = protocol, cycle, length

    async def __call__(self) -> Any:
        cycle = self._cycle
        vars(cycle).pop("receive", None)  # or else the two keep each other, and what the request has
        if cycle.more_body and cycle.body and not (cycle.disconnected or cycle.response_complete):
            beginning, cycle.body = cycle.body, bytearray()
            whole = await self._protocol.read_on(beginning, self._length)
            cycle.more_body = False
            if whole is not None and not cycle.response_complete:
                cycle.message_event.clear()
                return {"type": "http.request", "body": whole, "more_body": False}
        return await RequestResponseCycle.receive(cycle)


def _announced_length(cycle: "RequestResponseCycle") -> int:
    """How long the body of a request is; 0 where only the parser can tell."""
    headers = dict(cycle.scope["headers"])
    length = headers.get(b"content-length", b"")
    is_plain = b"transfer-encoding" not in headers and b"upgrade" not in headers and length.isdigit()
    return int(length) if is_plain and not cycle.waiting_for_100_continue else 0


def _head(status: int, headers: RawHeaders, length: int) -> bytes | None:
    """The head of a whole answer, if it is one of ours; others are for uvicorn to judge."""
    if status not in STATUS_LINE or headers[0] != (b"content-length", b"%d" % length) or length > _AT_ONCE_BYTES:
        return None
    lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in headers], b"\r\n"]
    for name, _ in headers[1:]:
        if name in _FRAMING or not name.islower():
            return None
    head = b"".join(lines)
    return head if head.count(b"\n") == head.count(b"\r") == len(lines) and b"\0" not in head else None


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


def worker_app() -> AuthMiddleware:
    """The app of one worker: the one its module offers as `app`, else built from its one server class."""
    end_with_parent(os.getppid())
    module = _load(os.environ[IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME], Path(os.environ[WORKER_FILE]))
    offered = getattr(module, "app", None)
    app = offered if isinstance(offered, FastAPI) else cast(FastAPI, run_webserver(one_server_class(module)))
    return AuthMiddleware(app, get_global_config_dict(), require_instance(), described_by=app)


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
            "a server asks for Ray, which is not installed; install the extra: pip install '.[ray]'"
        ) from error
