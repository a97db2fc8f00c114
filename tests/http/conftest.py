"""Real peers on loopback ports: well-behaved ones (uvicorn) and ill-behaved ones (bare sockets)."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
import uvloop
from omegaconf import OmegaConf

from nemo_gym import retry
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import ServerClient
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.http.session import use_client_settings
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig

Scenario = Callable[[ServerClient], Awaitable[Any]]

DEADLINE_S = 20.0


def bound_socket(port: int = 0) -> socket.socket:
    """A bound loopback socket; its protocol is named so that asyncio switches Nagle's algorithm off."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


@contextmanager
def uvicorn_on(app: Any, port: int = 0, **options: Any) -> Iterator[int]:
    """`app` on a loopback port, in a thread of its own."""
    with closing(bound_socket(port)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline_s = time.monotonic() + DEADLINE_S
            while not server.started:
                assert time.monotonic() < deadline_s, "uvicorn did not start"
                time.sleep(0.005)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)


@dataclass
class Peer:
    """A peer that does with each connection what the test says, and keeps what it was sent."""

    port: int
    received: list[bytes] = field(default_factory=list)


@contextmanager
def peer_that(behave: Callable[[socket.socket, int], None]) -> Iterator[Peer]:
    """Read each request to its end, then let `behave(connection, number)` do its worst."""
    with closing(bound_socket()) as listener:
        listener.listen()
        listener.settimeout(0.05)
        peer = Peer(listener.getsockname()[1])
        stopped = threading.Event()
        thread = threading.Thread(target=_accept, args=(listener, peer, behave, stopped))
        thread.start()
        try:
            yield peer
        finally:
            stopped.set()
            thread.join(DEADLINE_S)


def _accept(
    listener: socket.socket, peer: Peer, behave: Callable[[socket.socket, int], None], stopped: threading.Event
) -> None:
    with ExitStack() as connections:
        while not stopped.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connections.enter_context(connection)
            connection.settimeout(5)
            peer.received.append(_read_request(connection))
            behave(connection, len(peer.received))


def _read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            return data
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def answer(status: str, body: bytes = b"{}", *headers: str) -> bytes:
    """An HTTP answer after which the connection is closed."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture
def free_port() -> int:
    with closing(bound_socket()) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Start an ASGI app in a thread; gives its port."""
    with ExitStack() as stack:
        yield lambda app, port=0, **options: stack.enter_context(uvicorn_on(app, port, **options))


@pytest.fixture
def peer() -> Iterator[Callable[[Callable[[socket.socket, int], None]], Peer]]:
    """Start a peer with a behaviour of its own."""
    with ExitStack() as stack:
        yield lambda behave: stack.enter_context(peer_that(behave))


@pytest.fixture
def http_answer() -> Callable[..., bytes]:
    return answer


@pytest.fixture
def configure() -> Iterator[Callable[..., GlobalAIOHTTPAsyncClientConfig]]:
    """Choose settings of the HTTP client for one test; pauses are short unless the test says otherwise."""

    def choose(**settings: Any) -> GlobalAIOHTTPAsyncClientConfig:
        short = {"http_retry_first_delay_s": 0.01, "http_retry_max_delay_s": 0.05, "model_retry_first_delay_s": 0.01}
        chosen = GlobalAIOHTTPAsyncClientConfig(**{**short, **settings})
        use_client_settings(chosen)
        return chosen

    yield choose
    use_client_settings(None)


@pytest.fixture(autouse=True)
def _forget_warnings() -> None:
    retry._last_warning.clear()


def _client_for(port: int) -> ServerClient:
    block = {"resources_servers": {"tools_impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"tools": block}),
    )


@asynccontextmanager
async def _listening(app: Any, port: int) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn offers nothing to wait for
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


@pytest.fixture
def client_for() -> Callable[[int], ServerClient]:
    """A client whose config has one server, `tools`, at a port."""
    return _client_for


@pytest.fixture
def listening() -> Callable[[Any, int], AbstractAsyncContextManager[int]]:
    """An app on a loopback port, in the running event loop."""
    return _listening


@pytest.fixture(params=["http", "memory"])
def run_with(request: pytest.FixtureRequest, free_port: int) -> Callable[[Any, Scenario], Any]:
    """Run a scenario against an app, over HTTP or in memory."""

    async def run(app: Any, scenario: Scenario) -> Any:
        if request.param == "memory":
            register_local_app("tools", app, [("127.0.0.1", free_port)])
            return await scenario(_client_for(free_port))
        async with _listening(app, free_port):
            return await scenario(_client_for(free_port))

    return lambda app, scenario: asyncio.run(run(app, scenario))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine in each kind of event loop."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(work, 2 * DEADLINE_S))

    return run


@pytest.fixture
def in_memory() -> Callable[..., Awaitable[Any]]:
    """Run a scenario against an app in the running event loop, in memory."""

    async def run(app: Any, scenario: Scenario, **options: Any) -> Any:
        register_local_app("tools", app, [("127.0.0.1", 1)], **options)
        return await scenario(_client_for(1))

    return run
