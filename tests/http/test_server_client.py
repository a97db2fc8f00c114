import asyncio
import pickle
import socket
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI, Request
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError, ServerRefNotFoundError
from nemo_gym.http import session
from nemo_gym.http.client import ServerClient, get_server_url, setup_server_client
from nemo_gym.http.errors import HeadServerError, ServerUnreachableError
from nemo_gym.http.request import get_response_json
from nemo_gym.http.session import current_settings, get_global_aiohttp_client, use_client_settings
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig

Serve = Callable[..., int]
Configure = Callable[..., Any]
StartPeer = Callable[[Callable[[socket.socket, int], None]], Any]


def instance(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "host": host, "port": port}}}


def client_with(**instances: dict[str, Any]) -> ServerClient:
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(instances)
    )


def named_app(name: str) -> FastAPI:
    app = FastAPI()

    @app.post("/run")
    async def run(request: Request) -> dict[str, Any]:
        return {"server": name, "body": (await request.body()).decode()}

    @app.get("/who")
    async def who() -> str:
        return name

    return app


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The public facade as far as its attributes are replaced by tests elsewhere."""
    module = types.ModuleType("nemo_gym.server_utils")
    monkeypatch.setitem(sys.modules, "nemo_gym.server_utils", module)
    return module


@pytest.fixture
def _settings_of_this_test() -> Iterator[None]:
    yield
    use_client_settings(None)


class Row(BaseModel):
    given: int = 0
    left_out: int = 0


def test_servers_are_called_by_name(serve: Serve) -> None:
    client = client_with(one=instance(serve(named_app("one"))), two=instance(serve(named_app("two"))))

    async def calls() -> list[Any]:
        return [
            await get_response_json(await client.get(server_name="one", url_path="/who")),
            await get_response_json(await client.post(server_name="two", url_path="/run", json=Row(given=1))),
            await get_response_json(await client.request("two", "who", method="GET")),
        ]

    assert asyncio.run(calls()) == ["one", {"server": "two", "body": '{"given":1}'}, "two"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    client = client_with(math_agent=instance(1), judge=instance(2), note={"just": "data"})

    with pytest.raises(ServerRefNotFoundError) as caught:
        asyncio.run(client.post("math_agnet", "/run"))

    assert isinstance(caught.value, ConfigError)
    assert str(caught.value) == (
        "No server is called 'math_agnet'. Did you mean 'math_agent'? Configured servers: judge, math_agent"
    )


def test_a_config_without_servers_says_so() -> None:
    with pytest.raises(ServerRefNotFoundError, match="defines no servers"):
        asyncio.run(client_with().get("x", "/"))


def test_a_server_without_an_address_says_so() -> None:
    client = client_with(late={"resources_servers": {"x": {"entrypoint": "app.py"}}})

    with pytest.raises(ServerRefNotFoundError, match="'late' has no address"):
        asyncio.run(client.get("late", "/"))


def test_changes_of_the_config_are_noticed(serve: Serve) -> None:
    ports = {name: serve(named_app(name)) for name in ("one", "two", "three", "four")}
    client = client_with(server=instance(ports["one"], host="${where}"))
    client.global_config_dict["where"] = "127.0.0.1"

    async def ask() -> Any:
        return await get_response_json(await client.get("server", "/who"))

    async def calls() -> list[Any]:
        answers = [await ask(), await ask()]
        client.global_config_dict.server.responses_api_agents.simple_agent.port = ports["two"]
        answers.append(await ask())
        client.global_config_dict["server"] = instance(ports["three"])
        answers.append(await ask())
        client.global_config_dict = OmegaConf.create({"server": instance(ports["four"])})
        answers.append(await ask())
        return answers

    assert asyncio.run(calls()) == ["one", "one", "two", "three", "four"]


def test_a_dead_server_is_named_in_the_error(free_port: int, configure: Configure) -> None:
    configure(http_retry_max_tries=2)

    with pytest.raises(ServerUnreachableError, match="server 'judge'") as caught:
        asyncio.run(client_with(judge=instance(free_port)).post("judge", "/verify", json={}))

    assert caught.value.server_name == "judge"


def test_runs_are_spread_over_replicas_and_go_round_the_dead_one(
    serve: Serve, free_port: int, configure: Configure
) -> None:
    configure()
    first, second = serve(named_app("first")), serve(named_app("second"))
    client = client_with(agent=instance(first))
    client.set_replicas("agent", [("127.0.0.1", port) for port in (free_port, first, second)])

    async def many() -> list[Any]:
        answers = await asyncio.gather(*(client.post("agent", "/run", json={}) for _ in range(20)))
        return [(await get_response_json(answer))["server"] for answer in answers]

    async def one_who() -> Any:
        return await get_response_json(await client.get("agent", "/who"))

    shares = Counter(asyncio.run(many()))
    assert set(shares) == {"first", "second"}
    assert min(shares.values()) >= 5
    assert asyncio.run(one_who()) == "first"
    assert [replica.in_flight for replica in client._addresses.replicas["agent"]] == [0, 0, 0]


def test_status_is_asked_without_an_event_loop(
    serve: Serve, free_port: int, peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    garbage = peer(lambda connection, number: connection.sendall(b"220 mail server ready\r\n"))
    hangs_up = peer(lambda connection, number: connection.close())
    client = client_with(
        up=instance(serve(FastAPI())),
        down=instance(free_port),
        odd=instance(garbage.port),
        shy=instance(hangs_up.port),
        lost=instance(1, host="no-such-host.invalid"),
    )
    client.head_server_config.port = free_port

    found = {name: client.poll_for_status(name) for name in ("up", "down", "odd", "shy", "lost", "head_server")}

    assert found == {
        "up": "success",
        "down": "connection_error",
        "odd": "unknown_error",
        "shy": "connection_error",
        "lost": "connection_error",
        "head_server": "connection_error",
    }


def test_a_server_that_accepts_and_says_nothing_is_a_timeout(peer: StartPeer) -> None:
    from nemo_gym.http.addresses import Address, probe

    silent = peer(lambda connection, number: None)

    assert probe(Address("127.0.0.1", silent.port), timeout_s=0.1) == "timeout"


def head_app(config: Any) -> FastAPI:
    app = FastAPI()

    @app.get("/global_config_dict_yaml")
    async def yaml() -> Any:
        return config

    return app


def test_the_config_comes_from_the_head_server(serve: Serve) -> None:
    text = OmegaConf.to_yaml(OmegaConf.create({"agent": instance(5), "where": "${oc.env:HOME}"}))
    head = BaseServerConfig(host="127.0.0.1", port=serve(head_app(text)))

    client = ServerClient.load_from_global_config(head)

    assert client.head_server_config == head
    assert client.global_config_dict.agent.responses_api_agents.simple_agent.port == 5


def test_a_head_server_that_is_not_there_is_explained(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/global_config_dict_yaml"

    with pytest.raises(HeadServerError, match=f"Could not connect to the head server at {url}") as caught:
        ServerClient.load_from_global_config(BaseServerConfig(host="127.0.0.1", port=free_port))

    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ConfigError)
    assert "ng_run" in str(caught.value)
    assert "+head_server.port" in str(caught.value)


@pytest.mark.parametrize("app", [FastAPI(), head_app(7), head_app("- a list"), head_app("a: [")])
def test_what_answers_but_is_no_head_server_is_recognised(app: FastAPI, serve: Serve) -> None:
    head = BaseServerConfig(host="127.0.0.1", port=serve(app))

    with pytest.raises(HeadServerError, match="is not a head server"):
        ServerClient.load_from_global_config(head)


def test_a_partly_given_head_server_is_completed(facade: types.ModuleType) -> None:
    facade.get_global_config_dict = lambda: OmegaConf.create({"head_server": {"port": 123}})  # type: ignore[attr-defined]

    assert ServerClient.load_head_server_config() == BaseServerConfig(host="127.0.0.1", port=123)


@pytest.mark.usefixtures("_settings_of_this_test")
def test_names_replaced_on_the_facade_take_effect(facade: types.ModuleType) -> None:
    config = OmegaConf.create({"agent": instance(77), "global_aiohttp_connector_limit": 3})
    made = client_with(agent=instance(77))
    facade.get_global_config_dict = lambda: config  # type: ignore[attr-defined]
    facade.ServerClient = MagicMock()  # type: ignore[attr-defined]
    facade.ServerClient.load_from_global_config.return_value = made
    facade._GLOBAL_AIOHTTP_CLIENT_REQUEST_DEBUG = True  # type: ignore[attr-defined]

    assert get_server_url("agent") == "http://127.0.0.1:77"
    assert current_settings().global_aiohttp_connector_limit == 3
    assert setup_server_client() is made
    assert session.is_global_aiohttp_client_request_debug_enabled()


def test_a_replaced_session_is_the_one_that_is_used(facade: types.ModuleType, serve: Serve) -> None:
    port = serve(named_app("real"))
    asked: list[str] = []

    class Recorder:
        def request(self, method: str, url: str, **kwargs: Any) -> Any:
            asked.append(f"{method} {url}")
            return get_global_aiohttp_client().request(method, url, **kwargs)

    facade.get_global_aiohttp_client = Recorder  # type: ignore[attr-defined]

    async def call() -> Any:
        return await get_response_json(await client_with(agent=instance(port)).get("agent", "/who"))

    assert asyncio.run(call()) == "real"
    assert asked == [f"GET http://127.0.0.1:{port}/who"]


@pytest.mark.usefixtures("_settings_of_this_test")
def test_a_client_follows_the_settings_of_its_run_unless_the_process_has_its_own(
    serve: Serve, facade: types.ModuleType
) -> None:
    run = "http_total_timeout_s: 11\nhttp_connect_timeout_s: 12\n"
    facade.get_global_config_dict = lambda: OmegaConf.create({"http_connect_timeout_s": 5})  # type: ignore[attr-defined]

    setup_server_client(BaseServerConfig(host="127.0.0.1", port=serve(head_app(run))))

    assert current_settings() == GlobalAIOHTTPAsyncClientConfig(http_total_timeout_s=11, http_connect_timeout_s=5)


def test_addresses_are_written_as_urls() -> None:
    client = client_with(six=instance(80, host="::1"))

    assert client._build_server_base_url(DictConfig({"host": "h", "port": 1})) == "http://h:1"
    assert client._address_of("six")[1] == "http://[::1]:80"
    assert client._address_of("head_server")[1] == "http://127.0.0.1:1"


def test_a_mock_takes_its_place_in_other_peoples_tests() -> None:
    class Server(BaseModel):
        server_client: ServerClient

    mock = MagicMock(spec=ServerClient)

    assert Server(server_client=mock).server_client is mock
    assert {"post", "get", "request", "poll_for_status"} <= set(dir(mock))


def test_a_client_survives_pickling(serve: Serve) -> None:
    client = client_with(agent=instance(serve(named_app("agent"))))

    async def ask(client: ServerClient) -> Any:
        return await get_response_json(await client.get("agent", "/who"))

    asyncio.run(ask(client))
    copy = pickle.loads(pickle.dumps(client))

    assert asyncio.run(ask(copy)) == "agent"
