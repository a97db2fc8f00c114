"""The model servers that ask an endpoint of somebody else's: each takes the keys of a pace and keeps to them."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from pydantic import ValidationError

from nemo_gym.base_responses_api_model import PacedModelConfig, SimpleResponsesAPIModel
from nemo_gym.runtime import listen
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from responses_api_models.azure_openai_model.app import AzureOpenAIModelServer, AzureOpenAIModelServerConfig
from responses_api_models.inference_provider.app import InferenceProviderModel, InferenceProviderModelConfig
from responses_api_models.openai_model.app import OpenAIModel, OpenAIModelConfig
from responses_api_models.vllm_model.app import VLLMModel
from responses_api_models.vllm_model.config import VLLMModelConfig
from tests.collection.paced_endpoint import RESPONSE

COMPLETION = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
    "created": 1,
    "model": "m",
    "object": "chat.completion",
}
PLACE: dict[str, Any] = {"name": "policy_model", "host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}
OPENAI = {"openai_base_url": "URL", "openai_api_key": "k", "openai_model": "m"}
CHAT = {"base_url": "URL", "api_key": "k", "model": "m"}
VLLM = {**CHAT, "return_token_id_information": False, "uses_reasoning_parser": False}
KINDS: dict[str, tuple[type[SimpleResponsesAPIModel], type[PacedModelConfig], dict[str, Any]]] = {
    "openai_model": (OpenAIModel, OpenAIModelConfig, OPENAI),
    "azure_openai_model": (AzureOpenAIModelServer, AzureOpenAIModelServerConfig, OPENAI),
    "inference_provider": (InferenceProviderModel, InferenceProviderModelConfig, CHAT),
    "vllm_model": (VLLMModel, VLLMModelConfig, VLLM),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


class Endpoint:
    """Answers every request and remembers when it came, what it said, and how many there were at once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.arrived_s: list[float] = []
        self.said: list[str] = []
        self.under_way = self.most_under_way = 0

    async def answer(self, request: Request) -> Any:
        self.arrived_s.append(time.monotonic())
        body = await request.json()
        asked = body["messages"] if "messages" in body else body["input"]
        self.said.append(asked[0]["content"])
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0.05)
        self.under_way -= 1
        return COMPLETION if "messages" in body else RESPONSE


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    bound = listen("127.0.0.1", 0, "a test", "another port")
    remembered = Endpoint(f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
    app = FastAPI()
    app.post("/v1/{rest:path}")(remembered.answer)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    yield remembered
    server.should_exit = True
    thread.join(10)


def settings_of(kind: str, url: str, **settings: Any) -> PacedModelConfig:
    _, config_class, needed = KINDS[kind]
    return config_class.model_validate(
        {**PLACE, **{key: url if value == "URL" else value for key, value in needed.items()}, **settings}
    )


def model_of(kind: str, url: str, **settings: Any) -> SimpleResponsesAPIModel:
    config: Any = settings_of(kind, url, **settings)
    return KINDS[kind][0](config=config, server_client=MagicMock(spec=ServerClient))


def ask(model: SimpleResponsesAPIModel, *conversations: list[str]) -> None:
    """One session for each conversation; all that is said in it after the first word, at once."""

    async def scenario() -> None:
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
        transport = httpx.ASGITransport(model.complete_app())

        async def talk(words: list[str]) -> None:
            async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=60) as session:
                for at_once in (words[:1], words[1:]):
                    bodies = [{"input": [{"role": "user", "content": word}]} for word in at_once]
                    answers = await asyncio.gather(*(session.post("/v1/responses", json=body) for body in bodies))
                    assert [answer.status_code for answer in answers] == [200] * len(at_once)

        async with asyncio.timeout(60):
            await asyncio.gather(*map(talk, conversations))

    asyncio.run(scenario())


@EACH_KIND
def test_requests_keep_the_pace(kind: str, endpoint: Endpoint) -> None:
    ask(model_of(kind, endpoint.url, requests_per_minute=600), *[["hello"]] * 8)

    assert len(endpoint.arrived_s) == 8
    assert max(endpoint.arrived_s) - min(endpoint.arrived_s) >= 0.5  # 7 x 0.1 s, but for what the first may have waited


@EACH_KIND
def test_no_more_at_once_than_allowed(kind: str, endpoint: Endpoint) -> None:
    ask(model_of(kind, endpoint.url, max_concurrent_requests=2), *[["hello"]] * 8)

    assert endpoint.most_under_way == 2


@pytest.mark.parametrize("kind", ["azure_openai_model", "inference_provider"])
def test_of_two_caps_the_lower_holds(kind: str, endpoint: Endpoint) -> None:
    ask(model_of(kind, endpoint.url, num_concurrent_requests=2, max_concurrent_requests=5), *[["hello"]] * 8)
    assert endpoint.most_under_way == 2
    ask(model_of(kind, endpoint.url, num_concurrent_requests=3, requests_per_minute=60_000), *[["hello"]] * 8)

    assert endpoint.most_under_way <= 3


def test_a_session_with_many_calls_lets_others_go_first(endpoint: Endpoint) -> None:
    model = model_of("openai_model", endpoint.url, requests_per_minute=1_200)

    ask(model, ["greedy"] * 21, *[["small"] * 3] * 2)

    assert len(endpoint.said) == 27
    assert "small" not in endpoint.said[-10:]


@EACH_KIND
def test_without_limits_there_is_nobody_to_ask(kind: str) -> None:
    model = model_of(kind, "http://127.0.0.1:1/v1")

    assert model.pacer is None
    assert [each.client.pacer for each in model.asked_endpoints()] == [None]


def test_all_endpoints_of_a_server_keep_one_pace() -> None:
    url = ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]
    model = VLLMModel(
        config=VLLMModelConfig.model_validate({**PLACE, **VLLM, "base_url": url, "tokens_per_minute": 5}),
        server_client=MagicMock(spec=ServerClient),
    )

    assert model.pacer is not None
    assert [each.client.pacer for each in model.asked_endpoints()] == [model.pacer] * 2


@EACH_KIND
@pytest.mark.parametrize("key", ["requests_per_minute", "tokens_per_minute", "max_concurrent_requests"])
@pytest.mark.parametrize("value", [0, -1, True, "fast", float("nan")])
def test_a_limit_that_is_none_is_refused_by_name(kind: str, key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=key):
        settings_of(kind, "http://x/v1", **{key: value})

    assert getattr(settings_of(kind, "http://x/v1", **{key: None}), key) is None
