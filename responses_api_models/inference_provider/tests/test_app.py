"""Any Chat Completions host can be a policy: requests arrive in its terms, answers and refusals come back in ours."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from omegaconf import OmegaConf

from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import listen
from responses_api_models.inference_provider.app import InferenceProviderModel, InferenceProviderModelConfig

MakeModel = Callable[..., InferenceProviderModel]
CONFIGS = Path(__file__).parents[1] / "configs"
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}


@dataclass
class Host:
    """A host that says `message`, or refuses with `status` and `error`."""

    url: str
    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": "Hello."})
    status: int = 200
    error: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    async def answer(self, request: Request) -> JSONResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0.02)
        self.under_way -= 1
        if self.status != 200:
            return JSONResponse({"error": {"message": self.error}}, self.status)
        choice = {"index": 0, "finish_reason": "stop", "message": self.message}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return JSONResponse({"id": "c", "created": 7, "model": "theirs", "choices": [choice], "usage": usage})


@pytest.fixture
def host() -> Iterator[Host]:
    bound = listen("127.0.0.1", 0, "a test", "another port")
    host = Host(f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
    app = FastAPI()
    app.post("/v1/chat/completions", response_model=None)(host.answer)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield host
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def make_model() -> MakeModel:
    def make(base_url: str, **settings: Any) -> InferenceProviderModel:
        config = InferenceProviderModelConfig(
            name="policy_model",
            host="127.0.0.1",
            port=1,
            entrypoint="app.py",
            base_url=base_url,
            api_key="sk-right",
            model="configured-model",
            **settings,
        )
        return InferenceProviderModel(config=config, server_client=MagicMock(spec=ServerClient))

    return make


def post(model: InferenceProviderModel, *bodies: Any, path: str = "/v1/responses") -> list[httpx.Response]:
    """The answers of the model's app to `bodies`, asked all at once."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(model.complete_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=30) as client:
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    return asyncio.run(ask())


def test_a_request_becomes_a_chat_and_the_completion_a_response(host: Host, make_model: MakeModel) -> None:
    model = make_model(host.url, extra_body={"top_k": 1, "seed": 1}, default_headers={"x-title": "gym"})
    metadata = {"extra_body": json.dumps({"seed": 2}), "chat_template_kwargs": json.dumps({"enable_thinking": False})}

    (answer,) = post(model, {"input": "hello", "max_output_tokens": 5, "model": "other", "metadata": metadata})

    assert host.requests == [
        {
            "model": "configured-model",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "max_tokens": 5,
            "top_k": 1,
            "seed": 2,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert (host.headers[0]["authorization"], host.headers[0]["x-title"]) == ("Bearer sk-right", "gym")
    got = NeMoGymResponse.model_validate_json(answer.content)
    assert (got.output_text, got.model, got.created_at, got.status) == ("Hello.", "configured-model", 7, "completed")
    assert got.usage is not None
    assert got.usage.total_tokens == 5


def test_hosts_that_want_it_get_the_newer_name_of_the_limit(host: Host, make_model: MakeModel) -> None:
    post(make_model(host.url, uses_max_completion_tokens=True), {"input": "hello", "max_output_tokens": 5})

    assert host.requests[0]["max_completion_tokens"] == 5
    assert "max_tokens" not in host.requests[0]


def test_metadata_is_sent_only_with_stored_completions(host: Host, make_model: MakeModel) -> None:
    for store in (True, False):
        post(make_model(host.url), {"input": "hello", "metadata": {"a": "b"}, "store": store})

    assert ["metadata" in request for request in host.requests] == [True, False]


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"uses_reasoning_parser": True}, {"content": "Yes."}),
        (
            {"uses_reasoning_parser": True, "uses_interleaved_reasoning": True},
            {"content": "Yes.", "reasoning_content": "Hm.", "reasoning": "Hm."},
        ),
        ({}, {"content": "<think>Hm.</think>Yes."}),
    ],
)
def test_earlier_reasoning_is_sent_back_as_configured(
    host: Host, make_model: MakeModel, settings: dict[str, Any], sent: dict[str, Any]
) -> None:
    post(make_model(host.url, **settings), {"input": [THOUGHT, SAID, {"role": "user", "content": "Sure?"}]})

    assert host.requests[0]["messages"][0] == {"role": "assistant", **sent}


def test_reasoning_becomes_items_or_an_error_that_names_the_setting(host: Host, make_model: MakeModel) -> None:
    host.message = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}

    (answer,) = post(make_model(host.url, uses_reasoning_parser=True), {"input": "Well?"})
    (failed,) = post(make_model(host.url), {"input": "Well?"})

    assert [item["type"] for item in answer.json()["output"]] == ["reasoning", "message"]
    assert failed.status_code == 500
    assert "set uses_reasoning_parser of policy_model to true" in failed.json()


def test_no_more_requests_at_once_than_allowed(host: Host, make_model: MakeModel) -> None:
    post(make_model(host.url, num_concurrent_requests=2), *[{"input": "hello"}] * 8)

    assert host.most_under_way == 2


def test_a_conversation_that_no_longer_fits_ends_without_an_error(host: Host, make_model: MakeModel) -> None:
    host.status, host.error = 400, "This endpoint's maximum context length is 4096 tokens."

    (answer,) = post(make_model(host.url), {"input": "hello"})

    assert answer.status_code == 200
    assert answer.json()["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_parameter_the_host_does_not_know_is_an_error(host: Host, make_model: MakeModel) -> None:
    host.status, host.error = 400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."

    (answer,) = post(make_model(host.url), {"input": "hello", "max_output_tokens": 5})

    assert answer.status_code == 500
    assert answer.headers["x-nemo-gym-error-status"] == "400"


def test_a_refused_key_is_named(host: Host, make_model: MakeModel) -> None:
    host.status, host.error = 401, "Invalid API key"

    (answer,) = post(
        make_model(host.url), {"messages": [{"role": "user", "content": "Hi"}]}, path="/v1/chat/completions"
    )

    assert "correct policy_api_key (api_key of policy_model)" in answer.json()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_take_the_policy_values(path: Path) -> None:
    policy = {"policy_base_url": "http://x/v1", "policy_api_key": "k", "policy_model_name": "m"}

    block: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), policy), resolve=True)

    inner = block["policy_model"]["responses_api_models"]["inference_provider"]
    loaded = InferenceProviderModelConfig.model_validate({**inner, "name": "policy_model", "host": "h", "port": 1})
    assert (loaded.api_key, loaded.model, loaded.uses_reasoning_parser) == ("k", "m", True)
    assert loaded.base_url.endswith("/v1")
