"""Tools over MCP: what is offered, what is refused when a server starts, and the protocol's edges."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import Body, Depends, FastAPI, Request
from fastapi.testclient import TestClient
from omegaconf import OmegaConf
from pydantic import BaseModel, Field
from starlette.middleware.gzip import GZipMiddleware

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.mcp_auto_exposure import TOKEN_HEADER, MCPTool, bind_route, harvest_tools
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient

ROW: dict[str, Any] = {"responses_create_params": {"input": []}}


class Numbers(BaseModel):
    first: int
    second: int = 0


class Tools(SimpleResourcesServer):
    config: BaseResourcesServerConfig
    ended: list[str] = Field(default_factory=list)
    further: Any = None

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add")(self.add)
        if self.further is not None:
            self.further(app)
        return app

    async def add(self, body: Numbers, request: Request) -> dict[str, Any]:
        """The sum."""
        return {"sum": body.first + body.second, "session": request.session[SESSION_ID_KEY]}

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


class Silent(Tools):
    def mcp_tools(self, harvested: list[MCPTool], catchall: Any | None) -> list[MCPTool] | None:
        return [catchall.tool("get"), catchall.tool("get")] if catchall else None


def server(kind: type[Tools] = Tools, further: Any = None, **settings: Any) -> Tools:
    config = BaseResourcesServerConfig(
        host="127.0.0.1", port=1, entrypoint="app.py", name="tools", **{"expose_tools_over_mcp": True, **settings}
    )
    client = MagicMock(spec=ServerClient)
    client.global_config_dict = {"session_secret": "of this test"}
    return kind(config=config, server_client=client, further=further)


def client_of(made: Tools) -> TestClient:
    return TestClient(made.complete_app(), base_url="http://127.0.0.1")


def ask(client: TestClient, method: str, params: Any = None, headers: Any = None) -> Any:
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params or {}}
    answer = client.post("/mcp", json=message, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["id"] == 7
    return answer.json()


def test_without_the_flag_nothing_is_offered() -> None:
    client = client_of(server(expose_tools_over_mcp=False))
    assert client.post("/mcp", json={}).status_code in (404, 405)
    assert "mcp" not in client.post("/seed_session", json=ROW).json()


def test_a_call_is_made_in_the_session_and_counts_as_its_use_until_it_ends() -> None:
    made = server()
    client = client_of(made)
    headers = client.post("/seed_session", json=ROW).json()["mcp"]["headers"]
    call = {"name": "add", "arguments": {"first": 2, "second": 3}}
    result = ask(client, "tools/call", call, headers)["result"]
    session = client.post("/add", json={"first": 1}).json()["session"]
    assert result["structuredContent"] == {"sum": 5, "session": session}
    client.post("/end_session", json={})
    assert made.ended == [session]
    lost = ask(client, "tools/call", call, headers)["result"]
    assert lost["isError"] is True
    assert "a session that this server does not have" in lost["content"][0]["text"]


class Elsewhere(Tools):
    async def seed_session(self, body: Any = Body()) -> dict[str, Any]:  # type: ignore[override]
        return {"mcp": {"server_name": "another", "url_path": "/theirs", "headers": {}}}


def test_a_server_that_says_itself_where_its_tools_are_has_the_last_word() -> None:
    said = client_of(server(Elsewhere)).post("/seed_session", json=ROW).json()
    assert said == {"mcp": {"server_name": "another", "url_path": "/theirs", "headers": {}}}


def test_tokens_of_one_run_are_known_to_its_other_processes_and_to_no_other_server() -> None:
    headers = client_of(server()).post("/seed_session", json=ROW).json()["mcp"]["headers"]
    same, other = server(), server()
    other.server_client.global_config_dict = OmegaConf.create({"session_secret": "of another run"})
    call = {"name": "add", "arguments": {"first": 2}}
    refused = ask(client_of(other), "tools/call", call, headers)["result"]
    assert TOKEN_HEADER in refused["content"][0]["text"]
    known = ask(client_of(same), "tools/call", call, headers)["result"]["content"][0]["text"]
    assert TOKEN_HEADER not in known


def test_the_handshake_and_what_is_no_request() -> None:
    client = client_of(server())
    said = ask(client, "initialize", {"protocolVersion": "2025-03-26"})["result"]
    assert (said["protocolVersion"], said["serverInfo"]["name"]) == ("2025-03-26", "tools")
    assert ask(client, "initialize", {"protocolVersion": "1999-01-01"})["result"]["protocolVersion"] == "2025-11-25"
    assert ask(client, "ping")["result"] == {}
    assert ask(client, "server/discover")["error"]["code"] == -32601
    assert ask(client, "tools/call", {"name": 3})["error"]["code"] == -32602
    assert client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}).status_code == 202
    both = [{"jsonrpc": "2.0", "id": 1, "method": "ping"}, {"jsonrpc": "2.0", "method": "notifications/x"}]
    assert client.post("/mcp/", json=both).json() == [{"jsonrpc": "2.0", "id": 1, "result": {}}]
    broken = client.post("/mcp", content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, -32700)
    assert client.post("/mcp", json=[3]).json()[0]["error"]["code"] == -32600
    assert client.get("/mcp").status_code == 405


def test_routes_by_which_an_environment_is_run_are_no_tools() -> None:
    made = server()
    assert set(harvest_tools(made.setup_webserver(), made)) == {"add"}
    (tool,) = ask(client_of(made), "tools/list")["result"]["tools"]
    assert (tool["name"], tool["description"]) == ("add", "The sum.")
    assert tool["inputSchema"]["required"] == ["first"]


async def _optional(body: Numbers | None = None) -> None: ...


async def _several(one: Numbers, other: Numbers) -> None: ...


async def _depending(body: Numbers, who: str = Depends(lambda: "me")) -> None: ...


async def _asked(body: Numbers, times: int = 1) -> None: ...


async def _required(body: Numbers = Body()) -> None: ...


async def _numbered(number: int, body: Numbers) -> None: ...


async def _nested(one: str, other: str, body: Numbers) -> None: ...


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        (_optional, "its parameter body is neither"),
        (_several, "it takes 2 bodies (one, other)"),
        (_depending, "its parameter who is neither"),
        (_asked, "its parameter times is neither"),
    ],
)
def test_a_route_that_one_object_cannot_call_is_refused_with_the_reason(endpoint: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=r"tools: 'odd' cannot be a tool over MCP") as raised:
        server(further=lambda app: app.post("/odd")(endpoint)).complete_app()
    assert reason in str(raised.value)


def test_a_body_that_is_required_by_fastapis_own_word_is_one() -> None:
    app = FastAPI()
    app.post("/x")(_required)
    result = bind_route(next(route for route in app.routes if getattr(route, "path", "") == "/x"))  # type: ignore[arg-type]
    assert result.binding is not None
    assert result.body_model is Numbers


@pytest.mark.parametrize(
    ("further", "said"),
    [
        (lambda app: app.post("/mcp")(_required), "has a route /mcp of its own"),
        (lambda app: app.add_middleware(GZipMiddleware), "middleware that MCP calls are not made for: GZipMiddleware"),
        (lambda app: [app.post("/a/{x}")(_required), app.post("/b/{x}")(_required)], "2 routes have a parameter"),
        (lambda app: app.post("/in/side")(_required), "'in/side' is no name for a tool"),
    ],
)
def test_what_cannot_be_offered_is_refused_when_the_server_starts(further: Any, said: str) -> None:
    with pytest.raises(ValueError, match="tools: ") as raised:
        server(further=further).complete_app()
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("path", "endpoint", "reason"),
    [
        ("/a/{number}", _numbered, "number of its path is no text"),
        ("/a/{one}/{other}", _nested, "its path has 2 parameters (one, other)"),
    ],
)
def test_a_tools_name_is_the_one_text_of_its_path(path: str, endpoint: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="'get' cannot be a tool over MCP") as raised:
        server(Silent, lambda app: app.post(path)(endpoint)).complete_app()
    assert reason in str(raised.value)


def test_of_two_routes_with_one_path_the_one_that_answers_is_the_tool() -> None:
    async def later(body: Numbers, times: int = 1) -> None: ...

    (tool,) = ask(client_of(server(further=lambda app: app.post("/add")(later))), "tools/list")["result"]["tools"]
    assert tool["description"] == "The sum."


class Naming(Tools):
    def mcp_tools(self, harvested: list[MCPTool], catchall: Any | None) -> list[Any]:
        return ["add"]


def test_tools_are_chosen_as_they_are_not_by_name() -> None:
    with pytest.raises(ValueError, match="mcp_tools must return tools that it was given or `catchall` made: 'add'"):
        server(Naming).complete_app()


def test_names_are_unique_and_a_route_without_a_tool_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    async def anything(name: str, body: dict[str, Any]) -> str:
        return name

    with pytest.raises(ValueError, match="two tools are called 'get'"):
        server(Silent, lambda app: app.post("/do/{name}")(anything)).complete_app()
    server(Tools, lambda app: app.post("/do/{name}")(anything)).complete_app()
    assert "no tool is offered through /do/{name}" in caplog.text
    assert ask(client_of(server(Silent)), "tools/list")["result"]["tools"] == []
