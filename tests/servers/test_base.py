"""Building servers as their authors do: with a mocked client, without network or configuration."""

import asyncio
import io
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from omegaconf import OmegaConf

import nemo_gym.global_config
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.config_types import AggregateMetricsRequest, BaseServerConfig, ConfigError
from nemo_gym.log import PrefixedStream
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.process_inputs import running_as
from nemo_gym.schemas.run_requests import BaseRunRequest
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient, per_process_cap
from nemo_gym.workers.cores import WORKS_FOR

RESPONSE = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": []}
ADDRESS: dict[str, Any] = {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}


class Counting(SimpleResourcesServer):
    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._ended: list[str] = []

    async def verify(self, request: Request, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=float(SESSION_ID_KEY in request.session))

    async def end_session(self, session_id: str) -> None:
        self._ended.append(session_id)


class Agent(SimpleResponsesAPIAgent):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        return NeMoGymResponse(id="resp_1", created_at=1.0, model="m", object="response", output=[])

    async def run(self, body: BaseRunRequest = Body()) -> BaseVerifyResponse:
        answer = await self.responses(body.responses_create_params)
        return BaseVerifyResponse(**body.model_dump(), response=answer, reward=0.5)


class Model(SimpleResponsesAPIModel):
    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        return NeMoGymChatCompletion(id="c", created=1, model="m", object="chat.completion", choices=[])

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        return NeMoGymResponse(id="resp_1", created_at=1.0, model="m", object="response", output=[])


def client_of(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def counting(**options: Any) -> Counting:
    config = BaseResourcesServerConfig(name="counting", **ADDRESS, **options)
    return Counting(config=config, server_client=MagicMock(spec=ServerClient))


def test_a_server_is_built_with_a_mocked_client_and_names_its_cookie() -> None:
    server = counting()

    assert server.get_session_middleware_key() == "Counting___counting"
    assert "Counting___counting" in client_of(server.setup_webserver()).post("/seed_session", json={}).cookies


def test_the_layers_may_be_set_up_by_hand_and_more_than_once() -> None:
    server = counting()
    app = server.setup_webserver()
    for _ in range(2):
        server.setup_session_middleware(app)
        server.setup_exception_middleware(app)
        server.setup_liveness(app)

    assert client_of(app).get("/").json() == {"status": "ok"}
    assert len(client_of(app).post("/seed_session", json={}).headers.get_list("set-cookie")) == 1


def test_exceptions_of_other_middleware_are_answered_as_json_too() -> None:
    app = counting().complete_app()

    @app.middleware("http")
    async def fail(request: Request, call_next: Any) -> Any:
        raise RuntimeError("middleware")

    app.user_middleware.append(app.user_middleware.pop(0))  # inside our layers, as when the author adds it first
    answer = client_of(app).post("/seed_session", json={})
    assert (answer.status_code, answer.json()) == (500, "RuntimeError('middleware')")


def test_a_verify_body_without_tool_fields_is_accepted() -> None:
    body = {
        "responses_create_params": {"input": "hi"},
        "response": {"id": "r", "created_at": 1.0, "model": "m", "object": "response", "output": []},
    }
    answer = client_of(counting().complete_app()).post("/verify", json=body).json()

    assert answer["reward"] == 1.0
    assert answer["response"]["tool_choice"] == "auto"


def test_an_idle_session_ends_and_a_used_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    server = counting(session_ttl_s=60)
    client = client_of(server.complete_app())
    idle = client.post("/seed_session", json={})
    assert idle.status_code == 200
    client.cookies.clear()
    monkeypatch.setattr("nemo_gym.servers.sessions.time.monotonic", lambda: now + 50)
    client.post("/seed_session", json={})
    monkeypatch.setattr("nemo_gym.servers.sessions.time.monotonic", lambda: now + 100)
    client.post("/seed_session", json={})

    assert len(server._ended) == 1


def test_an_explicit_end_of_session_is_heard_once() -> None:
    server = counting()
    client = client_of(server.complete_app())
    client.post("/seed_session", json={})
    client.post("/end_session", json={})
    client.post("/end_session", json={})

    assert len(server._ended) == 2  # the second call began a session only to end it
    assert len(set(server._ended)) == 1


def test_a_failing_end_of_session_does_not_spoil_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Counting):
        async def end_session(self, session_id: str) -> None:
            raise RuntimeError("tidying up failed")

    config = BaseResourcesServerConfig(name="failing", **ADDRESS)
    server = Failing(config=config, server_client=MagicMock(spec=ServerClient))

    assert client_of(server.complete_app()).post("/end_session", json={}).status_code == 200
    assert "tidying up failed" in caplog.text


def test_agents_answer_and_run_and_skip_metrics_when_nothing_was_verified() -> None:
    client = MagicMock(spec=ServerClient)
    agent = Agent(config=BaseResponsesAPIAgentConfig(name="a", **ADDRESS), server_client=client)
    http = client_of(agent.complete_app())

    assert http.post("/v1/responses", json={"input": "hi"}).json()["id"] == "resp_1"
    assert http.post("/run", json={"responses_create_params": {"input": "hi"}, "x": 1}).json()["reward"] == 0.5
    skipping = Agent(
        config=BaseResponsesAPIAgentConfig(name="a", skip_verification=True, **ADDRESS), server_client=client
    )
    with pytest.warns(RuntimeWarning, match="not verified"):
        metrics = asyncio.run(skipping.aggregate_metrics(AggregateMetricsRequest(verify_responses=[{"reward": 1}])))
    assert metrics.agent_metrics == {}


def test_no_handler_is_taken_for_that_of_an_unknown_dialect() -> None:
    config = BaseResponsesAPIModelConfig(name="m", **ADDRESS)

    with pytest.raises(ValueError, match="'klingon'"):
        Model(config=config, server_client=MagicMock(spec=ServerClient)).handler_of("klingon")


def test_models_offer_both_apis() -> None:
    config = BaseResponsesAPIModelConfig(name="m", **ADDRESS)
    http = client_of(Model(config=config, server_client=MagicMock(spec=ServerClient)).complete_app())

    assert http.post("/v1/responses", json={"input": "hi"}).json()["object"] == "response"
    messages = [{"role": "user", "content": "hi"}]
    assert http.post("/v1/chat/completions", json={"messages": messages}).json()["object"] == "chat.completion"
    assert http.post("/v1/responses", json={"input": "hi", "seed": 3}).status_code == 422


def copy_of_the_server(secret: str | None) -> TestClient:
    config = OmegaConf.create({"session_secret": secret} if secret else {})
    client = ServerClient(head_server_config=BaseServerConfig(host="h", port=1), global_config_dict=config)
    server = Counting(config=BaseResourcesServerConfig(name="c", **ADDRESS), server_client=client)
    return client_of(server.complete_app())


def test_sessions_signed_with_the_runs_secret_are_read_by_every_copy_of_the_server() -> None:
    cookie = dict(copy_of_the_server("one secret").post("/seed_session", json={}).cookies)
    same, other, own = (copy_of_the_server(secret) for secret in ("one secret", "another", None))
    for copy, read in ((same, True), (other, False), (own, False)):
        copy.cookies.update(cookie)
        answer = copy.post("/seed_session", json={})
        assert (dict(answer.cookies) == cookie) is read


def test_a_config_that_does_not_fit_its_class_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"resources_servers": {"c": {**ADDRESS, "session_ttl_s": "soon"}}}
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({"c": block}))

    with running_as("c"), pytest.raises(ConfigError, match=r"server 'c'.*session_ttl_s"):
        Counting.load_config_from_global_config()
    with running_as("d"), pytest.raises(ConfigError, match="no server instance called 'd'; it has c"):
        Counting.load_config_from_global_config()
    monkeypatch.delenv("NEMO_GYM_CONFIG_PATH", raising=False)
    with pytest.raises(ConfigError, match="NEMO_GYM_CONFIG_PATH"):
        Counting.load_config_from_global_config()


def test_a_setting_that_is_almost_spelled_right_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = {**ADDRESS, "domain": "other", "session_ttl": 5, "of_my_own": 1}
    config = OmegaConf.create({"mine": {"resources_servers": {"counting": block}}})
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", config)

    with running_as("mine"):
        Counting.load_config_from_global_config()

    assert caplog.messages == ["mine has no setting 'session_ttl', so it is ignored; did you mean 'session_ttl_s'?"]


def test_caps_are_divided_among_the_processes_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_NUM_REPLICAS", "4")

    assert (per_process_cap(10), per_process_cap(2), per_process_cap(None)) == (3, 1, None)


def test_an_environment_says_for_which_of_its_sessions_it_works() -> None:
    class Telling(SimpleResourcesServer):
        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            told.append(WORKS_FOR.get())
            return BaseVerifyResponse(**body.model_dump(), reward=0.0)

    told: list[tuple[str, str]] = []
    row = {"responses_create_params": {"input": "?"}, "response": RESPONSE}
    for name in ("one", "other"):
        config = BaseResourcesServerConfig(name=name, **ADDRESS)
        client = client_of(Telling(config=config, server_client=MagicMock(spec=ServerClient)).complete_app())
        for _ in range(2):
            assert client.post("/verify", json=row).status_code == 200
        client.cookies.clear()
        client.post("/verify", json=row)

    (first, again, new), others = told[:3], told[3:]
    assert first == again
    assert first[0] == new[0] == "Telling___one"
    assert first[1] != new[1]
    assert {server for server, _ in others} == {"Telling___other"}
    assert WORKS_FOR.get() == ("", "")


def test_every_printed_line_carries_the_name_of_its_server() -> None:
    written = io.StringIO()
    stream = PrefixedStream(written, "host")
    stream.write("starting")
    stream.write(" up\n")
    with running_as("tool_server"):
        stream.write("one\ntwo\n")
    stream.write("")
    stream.write("\n")

    assert written.getvalue() == "(host) starting up\n(tool_server) one\n(tool_server) two\n(host) \n"


def test_a_restarted_server_refuses_to_go_on_in_a_session_it_has_lost() -> None:
    after = copy_of_the_server("one secret")
    after.cookies.update(dict(copy_of_the_server("one secret").post("/seed_session", json={}).cookies))
    row = {"responses_create_params": {"input": "go"}, "response": RESPONSE}

    lost = after.post("/verify", json=row)
    after.post("/seed_session", json={})
    begun_anew = after.post("/verify", json=row)

    assert (lost.status_code, lost.headers["x-nemo-gym-error-class"]) == (500, "SessionLostError")
    assert begun_anew.json()["reward"] == 1.0


@pytest.mark.parametrize("jump_s", [-3600.0, 400 * 24 * 3600.0])
def test_a_clock_that_jumps_takes_nobody_out_of_a_session(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(counting().complete_app())
    before = client.post("/seed_session", json={}).cookies["Counting___counting"]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    client.cookies.clear()

    answer = client.post("/seed_session", json={}, headers={"cookie": f"Counting___counting={before}"})

    assert f"Counting___counting={before};" in answer.headers["set-cookie"]
