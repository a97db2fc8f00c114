from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from omegaconf import OmegaConf
from pydantic import ConfigDict

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
    normalize_tool_name,
)
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.rollout_correlation import (
    RolloutContextMiddleware,
    apply_rollout_prefix,
    current_rollout_id,
    maybe_rollout_id_from_run_body,
    rollout_context,
    rollout_path_prefix,
    without_rollout_prefix,
)
from nemo_gym.server_utils import ServerClient

ROW = {"_ng_task_index": 3, "_ng_rollout_index": 1, "responses_create_params": {"input": "hi"}}
ADDRESS: dict[str, Any] = {"host": "127.0.0.1", "port": 8000, "entrypoint": "app.py"}
MODEL = {"policy": {"responses_api_models": {"any": {"host": "10.0.0.1", "port": 81, "entrypoint": "app.py"}}}}


def answer() -> NeMoGymResponse:
    return NeMoGymResponse(id="r", created_at=0, model=str(current_rollout_id()), object="response", output=[])


class Row(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class Agent(SimpleResponsesAPIAgent):
    config: BaseResponsesAPIAgentConfig

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        said = answer()
        said.user = self.url_path_for_request("/v1/responses", request)
        return said

    async def run(self, body: Row) -> BaseVerifyResponse:  # type: ignore[override]
        return BaseVerifyResponse(**body.model_dump(), response=answer(), reward=1.0)


class Model(SimpleResponsesAPIModel):
    config: BaseResponsesAPIModelConfig

    async def chat_completions(  # type: ignore[override]
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        raise NotImplementedError

    async def responses(  # type: ignore[override]
        self, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        return answer()


class EnvironmentConfig(BaseResourcesServerConfig):
    REVERIFY_MODE = ReverifyMode.STATELESS


class Environment(SimpleResourcesServer):
    config: EnvironmentConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/look/{what}")(self.look)
        return app

    async def look(self, what: str) -> dict[str, str | None]:
        return {what: current_rollout_id()}

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


def client_of(config: dict[str, Any]) -> ServerClient:
    from nemo_gym.config_types import BaseServerConfig

    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(config)
    )


def agent_with(**config: Any) -> Agent:
    own = BaseResponsesAPIAgentConfig(**ADDRESS, name="agent", token_id_capture=bool(config.pop("own_flag", False)))
    return Agent(config=own, server_client=client_of({**MODEL, **config}))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ROW, "3-1"),
        ({**ROW, "_ng_attempt_index": 2}, "3-1-a2"),
        ({**ROW, "_ng_attempt_index": 0}, "3-1"),
        ({**ROW, "_ng_rollout_id": "mine.7"}, "mine.7"),
        ({"_ng_rollout_id": "mine", "_ng_attempt_index": 1}, "mine-a1"),
        ({"_ng_task_index": 3}, None),
        (None, None),
        ("no row", None),
    ],
)
def test_the_id_of_a_rollout_is_made_of_what_its_row_carries(row: Any, expected: str | None) -> None:
    assert maybe_rollout_id_from_run_body(row) == expected
    if isinstance(row, dict) and "responses_create_params" in row:
        for row_type in (Row, BaseRunRequest):  # the latter declares nothing of it, and does not lose it either
            assert maybe_rollout_id_from_run_body(row_type.model_validate(row)) == expected


@pytest.mark.parametrize("rollout_id", ["", "a/b", ".a", "a\n", 7, "ä"])
def test_an_id_that_cannot_be_part_of_a_path_is_refused(rollout_id: Any) -> None:
    with pytest.raises(ValueError, match="_ng_rollout_id is"):
        maybe_rollout_id_from_run_body({"_ng_rollout_id": rollout_id})


def test_prefixes_are_put_on_and_taken_off() -> None:
    assert rollout_path_prefix(None) == rollout_path_prefix("") == ""
    assert rollout_path_prefix("a") == "/ng-rollout/a"
    assert rollout_path_prefix("a", token_capture=True) == "/ng-rollout/a/training-token-capture"
    assert apply_rollout_prefix("http://h:1/", None) == "http://h:1/"
    assert apply_rollout_prefix("http://h:1/", "a") == "http://h:1/ng-rollout/a"
    assert without_rollout_prefix("/ng-rollout/a/run") == "/run"
    assert without_rollout_prefix("/ng-rollout/a/training-token-capture/v1/responses") == "/v1/responses"
    assert without_rollout_prefix("/ng-rollout/a") == "/ng-rollout/a"


def test_a_context_ends_where_it_ends() -> None:
    with rollout_context("outer"), rollout_context("inner"):
        assert current_rollout_id() == "inner"
    assert current_rollout_id() is None


@pytest.mark.parametrize(
    "config",
    [{}, {"observability_enabled": False}, {"token_id_capture": {"enabled": True}}, {"token_id_capture": None}],
)
def test_while_nothing_is_recorded_agents_get_back_what_they_gave(config: dict[str, Any]) -> None:
    agent = agent_with(**config)

    assert agent.rollout_id_from_run(ROW) is None
    assert agent.url_path_for_run("/v1/responses", ROW) == "/v1/responses"
    assert agent.base_url_for_run("http://h:1/", ROW) == "http://h:1/"
    assert agent.resolve_model_base_url("policy") == "http://10.0.0.1:81/v1"
    assert agent.url_path_for_request("/v1/responses", None) == "/v1/responses"
    assert agent.url_path_for_request("/v1/responses", MagicMock()) == "/v1/responses"


@pytest.mark.parametrize("kind", [SimpleNamespace, Mock, MagicMock])
def test_stand_ins_for_requests_carry_the_rollout_on_without_an_url(kind: type[Any]) -> None:
    agent = agent_with()

    assert agent.url_path_for_request("/v1/responses", kind(cookies={})) == "/v1/responses"
    named = kind(path_params={"rollout_id": "3-1"}, cookies={})
    assert agent.url_path_for_request("/v1/responses", named) == "/ng-rollout/3-1/v1/responses"
    named.url = SimpleNamespace(path="/ng-rollout/3-1/training-token-capture/v1/responses")
    asked = agent.url_path_for_request("/v1/responses", named)
    assert asked == "/ng-rollout/3-1/training-token-capture/v1/responses"


@pytest.mark.parametrize(
    ("config", "prefix"),
    [
        ({"observability_enabled": True}, "/ng-rollout/3-1"),
        ({"observability_enabled": 1}, "/ng-rollout/3-1"),
        ({"token_id_capture": {"enabled": True, "all_agents": True}}, "/ng-rollout/3-1/training-token-capture"),
        ({"token_id_capture": {"enabled": True}, "own_flag": True}, "/ng-rollout/3-1/training-token-capture"),
    ],
)
def test_while_calls_are_recorded_agents_name_the_rollout_in_their_paths(config: dict[str, Any], prefix: str) -> None:
    agent = agent_with(**config)

    assert agent.rollout_id_from_run(ROW) == "3-1"
    assert agent.url_path_for_run("/v1/responses", ROW) == f"{prefix}/v1/responses"
    assert agent.base_url_for_run("http://h:1/", ROW) == f"http://h:1{prefix}"
    assert agent.resolve_model_base_url("policy", "3-1") == f"http://10.0.0.1:81{prefix}/v1"


@pytest.mark.parametrize("spec", [MagicMock(spec=ServerClient), MagicMock(spec=ServerClient, global_config_dict={})])
def test_a_mocked_client_means_that_nothing_is_recorded(spec: Any) -> None:
    agent = Agent(config=BaseResponsesAPIAgentConfig(**ADDRESS, name="agent"), server_client=spec)

    assert agent.url_path_for_run("/run", ROW) == "/run"
    assert agent.setup_webserver()


@pytest.mark.parametrize("prefix", ["", "/ng-rollout/3-1", "/ng-rollout/3-1/training-token-capture"])
def test_agents_answer_under_the_path_of_a_rollout_and_carry_it_on(prefix: str) -> None:
    app = agent_with().complete_app()
    with TestClient(app) as client:
        said = client.post(f"{prefix}/v1/responses", json={"input": "hi"})

    assert said.status_code == 200
    assert said.json()["user"] == f"{prefix}/v1/responses"


def test_run_works_for_its_rollout_while_calls_are_recorded() -> None:
    for config, expected in (({}, "None"), ({"observability_enabled": True}, "3-1")):
        with TestClient(agent_with(**config).complete_app()) as client:
            assert client.post("/run", json=ROW).json()["response"]["model"] == expected


def test_run_works_for_its_rollout_whatever_its_author_calls_the_row() -> None:
    class Other(Agent):
        async def run(self, request: Request, asked: Row) -> BaseVerifyResponse:  # type: ignore[override]
            return BaseVerifyResponse(**asked.model_dump(), response=answer(), reward=1.0)

    like = agent_with(observability_enabled=True)
    with TestClient(Other(config=like.config, server_client=like.server_client).complete_app()) as client:
        assert client.post("/run", json=ROW).json()["response"]["model"] == "3-1"


@pytest.mark.parametrize(
    ("server", "path", "expected"),
    [
        ("policy", "/v1/responses", "/ng-rollout/3-1/v1/responses"),
        ("policy", "/v1/chat/completions?a=1", "/ng-rollout/3-1/v1/chat/completions?a=1"),
        ("policy", "/v1/messages", "/ng-rollout/3-1/v1/messages"),
        ("policy", "/tokenize", "/tokenize"),
        ("environment", "/any/tool", "/ng-rollout/3-1/any/tool"),
        ("environment", "/ng-rollout/other/step", "/ng-rollout/other/step"),
        ("agent", "/v1/responses", "/v1/responses"),
        ("nobody", "/v1/responses", "/v1/responses"),
    ],
)
def test_calls_over_http_name_their_rollout_to_models_and_environments(server: str, path: str, expected: str) -> None:
    blocks = {
        "environment": {"resources_servers": {"any": ADDRESS}},
        "agent": {"responses_api_agents": {"any": ADDRESS}},
    }
    client = client_of({**MODEL, **blocks, "observability_enabled": True})

    with rollout_context("3-1"):
        assert client._path_of_rollout(server, path, None) == expected
    with rollout_context("no path"):
        assert client._path_of_rollout(server, path, None) == path
    assert client._path_of_rollout(server, path, None) == path


def test_a_verdict_asked_for_outside_of_a_rollout_is_named_by_its_row() -> None:
    client = client_of({"environment": {"resources_servers": {"any": ADDRESS}}, "observability_enabled": True})
    row = b'{"_ng_task_index": 3, "_ng_rollout_index": 1}'

    assert client._path_of_rollout("environment", "/verify", row) == "/ng-rollout/3-1/verify"
    assert client._path_of_rollout("environment", "/step", row) == "/step"
    for other in (b"{}", b"no JSON", b'{"_ng_rollout_id": "a/b"}', None):
        assert client._path_of_rollout("environment", "/verify", other) == "/verify"


@pytest.mark.parametrize("prefix", ["/ng-rollout/3-1", "/ng-rollout/3-1/training-token-capture"])
def test_model_servers_take_the_prefix_off(prefix: str) -> None:
    model = Model(config=BaseResponsesAPIModelConfig(**ADDRESS, name="policy"), server_client=client_of(MODEL))
    with TestClient(model.complete_app()) as client:
        assert client.post(f"{prefix}/v1/responses", json={"input": "hi"}).json()["model"] == "3-1"
        assert client.post("/v1/responses", json={"input": "hi"}).json()["model"] == "None"


def test_every_route_of_an_environment_answers_under_the_path_of_a_rollout() -> None:
    config = EnvironmentConfig(**ADDRESS, name="environment", domain="other")
    environment = Environment(config=config, server_client=client_of({}))
    with TestClient(environment.complete_app()) as client:
        assert client.post("/ng-rollout/3-1/look/a%20b").json() == {"a b": "3-1"}
        assert client.post("/look/a").json() == {"a": None}
        assert client.post("/ng-rollout/3-1/training-token-capture/look/a").status_code == 404
        assert client.post("/ng-rollout/.a/look/a").status_code == 404
        assert client.post("/ng-rollout/3-1/seed_session", json={}).status_code == 200
        assert client.get("/reverify_mode").json() == "stateless"


def test_the_middleware_serves_other_apps_too_and_rewrites_both_spellings_of_the_path() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], scope.get("path"), scope.get("raw_path"), current_rollout_id()))

    import asyncio

    served = RolloutContextMiddleware(app)
    http = {"type": "http", "path": "/ng-rollout/3-1/a b", "raw_path": b"/ng-rollout/3-1/a%20b"}
    for scope in (http, {"type": "lifespan"}, {"type": "http", "path": "/x", "raw_path": b"/x"}):
        asyncio.run(served(scope, None, None))

    assert seen == [("http", "/a b", b"/a%20b", "3-1"), ("lifespan", None, None, None), ("http", "/x", b"/x", None)]


@pytest.mark.parametrize(
    ("name", "server", "expected"),
    [
        ("search", None, "search"),
        ("mcp__web__search", None, "search"),
        ("mcp__web__deep__search", None, "deep__search"),
        ("mcp__search", None, "mcp__search"),
        ("mcp__web__search", "web", "search"),
        ("mcp__web__search", "other", "mcp__web__search"),
    ],
)
def test_tools_have_their_own_names_again(name: str, server: str | None, expected: str) -> None:
    assert normalize_tool_name(name, server) == expected


def test_the_failures_of_a_rollouts_file_lie_beside_it() -> None:
    from nemo_gym.path_utils import failures_path_for

    assert failures_path_for(Path("a/out.jsonl")) == Path("a/out_failures.jsonl")
