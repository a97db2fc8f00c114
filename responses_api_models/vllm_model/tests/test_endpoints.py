"""Endpoints that refuse, break or share the work, and what programs elsewhere replace or read."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from omegaconf import OmegaConf

from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.responses_converter import ResponsesConverter
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, set_global_aiohttp_client
from responses_api_models.vllm_model import app as app_module
from responses_api_models.vllm_model.app import (
    VLLMConverter,
    VLLMModel,
    VLLMModelConfig,
    split_responses_input_output_items,
)

MakeModel = Callable[..., VLLMModel]
StartVLLM = Callable[..., Any]
Post = Callable[..., list[httpx.Response]]
Respond = Callable[[VLLMModel, Any], dict[str, Any]]
CONFIGS = Path(__file__).parents[1] / "configs"


def fake_request() -> Any:
    return SimpleNamespace(session={"session_id": "s"}, headers={})


@pytest.mark.parametrize(
    ("status", "said", "setting"),
    [
        (401, "Unauthorized", "correct policy_api_key (api_key of policy_model)"),
        (404, "The model `configured-model` does not exist.", "correct policy_model_name (model of policy_model)"),
        (404, "Not Found", "correct policy_base_url (base_url of policy_model)"),
    ],
)
def test_a_refusal_names_the_setting(
    serve: Callable[..., str], make_model: MakeModel, status: int, said: str, setting: str, post: Post
) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def refuse() -> JSONResponse:
        return JSONResponse({"object": "error", "message": said, "code": status}, status)

    (answer,) = post(make_model(f"{serve(app)}/v1"), {"input": "hello"})

    assert answer.headers["x-nemo-gym-error-status"] == str(status)
    assert setting in answer.json()


def test_nobody_at_the_address_is_an_error_that_names_it(make_model: MakeModel, post: Post) -> None:
    (answer,) = post(make_model("http://127.0.0.1:9/v1"), {"input": "hello"}, model_retry_max_tries=1)

    assert answer.headers["x-nemo-gym-error-class"] == "ServerUnreachableError"
    assert "correct policy_base_url (base_url of policy_model), now http://127.0.0.1:9/v1" in answer.json()


@pytest.mark.parametrize("changes", [{"choices": []}, {"choices": [{"index": 0}]}])
def test_an_answer_without_a_message_is_an_error_that_names_the_endpoint(
    start_vllm: StartVLLM, make_model: MakeModel, changes: dict[str, Any], post: Post
) -> None:
    vllm = start_vllm(changes=changes)

    (answer,) = post(make_model(vllm.url), {"input": "hello"})

    assert f"The model endpoint {vllm.url} answered without a message" in answer.json()


def test_sessions_are_spread_over_the_endpoints_and_stay(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    endpoints = [start_vllm(), start_vllm()]
    model = make_model([endpoint.url for endpoint in endpoints])

    async def talk() -> None:
        transport = httpx.ASGITransport(model.complete_app())
        clients = [httpx.AsyncClient(transport=transport, base_url="http://model", timeout=30) for _ in range(6)]
        for _ in range(3):
            await asyncio.gather(
                *(client.post("/v1/responses", json={"input": str(name)}) for name, client in enumerate(clients))
            )
        for client in clients:
            await client.aclose()

    asyncio.run(talk())

    met = [{request["messages"][0]["content"][0]["text"] for request in endpoint.requests} for endpoint in endpoints]
    assert [len(names) for names in met] == [3, 3]
    assert met[0].isdisjoint(met[1])
    assert [len(endpoint.requests) for endpoint in endpoints] == [9, 9]


class AskingPolitely(VLLMModel):
    """As programs elsewhere do it: one method changes what is sent."""

    def _preprocess_chat_completion_create_params(self, request: Request, body_dict: dict[str, Any]) -> dict[str, Any]:
        body = super()._preprocess_chat_completion_create_params(request, body_dict)
        return {**body, "messages": [*body["messages"], {"role": "user", "content": "Please."}]}


def test_a_subclass_changes_what_is_sent(start_vllm: StartVLLM, make_model: MakeModel, respond: Respond) -> None:
    vllm = start_vllm()

    respond(make_model(vllm.url, AskingPolitely), {"input": "hello"})

    assert vllm.requests[0]["messages"][-1] == {"role": "user", "content": "Please."}
    assert vllm.requests[0]["model"] == "configured-model"


def test_clients_time_and_ids_can_be_replaced(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "time", lambda: 1234.5)
    monkeypatch.setattr(app_module, "uuid4", lambda: SimpleNamespace(hex="123"))
    model = make_model("http://nowhere/v1")
    model._clients = [MagicMock(spec=NeMoGymAsyncOpenAI)]
    message = {"role": "assistant", "content": "<think>Hm.</think>Yes."}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    model._clients[0].create_chat_completion = AsyncMock(  # type: ignore[method-assign]
        return_value={"id": "c", "created": 7, "model": "m", "choices": [choice]}
    )
    body = NeMoGymResponseCreateParamsNonStreaming(input="hello")

    got = asyncio.run(model.responses(fake_request(), body))
    empty = model._nothing_said("length")

    assert (got.id, [item.id for item in got.output]) == ("resp_123", ["rs_123", "msg_123"])  # type: ignore[union-attr]
    assert (empty.id, empty.created) == ("chtcmpl-123", 1234)


def test_the_converter_goes_by_its_old_name() -> None:
    converter = VLLMConverter(return_token_id_information=True)

    items = converter.chat_completions_messages_to_responses_items([{"role": "user", "content": "Hi"}])

    assert isinstance(converter, ResponsesConverter)
    assert split_responses_input_output_items(items).input == items


def test_everything_sent_and_received_can_be_logged(
    start_vllm: StartVLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEMO_GYM_VLLM_TRANSPORT_LOG", str(tmp_path / "log.jsonl"))
    vllm = start_vllm()
    model = make_model(vllm.url)
    broken = make_model("http://127.0.0.1:9/v1")

    async def ask() -> None:
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig(model_retry_max_tries=1))
        for one in (model, broken):
            transport = httpx.ASGITransport(one.complete_app())
            async with httpx.AsyncClient(transport=transport, base_url="http://model") as client:
                await client.post("/v1/responses", json={"input": "hello"}, headers={"X-NeMo-Gym-Log-Row": "7"})

    asyncio.run(ask())

    answered, failed = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert (answered["call"], answered["base_url"]) == ("create_chat_completion", vllm.url)
    assert answered["context"] == {"row": "7"}
    assert answered["request"] == vllm.requests[0]
    assert answered["response"]["choices"][0]["message"]["content"] == "Hello."
    assert "ServerUnreachableError" in failed["error"]


@pytest.mark.parametrize("urls", ["http://x/v1", ["http://x/v1", "http://y/v1"]])
@pytest.mark.parametrize("name", ["vllm_model", "vllm_model_for_training", "vllm_model_completions"])
def test_the_shipped_configs_take_the_three_policy_values(name: str, urls: Any) -> None:
    config = OmegaConf.load(CONFIGS / f"{name}.yaml")
    policy = {"policy_base_url": urls, "policy_api_key": "k", "policy_model_name": "m"}

    block: Any = OmegaConf.to_container(OmegaConf.merge(config, policy), resolve=True)

    inner = block["policy_model"]["responses_api_models"]["vllm_model"]
    loaded = VLLMModelConfig.model_validate({**inner, "name": "policy_model", "host": "h", "port": 1})
    assert loaded.base_url == ([urls] if isinstance(urls, str) else urls)
    assert (loaded.api_key, loaded.model) == ("k", "m")
    assert loaded.return_token_id_information is (name == "vllm_model_for_training")


def test_an_empty_list_of_addresses_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match="at least one address"):
        make_model([])


def test_the_empty_completion_of_a_chat_is_a_completion(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    model = make_model(start_vllm(max_model_len=1).url)
    body = NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}]}
    )

    got = asyncio.run(model.chat_completions(fake_request(), body))

    assert (got.choices[0].finish_reason, got.choices[0].message.content) == ("length", None)
