"""Who listens where a server of the run should be learns no token, gets no request and is told from the server."""

import asyncio
import json
import logging
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request
from omegaconf import OmegaConf

import nemo_gym.global_config
from nemo_gym.config.secrets import CHALLENGE_HEADER, PROOF_PATH, proof_of
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import find_open_port
from nemo_gym.http.client import ServerClient
from nemo_gym.http.errors import HeadServerError, ServerCallTimeoutError, ServerResponseError, ServerUnreachableError
from nemo_gym.http.request import raise_for_status
from nemo_gym.server_status import StatusCommand
from nemo_gym.server_utils import HeadServer
from nemo_gym.servers.auth import CallerCheck
from nemo_gym.servers.gateway import Duties, Gateway
from tests.http.conftest import answer, uvicorn_on

TOKEN = "the-token-of-this-run"
BODY = {"prompt": "worth keeping"}
OVER_AIOHTTP = {"timeout": aiohttp.ClientTimeout(total=20, sock_read=20)}
"""Bounds of parts of a call are what bare connections do not know."""

Behaviour = Callable[[bytes], bytes]
"""What an impostor answers to a request."""


class Impostor(socketserver.ThreadingTCPServer):
    """Somebody who listens at a port, takes down what he is told, and answers as `behave` says."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, behave: Behaviour, port: int = 0) -> None:
        self.received: list[bytes] = []
        self.behave = behave
        super().__init__(("127.0.0.1", port), _Conversation)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def server_close(self) -> None:
        self.shutdown()
        self._thread.join(20)
        super().server_close()


class _Conversation(socketserver.BaseRequestHandler):
    server: Impostor

    def handle(self) -> None:
        self.request.settimeout(20)
        if heard := self.request.recv(65536):
            self.server.received.append(heard)
            self.request.sendall(self.server.behave(heard))


def says(status: str, body: bytes) -> Behaviour:
    return lambda _heard: answer(status, body)


IMPOSTORS: dict[str, Behaviour] = {
    "says yes to everything": says("200 OK", b'{"status": "ok"}'),
    "has a config": says("200 OK", json.dumps("policy_model: {}").encode()),
    "makes a proof up": says("200 OK", json.dumps({"proof": "0" * 64, "port": 1}).encode()),
    "proves with a number": says("200 OK", b'{"proof": 7}'),
    "proves with odd letters": says("200 OK", '{"proof": "é\\ud800"}'.encode()),
    "nests deeply": says("200 OK", b"[" * 100_000),
    "proves with another token": says("200 OK", json.dumps({"proof": proof_of("x", "", 1)}).encode()),
    "asks for the token": says("401 Unauthorized", b'{"detail": "send `Authorization: Bearer <token>`"}'),
    "has no such page": says("404 Not Found", b"{}"),
    "fails": says("500 Internal Server Error", b""),
    "hangs up": lambda _heard: b"",
    "speaks no HTTP": lambda _heard: b"\x16\x03\x01 not HTTP at all\r\n\r\n",
}


@pytest.fixture(params=list(IMPOSTORS))
def impostor(request: pytest.FixtureRequest) -> Iterator[Impostor]:
    with Impostor(IMPOSTORS[request.param]) as listening:
        yield listening
    assert listening.received
    for received in listening.received:
        assert received.startswith(f"GET {PROOF_PATH} ".encode())
        assert TOKEN.encode() not in received
        assert b"authorization" not in received.lower()
        assert b"worth keeping" not in received


@pytest.fixture
def has_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({"auth_token": TOKEN}))


def client_of(port: int, token: str | None = TOKEN) -> ServerClient:
    block = {"resources_servers": {"tools_impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"tools": block, "auth_token": token}),
    )


def call(client: ServerClient, times: int = 1, **options: Any) -> list[Any]:
    async def calls() -> list[Any]:
        answers = []
        for _ in range(times):
            response = await client.post("tools", "/echo", json=BODY, **options)
            await raise_for_status(response)
            answers.append(await response.json())
        return answers

    return asyncio.run(calls())


def app_with(token: str | None, asked: Counter[str] | None = None) -> FastAPI:
    """A server that wants `token`, and counts what it is asked."""
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> Any:
        return await request.json()

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        if asked is not None and scope["type"] == "http":
            asked[scope["path"]] += 1
        await app(scope, receive, send)

    callers = CallerCheck(OmegaConf.create({"auth_token": token}), "tools", described_by=app)
    app.add_middleware(Gateway, duties=Duties("tools", callers=callers))
    return app if asked is None else counting  # type: ignore[return-value]


@pytest.mark.usefixtures("has_token")
def test_no_command_shows_its_token_to_who_listens_in_the_place_of_the_head(
    impostor: Impostor, caplog: pytest.LogCaptureFixture
) -> None:
    head = BaseServerConfig(host="127.0.0.1", port=impostor.port)

    with pytest.raises(HeadServerError, match=r"does not prove that it has the token|Could not connect") as failure:
        ServerClient.load_from_global_config(head)
    assert TOKEN not in str(failure.value)
    with caplog.at_level(logging.WARNING):
        assert StatusCommand(head).discover_servers() == []
    assert len(caplog.records) == 1
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("options", [{}, OVER_AIOHTTP], ids=["bare", "aiohttp"])
def test_no_call_reaches_who_listens_in_the_place_of_a_server(impostor: Impostor, options: dict[str, Any]) -> None:
    with pytest.raises(ServerUnreachableError, match="does not prove that it has the token") as failure:
        call(client_of(impostor.port), **options)
    assert TOKEN not in str(failure.value)


@pytest.mark.parametrize("options", [{}, OVER_AIOHTTP], ids=["bare", "aiohttp"])
def test_who_takes_over_the_port_of_a_dead_server_gets_nothing(options: dict[str, Any]) -> None:
    port = find_open_port()
    client = client_of(port)

    async def calls() -> Impostor:
        with uvicorn_on(app_with(TOKEN), port):
            response = await client.post("tools", "/echo", json=BODY, **options)
            assert await response.json() == BODY
        await asyncio.sleep(0.1)  # the loop stood still above: let it see that the connection is gone
        with Impostor(says("200 OK", b'{"reward": 1.0}'), port) as stranger:
            failed = await asyncio.gather(client.post("tools", "/echo", json=BODY, **options), return_exceptions=True)
            assert isinstance(failed[0], ServerUnreachableError)
        with uvicorn_on(app_with(TOKEN), port):
            response = await client.post("tools", "/echo", json=BODY, **options)
            assert await response.json() == BODY
        return stranger

    stranger = asyncio.run(calls())
    assert stranger.received
    assert not any(TOKEN.encode() in received or b"worth keeping" in received for received in stranger.received)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    address = {"host": "127.0.0.1", "port": find_open_port()}
    config = OmegaConf.create({"head_server": address, "auth_token": TOKEN})
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", config)
    server, thread, _ = HeadServer.run_webserver()
    yield int(str(address["port"]))
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_who_passes_challenges_on_to_a_real_server_is_found_out(head: int) -> None:
    passed_back: list[bytes] = []

    def relay(heard: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", head), timeout=10) as real:
            real.sendall(heard)
            passed_back.append(real.recv(65536))
        return passed_back[-1]

    with Impostor(relay) as between, pytest.raises(HeadServerError, match=f"a server on port {head} says"):
        ServerClient.load_from_global_config(BaseServerConfig(host="127.0.0.1", port=between.port))
    assert b'"proof"' in passed_back[0]
    assert not any(TOKEN.encode() in received for received in between.received)

    assert ServerClient.load_from_global_config(BaseServerConfig(host="127.0.0.1", port=head)).auth_token == TOKEN


def test_a_proof_cannot_be_used_again() -> None:
    port = find_open_port()
    old = json.dumps({"proof": proof_of(TOKEN, "a challenge of long ago", port), "port": port}).encode()

    with Impostor(says("200 OK", old), port), pytest.raises(ServerUnreachableError, match="it knows another token"):
        call(client_of(port))


@pytest.mark.parametrize("options", [{}, OVER_AIOHTTP], ids=["bare", "aiohttp"])
def test_a_server_proves_itself_once_per_connection(options: dict[str, Any]) -> None:
    asked: Counter[str] = Counter()
    with uvicorn_on(app_with(TOKEN, asked)) as port:
        assert call(client_of(port), times=20, **options) == [BODY] * 20

    assert asked == {PROOF_PATH: 1, "/echo": 20}


def test_a_run_without_a_token_is_asked_for_no_proof() -> None:
    asked: Counter[str] = Counter()
    with uvicorn_on(app_with(None, asked)) as port:
        assert call(client_of(port, None), times=3) == [BODY] * 3
        assert asked == {"/echo": 3}
        with pytest.raises(ServerUnreachableError, match="started with another or without one"):
            call(client_of(port))
    with uvicorn_on(app_with(TOKEN)) as port, pytest.raises(ServerResponseError, match="401"):
        call(client_of(port, None))


def test_no_page_gets_a_proof() -> None:
    headers = {CHALLENGE_HEADER: "x", "Origin": "http://evil.example"}

    async def ask(port: int) -> int:
        url = f"http://127.0.0.1:{port}{PROOF_PATH}"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            return response.status

    with uvicorn_on(app_with(TOKEN)) as port:
        assert asyncio.run(ask(port)) == 403


def test_many_calls_at_once_are_each_over_a_proven_connection() -> None:
    asked: Counter[str] = Counter()

    async def calls(client: ServerClient) -> list[int]:
        responses = await asyncio.gather(*(client.post("tools", "/echo", json=BODY) for _ in range(50)))
        return [response.status for response in responses]

    with uvicorn_on(app_with(TOKEN, asked)) as port:
        assert asyncio.run(calls(client_of(port))) == [200] * 50
    assert asked["/echo"] == 50
    assert 1 <= asked[PROOF_PATH] <= 50


@pytest.mark.parametrize("options", [{"timeout": 0.3}, {"timeout": aiohttp.ClientTimeout(total=0.3, sock_read=9)}])
def test_who_never_answers_the_challenge_is_waited_for_no_longer_than_the_call_allows(options: dict[str, Any]) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(ServerCallTimeoutError, match="No answer in time"):
        call(client_of(silent.getsockname()[1]), **options)
