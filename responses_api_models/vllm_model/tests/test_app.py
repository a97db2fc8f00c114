"""Requests reach vLLM in its own terms, and its answers come back complete."""

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
    NeMoGymResponse,
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
CONFIGS = Path(__file__).parents[1] / "configs"
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
CALL = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def post(model: VLLMModel, *bodies: Any, path: str = "/v1/responses", **http_settings: Any) -> list[httpx.Response]:
    """The answers of the model's app to `bodies`, one after the other in one session."""

    async def ask() -> list[httpx.Response]:
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig(**http_settings))
        transport = httpx.ASGITransport(model.complete_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=30) as client:
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(ask())


def response(model: VLLMModel, body: Any) -> dict[str, Any]:
    (answer,) = post(model, body)
    assert answer.status_code == 200, answer.text
    NeMoGymResponse.model_validate_json(answer.content)
    got: dict[str, Any] = answer.json()
    return got


def test_a_request_becomes_a_chat_and_the_completion_a_response(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm(replies=[{"reasoning": "A tool.", "text": "\nLet me see.", "calls": [CALL]}])

    got = response(
        make_model(vllm.url, default_headers={"x-team": "blue"}),
        {
            "model": "asked-for",
            "instructions": "Be brief.",
            "input": "Weather?",
            "tools": [TOOL],
            "max_output_tokens": 9,
        },
    )

    assert vllm.requests == [
        {
            "model": "configured-model",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
            "max_tokens": 9,
        }
    ]
    assert (vllm.headers[0]["authorization"], vllm.headers[0]["x-team"]) == ("Bearer sk-right", "blue")
    assert [item["type"] for item in got["output"]] == ["reasoning", "message", "function_call"]
    assert got["output"][0]["summary"][0]["text"] == "A tool."
    assert got["output"][1]["content"][0]["text"] == "\nLet me see."
    assert (got["model"], got["status"], got["usage"]["total_tokens"]) == ("configured-model", "completed", 26)


def test_a_chat_comes_back_as_a_chat_with_reasoning_in_its_text(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm(replies=[{"reasoning": "Hm.", "text": "Yes."}])

    (answer,) = post(
        make_model(vllm.url), {"messages": [{"role": "user", "content": "Well?"}]}, path="/v1/chat/completions"
    )

    message = answer.json()["choices"][0]["message"]
    assert message["content"] == "<think>Hm.</think>Yes."
    assert "reasoning_content" not in message


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_both_spellings_of_the_reasoning_field_are_read(
    start_vllm: StartVLLM, make_model: MakeModel, field: str
) -> None:
    message = {"role": "assistant", "content": "Yes.", field: "Hm."}
    vllm = start_vllm(changes={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    got = response(make_model(vllm.url), {"input": "Well?"})

    assert [item["type"] for item in got["output"]] == ["reasoning", "message"]


def test_without_a_parser_think_tags_stay_text_both_ways(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm(splits_reasoning=False, replies=[{"reasoning": "Hm.", "text": "Yes."}])
    model = make_model(vllm.url, uses_reasoning_parser=False)

    got = response(model, {"input": "Well?"})
    response(model, {"input": [{"role": "user", "content": "Well?"}, *got["output"]]})

    assert got["output"][0]["content"][0]["text"] == "<think>Hm.</think>Yes."
    assert vllm.requests[1]["messages"][1] == {"role": "assistant", "content": "<think>Hm.</think>Yes."}


def test_reasoning_that_was_said_not_to_be_split_off_is_an_error_that_names_the_setting(
    start_vllm: StartVLLM, make_model: MakeModel
) -> None:
    vllm = start_vllm(replies=[{"reasoning": "Hm.", "text": "Yes."}])

    (answer,) = post(make_model(vllm.url, uses_reasoning_parser=False), {"input": "Well?"})

    assert answer.status_code == 500
    assert answer.headers["x-nemo-gym-error-class"] == "AssertionError"
    assert "set uses_reasoning_parser of policy_model to true" in answer.json()


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, {"content": "Yes.", "reasoning_content": "Hm.", "reasoning": "Hm."}),
        ({"uses_interleaved_reasoning": False}, {"content": "Yes."}),
        ({"preserve_reasoning_in_assistant_content": True}, {"content": "<think>Hm.</think>Yes."}),
        ({"uses_reasoning_parser": False}, {"content": "<think>Hm.</think>Yes."}),
    ],
)
def test_earlier_reasoning_is_sent_back_as_configured(
    start_vllm: StartVLLM, make_model: MakeModel, settings: dict[str, Any], sent: dict[str, Any]
) -> None:
    vllm = start_vllm()

    response(make_model(vllm.url, **settings), {"input": [THOUGHT, SAID, {"role": "user", "content": "Sure?"}]})

    assert vllm.requests[0]["messages"][0] == {"role": "assistant", **sent}


def test_fields_come_from_config_row_and_request_in_this_order(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm()
    model = make_model(
        vllm.url,
        extra_body={"top_k": 1, "min_p": 1, "temperature": 1},
        chat_template_kwargs={"enable_thinking": True, "style": "config"},
        sampling_overrides={"top_p": 0.5},
    )
    metadata = {
        "extra_body": json.dumps({"min_p": 2, "temperature": 2, "seed": 2}),
        "chat_template_kwargs": json.dumps({"enable_thinking": False}),
    }

    response(model, {"input": "hello", "metadata": metadata, "temperature": 3, "top_p": 0.9})

    (sent,) = vllm.requests
    fields = ("top_k", "min_p", "seed", "temperature", "top_p", "chat_template_kwargs", "metadata")
    assert {name: sent[name] for name in fields} == {
        "top_k": 1,
        "min_p": 2,
        "seed": 2,
        "temperature": 3,
        "top_p": 0.5,
        "chat_template_kwargs": {"enable_thinking": False, "style": "config"},
        "metadata": metadata,
    }


def test_developers_can_be_called_system(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm()

    response(
        make_model(vllm.url, replace_developer_role_with_system=True),
        {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    )

    assert [message["role"] for message in vllm.requests[0]["messages"]] == ["system", "user"]


def test_sound_in_the_metadata_reaches_the_model(start_vllm: StartVLLM, make_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "clip.wav").write_bytes(b"sound")
    vllm = start_vllm()

    response(
        make_model(vllm.url, audio_root=str(tmp_path)), {"input": "Listen.", "metadata": {"audio_path": "clip.wav"}}
    )

    (sent,) = vllm.requests
    assert [part["type"] for part in sent["messages"][0]["content"]] == ["audio_url", "text"]
    assert "metadata" not in sent


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "hello", "metadata": {"extra_body": "{"}}, "metadata.extra_body must be JSON"),
        ({"input": "hello", "metadata": {"audio_path": "clip.wav"}}, "audio_root"),
        ({"input": "hello", "tool_choice": "required"}, "offers no tools"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": "hello", "metadata": {"extra_body": '{"n": 2}'}}, "n must be 1"),
    ],
)
def test_a_request_that_cannot_be_put_to_the_endpoint_is_the_callers_fault(
    start_vllm: StartVLLM, make_model: MakeModel, body: Any, words: str
) -> None:
    vllm = start_vllm()

    (answer,) = post(make_model(vllm.url, return_token_id_information=True), body)

    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert vllm.requests == []


def test_a_conversation_that_no_longer_fits_ends_without_an_error(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm(max_model_len=50)

    got = response(make_model(vllm.url), {"input": "x" * 100})

    assert len(vllm.requests) == 1
    assert (got["status"], got["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert got["output"][0]["content"][0]["text"] == ""
    assert got["usage"] is None


def test_after_bare_reasoning_the_model_goes_on_unless_that_is_not_allowed(
    start_vllm: StartVLLM, make_model: MakeModel
) -> None:
    vllm = start_vllm()
    body = {"input": [{"role": "user", "content": "Well?"}, THOUGHT]}

    went_on = response(make_model(vllm.url), body)
    ended = response(make_model(vllm.url, sequential_reasoning_allowed=False), body)
    response(make_model(vllm.url, sequential_reasoning_allowed=False), {"input": [*body["input"], SAID]})

    assert went_on["status"] == "completed"
    assert ended["incomplete_details"]["reason"] == "content_filter"
    assert len(vllm.requests) == 2


@pytest.mark.parametrize("inline", [False, True])
def test_token_ids_for_training_come_with_the_last_item(
    start_vllm: StartVLLM, make_model: MakeModel, inline: bool
) -> None:
    vllm = start_vllm(replies=[{"reasoning": "Hm.", "text": "Yes."}])
    model = make_model(
        vllm.url,
        return_token_id_information=True,
        request_prompt_and_generation_token_ids=inline,
        chat_template_kwargs={"style": "plain"},
    )

    got = response(model, {"input": "Well?", "tools": [TOOL]})

    thought, message = got["output"]
    assert "prompt_token_ids" not in thought
    assert bytes(message["generation_token_ids"]).decode() == "<think>Hm.</think>Yes.<end>"
    assert len(message["generation_log_probs"]) == len(message["generation_token_ids"])
    assert bytes(message["prompt_token_ids"]).decode().startswith('{"style": "plain"}')
    assert bytes(message["prompt_token_ids"]).decode().endswith("<assistant>")
    assert len(vllm.tokenized) == (0 if inline else 1)
    assert vllm.requests[0]["logprobs"] is True


def test_token_ids_that_the_endpoint_does_not_send_are_an_error(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    message = {"role": "assistant", "content": "Yes."}
    vllm = start_vllm(changes={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    (answer,) = post(make_model(vllm.url, return_token_id_information=True), {"input": "Well?"})

    assert answer.headers["x-nemo-gym-error-class"] == "RuntimeError"
    assert "no log-probs" in answer.json()


def test_a_native_endpoint_is_asked_as_it_is(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm()
    model = make_model(
        vllm.url, is_responses_native=True, extra_body={"top_k": 1}, chat_template_kwargs={"enable_thinking": False}
    )

    got = response(model, {"input": "hello", "temperature": 0.5})

    assert vllm.requests == [
        {
            "input": "hello",
            "temperature": 0.5,
            "model": "configured-model",
            "top_k": 1,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert got["output"][0]["content"][0]["text"] == "native"


@pytest.mark.parametrize(
    "settings",
    [
        {"return_token_id_information": True},
        {"replace_developer_role_with_system": True},
        {"sequential_reasoning_allowed": False},
    ],
)
def test_what_a_native_endpoint_cannot_do_is_refused_at_the_start(
    make_model: MakeModel, settings: dict[str, Any]
) -> None:
    model = make_model("http://nowhere/v1", is_responses_native=True, **settings)

    with pytest.raises(NotImplementedError, match=next(iter(settings))):
        model.setup_webserver()
    with pytest.raises(NotImplementedError, match=next(iter(settings))):
        asyncio.run(model.responses(fake_request(), NeMoGymResponseCreateParamsNonStreaming(input="hello")))


@pytest.mark.parametrize(
    ("status", "said", "setting"),
    [
        (401, "Unauthorized", "correct policy_api_key (api_key of policy_model)"),
        (404, "The model `configured-model` does not exist.", "correct policy_model_name (model of policy_model)"),
        (404, "Not Found", "correct policy_base_url (base_url of policy_model)"),
    ],
)
def test_a_refusal_names_the_setting(
    serve: Callable[..., str], make_model: MakeModel, status: int, said: str, setting: str
) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def refuse() -> JSONResponse:
        return JSONResponse({"object": "error", "message": said, "code": status}, status)

    (answer,) = post(make_model(f"{serve(app)}/v1"), {"input": "hello"})

    assert answer.headers["x-nemo-gym-error-status"] == str(status)
    assert setting in answer.json()


def test_nobody_at_the_address_is_an_error_that_names_it(make_model: MakeModel) -> None:
    (answer,) = post(make_model("http://127.0.0.1:9/v1"), {"input": "hello"}, model_retry_max_tries=1)

    assert answer.headers["x-nemo-gym-error-class"] == "ServerUnreachableError"
    assert "correct policy_base_url (base_url of policy_model), now http://127.0.0.1:9/v1" in answer.json()


@pytest.mark.parametrize("changes", [{"choices": []}, {"choices": [{"index": 0}]}])
def test_an_answer_without_a_message_is_an_error_that_names_the_endpoint(
    start_vllm: StartVLLM, make_model: MakeModel, changes: dict[str, Any]
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


def test_a_subclass_changes_what_is_sent(start_vllm: StartVLLM, make_model: MakeModel) -> None:
    vllm = start_vllm()

    response(make_model(vllm.url, AskingPolitely), {"input": "hello"})

    assert vllm.requests[0]["messages"][-1] == {"role": "user", "content": "Please."}
    assert vllm.requests[0]["model"] == "configured-model"


def fake_request() -> Any:
    return SimpleNamespace(session={"session_id": "s"}, headers={})


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
