"""Who has no token is turned away, whichever way a server runs; who calls in memory needs none."""

import asyncio
import http.client
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI
from omegaconf import OmegaConf
from starlette.responses import RedirectResponse

import nemo_gym.global_config
from nemo_gym.base_resources_server import BaseResourcesServerConfig, BaseVerifyResponse, SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import find_open_port
from nemo_gym.http.client import ServerClient
from nemo_gym.http.errors import HeadServerError, ServerResponseError, ServerUnreachableError
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.http.request import raise_for_status
from nemo_gym.server_status import StatusCommand
from nemo_gym.server_utils import HeadServer
from nemo_gym.servers.auth import CallerCheck
from nemo_gym.servers.gateway import Duties, Gateway
from tests.http.conftest import answer, peer_that, uvicorn_on
from tests.servers.conftest import Running, starter, write_server

TOKEN = "a-token-of-this-test"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module", params=["hosted", "process", "workers"])
def locked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The probe server behind a token, once in each mode."""
    folder = tmp_path_factory.mktemp(request.param)
    for start_server in starter(folder):
        yield start_server(request.param, write_server(folder / "elsewhere"), auth_token=TOKEN)


def test_the_right_token_opens_every_path(locked: Running) -> None:
    assert locked.call("/echo", {"a": 1}, headers=RIGHT).json["body"] == {"a": 1}
    assert locked.call("/echo", {}, headers={"Authorization": f"bearer {TOKEN}"}).status == 200
    assert locked.call("/openapi.json", method="GET", headers=RIGHT).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"X-Api-Key": TOKEN},
        {"nemo_gym.admitted": "true"},
    ],
)
def test_any_other_is_refused_with_a_reason(locked: Running, headers: dict[str, str]) -> None:
    refused = locked.call("/echo", {}, headers=headers)

    assert refused.status == 401
    assert refused.headers["www-authenticate"] == 'Bearer realm="nemo_gym"'
    assert "`auth_token`" in refused.json["detail"]
    assert refused.headers["x-nemo-gym-error-server"] == "probe_one"
    assert TOKEN not in refused.body.decode()
    assert refused.cookies == {}


def test_only_asking_whether_it_is_up_needs_no_token(locked: Running) -> None:
    assert [locked.call(path, method="GET").status for path in ("/", "/health")] == [200, 200]
    assert [locked.call(path, {}).status for path in ("/", "/health", "/nowhere")] == [401, 401, 401]
    assert [locked.call(path, method="GET").status for path in ("/openapi.json", "/docs", "//", "/health/")] == [
        401
    ] * 4


def test_a_stranger_is_refused_before_the_body_is_read(locked: Running) -> None:
    connection = http.client.HTTPConnection(locked.url.partition("://")[2], timeout=20)
    connection.putrequest("POST", "/v1/responses")
    connection.putheader("Content-Length", "1000000000")
    connection.endheaders()

    assert connection.getresponse().status == 401
    connection.close()


def test_the_log_shows_strangers_and_not_the_token(locked: Running) -> None:
    locked.call("/echo", {})

    text = locked.log.read_text()
    assert "refused with 401 (1 so far): probe_one answers only to callers with the token" in text
    assert TOKEN not in text


class Tool(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: Any) -> BaseVerifyResponse:
        raise AssertionError

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/ping")(lambda: "pong")
        app.post("/elsewhere")(lambda: RedirectResponse("/ping", 307))
        return app


def built_elsewhere(token: str | None) -> FastAPI:
    """A server the way a foreign launcher builds it: from its class, without our `run_webserver`."""
    config = BaseResourcesServerConfig(name="tools", host="127.0.0.1", port=1, entrypoint="app.py", domain="other")
    client = MagicMock(spec=ServerClient)
    client.global_config_dict = OmegaConf.create({"auth_token": token})
    server = Tool(config=config, server_client=client)
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    return app


def client_of(port: int, token: str | None) -> ServerClient:
    block = {"resources_servers": {"tools_impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"tools": block, "auth_token": token}),
    )


def post(client: ServerClient, path: str, **kwargs: Any) -> Any:
    async def call() -> Any:
        response = await client.post("tools", path, **kwargs)
        await raise_for_status(response)
        return await response.json()

    return asyncio.run(call())


def test_our_client_shows_the_token_of_its_config_and_another_is_told_what_is_missing() -> None:
    with uvicorn_on(built_elsewhere(TOKEN)) as port:
        assert post(client_of(port, TOKEN), "/ping", json={}) == "pong"
        assert post(client_of(port, TOKEN), "/elsewhere", json={}) == "pong"
        with pytest.raises(ServerUnreachableError, match=r"it knows another token.*auth_token") as failure:
            post(client_of(port, "some-other"), "/ping", json={})
        with pytest.raises(ServerResponseError, match="401"):
            post(client_of(port, TOKEN), "/ping", json={}, headers={"authorization": "Bearer of my own"})

    assert TOKEN not in repr(failure.value)
    assert "some-other" not in repr(failure.value)


def test_a_call_in_memory_needs_no_token_and_its_redirect_over_http_takes_it_along() -> None:
    app = built_elsewhere(TOKEN)

    async def calls(port: int) -> list[Any]:
        register_local_app("tools", app, [("127.0.0.1", port)])
        without, having = client_of(port, None), client_of(port, TOKEN)
        answers = [await without.post("tools", "/ping", json={}), await without.post("tools", "/elsewhere", json={})]
        answers.append(await having.post("tools", "/elsewhere", json={}))
        return [answer.status for answer in answers]

    with uvicorn_on(app) as port:
        assert asyncio.run(calls(port)) == [200, 401, 200]


def test_the_token_does_not_follow_a_redirect_to_another_host() -> None:
    def keep(connection: socket.socket, _number: int) -> None:
        connection.sendall(answer("200 OK", b'"mine now"'))

    with peer_that(keep) as stranger:
        app = FastAPI()
        app.post("/away")(lambda: RedirectResponse(f"http://127.0.0.1:{stranger.port}/", 307))
        config = OmegaConf.create({"auth_token": TOKEN})
        app.add_middleware(Gateway, duties=Duties("tools", callers=CallerCheck(config, "tools", described_by=app)))

        async def in_memory(client: ServerClient, port: int) -> Any:
            register_local_app("tools", app, [("127.0.0.1", port)])
            return await (await client.post("tools", "/away", json={})).json(content_type=None)

        with uvicorn_on(app) as port:
            client = client_of(port, TOKEN)
            assert asyncio.run(in_memory(client, port)) == "mine now"
            asyncio.run(client.post("tools", "/away", json={}))

    assert len(stranger.received) == 2
    assert not any(TOKEN.encode() in request for request in stranger.received)


@pytest.fixture
def locked_head(monkeypatch: pytest.MonkeyPatch) -> Iterator[BaseServerConfig]:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({}))
    address = {"host": "127.0.0.1", "port": find_open_port()}
    config = OmegaConf.create({"head_server": address, "auth_token": TOKEN})
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", config)
    server, thread, head = HeadServer.run_webserver()
    head.set_server_instances([{"process_name": "x", "server_type": "resources_servers", "name": "y"}])
    yield BaseServerConfig.model_validate(address)
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_the_head_server_answers_only_to_the_token_and_never_tells_it(
    locked_head: BaseServerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = ServerClient.load_from_global_config(locked_head)
    assert client.global_config_dict.auth_token == "****"
    assert client.auth_token == TOKEN
    assert [server.process_name for server in StatusCommand(locked_head).discover_servers()] == ["x"]

    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({}))
    with pytest.raises(HeadServerError, match=r"answers only to callers with the token.*has none.*env\.yaml"):
        ServerClient.load_from_global_config(locked_head)
    assert StatusCommand(locked_head).discover_servers() == []
    assert "answers only to callers with the token" in caplog.text
    assert client.poll_for_status("head_server") == "success"

    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({"auth_token": "wrong"}))
    with pytest.raises(HeadServerError, match="the one in this command's config is another"):
        ServerClient.load_from_global_config(locked_head)
