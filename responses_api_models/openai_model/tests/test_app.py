"""Requests go on as they came, answers come back as they are, and refusals say what to change."""

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from omegaconf import OmegaConf

from nemo_gym.base_responses_api_model import EndpointSettings, explained_error
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
from nemo_gym.server_utils import (
    GlobalAIOHTTPAsyncClientConfig,
    ServerClient,
    ServerResponseError,
    set_global_aiohttp_client,
)
from nemo_gym.testing import listen
from responses_api_models.openai_model.app import OpenAIModel, OpenAIModelConfig

MakeModel = Callable[..., OpenAIModel]
HELLO = {"input": [{"role": "user", "content": "hello"}]}
RESPONSE = {
    "id": "resp_1",
    "created_at": 1.0,
    "model": "upstream-name",
    "object": "response",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "vendor_field": "kept",
}
COMPLETION = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
    "created": 1,
    "model": "upstream-name",
    "object": "chat.completion",
}


@dataclass
class Endpoint:
    """An OpenAI-compatible endpoint that answers as told and remembers what it was asked."""

    url: str
    status: int = 200
    body: Any = None
    """What is answered instead of a good answer."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    async def answer(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0.02)
        self.under_way -= 1
        if isinstance(self.body, Response):
            return self.body
        good = RESPONSE if request.url.path == "/v1/responses" else COMPLETION
        return JSONResponse(good if self.body is None else self.body, self.status)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    bound = listen("127.0.0.1", 0, "a test", "another port")
    remembered = Endpoint(f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
    app = FastAPI()
    app.post("/v1/responses", response_model=None)(remembered.answer)
    app.post("/v1/chat/completions", response_model=None)(remembered.answer)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield remembered
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def make_model() -> Callable[..., OpenAIModel]:
    def make(base_url: str, **settings: Any) -> OpenAIModel:
        config = OpenAIModelConfig(
            name="policy_model",
            host="127.0.0.1",
            port=1,
            entrypoint="app.py",
            openai_base_url=base_url,
            openai_api_key="sk-right",
            openai_model="configured-model",
            **settings,
        )
        return OpenAIModel(config=config, server_client=MagicMock(spec=ServerClient))

    return make


def post(model: OpenAIModel, path: str, *bodies: Any, **http_settings: Any) -> list[httpx.Response]:
    """The answers of the model's app to `bodies`, asked all at once."""

    async def ask() -> list[httpx.Response]:
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig(**http_settings))
        transport = httpx.ASGITransport(model.complete_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=30) as client:
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    return asyncio.run(ask())


def test_only_fields_that_were_set_go_on_and_the_configured_model_wins(
    endpoint: Endpoint, make_model: MakeModel
) -> None:
    body = HELLO | {"model": "asked-for", "temperature": 0.5}

    (answer,) = post(make_model(endpoint.url), "/v1/responses", body)

    assert endpoint.requests == [HELLO | {"model": "configured-model", "temperature": 0.5}]
    assert answer.status_code == 200
    assert {name: answer.json()[name] for name in RESPONSE} == RESPONSE


def test_a_request_goes_on_with_the_name_of_the_model(endpoint: Endpoint, make_model: MakeModel) -> None:
    body = {"input": [*HELLO["input"], {"role": "user", "content": '„quoted“ "}'}], "metadata": {"model": "mine"}}

    post(make_model(endpoint.url), "/v1/responses", body, {"input": ""})

    assert sorted(endpoint.requests, key=str) == sorted(
        [body | {"model": "configured-model"}, {"input": "", "model": "configured-model"}], key=str
    )
    assert endpoint.headers[0]["content-type"] == "application/json"


@pytest.mark.parametrize("way", ["_outgoing", "_request"])
def test_a_subclass_may_change_what_goes_on(endpoint: Endpoint, make_model: MakeModel, way: str) -> None:
    class Seeded(OpenAIModel):
        pass

    def seeded(model: OpenAIModel, body: Any) -> dict[str, Any]:
        return {**getattr(OpenAIModel, way)(model, body), "seed": 7}

    setattr(Seeded, way, seeded)
    plain = make_model(endpoint.url)

    post(Seeded(config=plain.config, server_client=plain.server_client), "/v1/responses", HELLO)

    assert endpoint.requests == [HELLO | {"model": "configured-model", "seed": 7}]


@pytest.mark.parametrize(
    "told",
    [
        {"input_tokens_details": None, "output_tokens_details": None},
        {},
        {"input_tokens_details": {}, "output_tokens_details": {"reasoning_tokens": None}},
        {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
    ],
)
def test_what_an_endpoint_leaves_out_is_filled_in(
    endpoint: Endpoint, make_model: MakeModel, told: dict[str, Any]
) -> None:
    counts = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    thought: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None}
    endpoint.body = {**RESPONSE, "usage": {**counts, **told}, "output": [thought] if told else []}

    (answer,) = post(make_model(endpoint.url), "/v1/responses", HELLO)

    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    assert answer.json()["usage"] == {**counts, **details}
    assert not [item for item in answer.json()["output"] if "content" in item]
    assert answer.json()["vendor_field"] == "kept"


def test_chat_completions_go_on_in_the_same_way(endpoint: Endpoint, make_model: MakeModel) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}

    (answer,) = post(make_model(endpoint.url), "/v1/chat/completions", body)

    assert endpoint.requests == [body | {"model": "configured-model"}]
    assert answer.json()["choices"][0]["message"]["content"] == COMPLETION["choices"][0]["message"]["content"]  # type: ignore[index]


def test_extra_fields_and_headers_are_added_and_the_request_wins(endpoint: Endpoint, make_model: MakeModel) -> None:
    model = make_model(
        endpoint.url, extra_body={"temperature": 0.1, "top_k": 20}, openai_default_headers={"x-team": "blue"}
    )

    post(model, "/v1/responses", HELLO | {"temperature": 0.9})

    assert endpoint.requests == [HELLO | {"temperature": 0.9, "top_k": 20, "model": "configured-model"}]
    assert endpoint.headers[0]["x-team"] == "blue"
    assert endpoint.headers[0]["authorization"] == "Bearer sk-right"


def test_reasoning_is_sent_back_unless_it_is_to_be_dropped(endpoint: Endpoint, make_model: MakeModel) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    body = {"input": [*HELLO["input"], thought]}

    post(make_model(endpoint.url), "/v1/responses", body)
    post(make_model(endpoint.url, drop_input_reasoning_items=True), "/v1/responses", body, {"input": "text"})

    assert [len(request["input"]) for request in endpoint.requests[:2]] == [2, 1]
    assert endpoint.requests[2]["input"] == "text"


def test_no_more_requests_at_once_than_allowed(endpoint: Endpoint, make_model: MakeModel) -> None:
    post(make_model(endpoint.url, max_concurrent_requests=2), "/v1/responses", *[HELLO] * 8)
    assert endpoint.most_under_way == 2

    post(make_model(endpoint.url), "/v1/responses", *[HELLO] * 8)
    assert endpoint.most_under_way > 2


@pytest.mark.parametrize(
    ("status", "said", "setting"),
    [
        (
            401,
            {"error": {"message": "Incorrect API key provided: 'sk-***'"}},
            "policy_api_key (openai_api_key of policy_model)",
        ),
        (403, {"detail": "Forbidden"}, "policy_api_key"),
        (
            404,
            {"error": {"message": "The model 'configured-model' does not exist", "code": "model_not_found"}},
            "policy_model_name",
        ),
        (
            400,
            {"error": {"message": "Invalid model: configured-model"}},
            "policy_model_name (openai_model of policy_model)",
        ),
        (404, {"detail": "Not Found"}, "policy_base_url (openai_base_url of policy_model)"),
    ],
)
def test_a_refusal_is_one_sentence_with_the_endpoint_and_the_setting(
    endpoint: Endpoint, make_model: MakeModel, status: int, said: Any, setting: str
) -> None:
    endpoint.status, endpoint.body = status, said

    (answer,) = post(make_model(endpoint.url), "/v1/responses", HELLO)

    assert answer.status_code == 500
    assert answer.headers["x-nemo-gym-error-status"] == str(status)
    assert answer.headers["x-nemo-gym-error-server"] == "policy_model"
    assert answer.headers["x-nemo-gym-error-class"] == "ModelEndpointError"
    text = answer.json()
    assert f"The model endpoint {endpoint.url}/responses" in text
    assert f"correct {setting}" in text
    assert "\\" not in text
    assert len(endpoint.requests) == 1


def test_a_forbidden_request_is_not_blamed_on_the_key_alone(endpoint: Endpoint, make_model: MakeModel) -> None:
    endpoint.status, endpoint.body = 403, {"error": {"message": "Your input was flagged"}}

    (answer,) = post(make_model(endpoint.url), "/v1/responses", HELLO)

    assert (
        "refused the request (status 403): Your input was flagged; if it does not refuse the content" in answer.json()
    )
    assert "refused the API key" not in answer.json()


def test_other_refusals_keep_the_endpoints_words(endpoint: Endpoint, make_model: MakeModel) -> None:
    endpoint.status, endpoint.body = 400, {"error": {"message": "temperature must be between 0 and 2"}}

    (answer,) = post(make_model(endpoint.url), "/v1/responses", HELLO)

    assert answer.headers["x-nemo-gym-error-status"] == "400"
    assert "temperature must be between 0 and 2" in answer.json()
    assert "correct policy" not in answer.json()


def test_a_conversation_that_no_longer_fits_is_an_incomplete_answer(endpoint: Endpoint, make_model: MakeModel) -> None:
    said = {"error": {"message": "This model's maximum context length is 4096 tokens"}}
    endpoint.status, endpoint.body = 400, said

    (answer,) = post(make_model(endpoint.url), "/v1/responses", HELLO)

    assert (answer.status_code, answer.json()["status"], answer.json()["output"]) == (200, "incomplete", [])
    assert answer.json()["incomplete_details"] == {"reason": "max_output_tokens"}


def test_nobody_at_the_address_is_an_error_that_names_it(make_model: MakeModel) -> None:
    (answer,) = post(make_model("http://127.0.0.1:9/v1"), "/v1/responses", HELLO, model_retry_max_tries=1)

    assert answer.status_code == 500
    assert answer.headers["x-nemo-gym-error-class"] == "ServerUnreachableError"
    assert "http://127.0.0.1:9/v1" in answer.json()
    assert "correct policy_base_url" in answer.json()


def test_an_answer_in_another_shape_is_an_error_that_names_the_endpoint(
    endpoint: Endpoint, make_model: MakeModel
) -> None:
    endpoint.body = {"choices": []}

    (answer,) = post(make_model(endpoint.url), "/v1/responses", HELLO)

    assert answer.status_code == 500
    assert endpoint.url in answer.json()
    assert "NeMoGymResponse" in answer.json()
    assert "policy_base_url" in answer.json()


def test_something_else_at_the_address_is_an_error_that_names_it(endpoint: Endpoint, make_model: MakeModel) -> None:
    endpoint.body = Response("<html>Welcome</html>", media_type="text/html")

    (answer,) = post(make_model(endpoint.url), "/v1/responses", HELLO)

    assert answer.status_code == 500
    assert answer.headers["x-nemo-gym-error-class"] == "MalformedResponseError"
    assert "Welcome" in answer.json()
    assert "Correct policy_base_url" in answer.json()


def test_an_explained_error_can_be_pickled() -> None:
    error = ServerResponseError("http://host/v1/responses", 401, b"no")

    explained = explained_error(error, EndpointSettings("policy_model", "http://host/v1", "m"))
    assert isinstance(explained, ServerResponseError)

    copy = pickle.loads(pickle.dumps(explained))
    assert (type(copy), copy.status, copy.response_content) == (type(explained), 401, explained.response_content)


def test_the_client_can_be_replaced_in_tests(make_model: MakeModel) -> None:
    model = make_model("http://nowhere/v1")
    model._client = MagicMock(spec=NeMoGymAsyncOpenAI)
    model._client.create_response = AsyncMock(return_value=RESPONSE)

    (answer,) = post(model, "/v1/responses", HELLO)

    assert answer.json()["id"] == "resp_1"
    model._client.create_response.assert_awaited_once_with(model="configured-model", **HELLO)


def test_the_shipped_config_takes_the_three_policy_values() -> None:
    config = OmegaConf.load(Path(__file__).parents[1] / "configs" / "openai_model.yaml")
    policy = {"policy_base_url": "http://x/v1", "policy_api_key": "k", "policy_model_name": "m"}

    block: Any = OmegaConf.to_container(OmegaConf.merge(config, policy), resolve=True)

    inner = block["policy_model"]["responses_api_models"]["openai_model"]
    loaded = OpenAIModelConfig.model_validate({**inner, "name": "policy_model", "host": "h", "port": 1})
    assert (loaded.openai_base_url, loaded.openai_api_key, loaded.openai_model) == ("http://x/v1", "k", "m")
    assert loaded.drop_input_reasoning_items is False
