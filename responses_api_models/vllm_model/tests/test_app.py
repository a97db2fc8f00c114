"""Requests reach vLLM in its own terms, and its answers come back complete."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from nemo_gym.openai_utils import (
    NeMoGymResponseCreateParamsNonStreaming,
)
from responses_api_models.vllm_model.app import (
    VLLMModel,
    warn_once,
)

MakeModel = Callable[..., VLLMModel]
StartVLLM = Callable[..., Any]
Post = Callable[..., list[httpx.Response]]
Respond = Callable[[VLLMModel, Any], dict[str, Any]]
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
CALL = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def fake_request() -> Any:
    return SimpleNamespace(session={"session_id": "s"}, headers={})


def test_a_request_becomes_a_chat_and_the_completion_a_response(
    start_vllm: StartVLLM, make_model: MakeModel, respond: Respond
) -> None:
    vllm = start_vllm(replies=[{"reasoning": "A tool.", "text": "\nLet me see.", "calls": [CALL]}])

    got = respond(
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


def test_a_chat_comes_back_as_a_chat_with_reasoning_in_its_text(
    start_vllm: StartVLLM, make_model: MakeModel, post: Post
) -> None:
    vllm = start_vllm(replies=[{"reasoning": "Hm.", "text": "Yes."}])

    (answer,) = post(
        make_model(vllm.url), {"messages": [{"role": "user", "content": "Well?"}]}, path="/v1/chat/completions"
    )

    message = answer.json()["choices"][0]["message"]
    assert message["content"] == "<think>Hm.</think>Yes."
    assert "reasoning_content" not in message


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_both_spellings_of_the_reasoning_field_are_read(
    start_vllm: StartVLLM, make_model: MakeModel, field: str, respond: Respond
) -> None:
    message = {"role": "assistant", "content": "Yes.", field: "Hm."}
    vllm = start_vllm(changes={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    got = respond(make_model(vllm.url), {"input": "Well?"})

    assert [item["type"] for item in got["output"]] == ["reasoning", "message"]


def test_without_a_parser_think_tags_stay_text_both_ways(
    start_vllm: StartVLLM, make_model: MakeModel, respond: Respond
) -> None:
    vllm = start_vllm(splits_reasoning=False, replies=[{"reasoning": "Hm.", "text": "Yes."}])
    model = make_model(vllm.url, uses_reasoning_parser=False)

    got = respond(model, {"input": "Well?"})
    respond(model, {"input": [{"role": "user", "content": "Well?"}, *got["output"]]})

    assert got["output"][0]["content"][0]["text"] == "<think>Hm.</think>Yes."
    assert vllm.requests[1]["messages"][1] == {"role": "assistant", "content": "<think>Hm.</think>Yes."}


def test_reasoning_that_was_said_not_to_be_split_off_is_an_error_that_names_the_setting(
    start_vllm: StartVLLM, make_model: MakeModel, post: Post
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
    start_vllm: StartVLLM, make_model: MakeModel, settings: dict[str, Any], sent: dict[str, Any], respond: Respond
) -> None:
    vllm = start_vllm()

    respond(make_model(vllm.url, **settings), {"input": [THOUGHT, SAID, {"role": "user", "content": "Sure?"}]})

    assert vllm.requests[0]["messages"][0] == {"role": "assistant", **sent}


def test_fields_come_from_config_row_and_request_in_this_order(
    start_vllm: StartVLLM, make_model: MakeModel, respond: Respond
) -> None:
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

    respond(model, {"input": "hello", "metadata": metadata, "temperature": 3, "top_p": 0.9})

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


def test_developers_can_be_called_system(start_vllm: StartVLLM, make_model: MakeModel, respond: Respond) -> None:
    vllm = start_vllm()

    respond(
        make_model(vllm.url, replace_developer_role_with_system=True),
        {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    )

    assert [message["role"] for message in vllm.requests[0]["messages"]] == ["system", "user"]


def test_sound_in_the_metadata_reaches_the_model(
    start_vllm: StartVLLM, make_model: MakeModel, tmp_path: Path, respond: Respond
) -> None:
    (tmp_path / "clip.wav").write_bytes(b"sound")
    vllm = start_vllm()

    respond(
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
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": "hello", "metadata": {"extra_body": '{"n": 2}'}}, "n must be 1"),
    ],
)
def test_a_request_that_cannot_be_put_to_the_endpoint_is_the_callers_fault(
    start_vllm: StartVLLM, make_model: MakeModel, body: Any, words: str, post: Post
) -> None:
    vllm = start_vllm()

    (answer,) = post(make_model(vllm.url, return_token_id_information=True), body)

    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert vllm.requests == []


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "get_weather"}}, "tool_choice"),
    ],
)
def test_what_a_chat_cannot_honour_is_dropped_with_one_warning(
    start_vllm: StartVLLM,
    make_model: MakeModel,
    post: Post,
    caplog: pytest.LogCaptureFixture,
    asked: dict[str, Any],
    word: str,
) -> None:
    warn_once.cache_clear()
    vllm = start_vllm(replies=[{"text": "Yes."}])

    answers = post(make_model(vllm.url), *[{"input": "hello", **asked}] * 3)

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert {name: answers[0].json()[name] for name in asked} == asked
    assert [set(sent) for sent in vllm.requests] == [{"model", "messages"}] * 3
    assert [line for line in caplog.messages if word in line and "dropped" in line] == caplog.messages[:1]


def test_empty_turns_of_the_model_are_kept(start_vllm: StartVLLM, make_model: MakeModel, respond: Respond) -> None:
    vllm = start_vllm(replies=[{"text": "Yes."}])
    silent = {"role": "assistant", "content": ""}
    silent_output = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
    user = {"role": "user", "content": "Well?"}

    respond(make_model(vllm.url), {"input": [user, silent, user, silent_output, user]})

    assert [message["role"] for message in vllm.requests[0]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert vllm.requests[0]["messages"][1] == {"role": "assistant", "content": ""}


def test_a_conversation_that_no_longer_fits_ends_without_an_error(
    start_vllm: StartVLLM, make_model: MakeModel, respond: Respond
) -> None:
    vllm = start_vllm(max_model_len=50)

    got = respond(make_model(vllm.url), {"input": "x" * 100})

    assert len(vllm.requests) == 1
    assert (got["status"], got["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert got["output"][0]["content"][0]["text"] == ""
    assert got["usage"] is None


def test_after_bare_reasoning_the_model_goes_on_unless_that_is_not_allowed(
    start_vllm: StartVLLM, make_model: MakeModel, respond: Respond
) -> None:
    vllm = start_vllm()
    body = {"input": [{"role": "user", "content": "Well?"}, THOUGHT]}

    went_on = respond(make_model(vllm.url), body)
    ended = respond(make_model(vllm.url, sequential_reasoning_allowed=False), body)
    respond(make_model(vllm.url, sequential_reasoning_allowed=False), {"input": [*body["input"], SAID]})

    assert went_on["status"] == "completed"
    assert ended["incomplete_details"]["reason"] == "content_filter"
    assert len(vllm.requests) == 2


@pytest.mark.parametrize("inline", [False, True])
def test_token_ids_for_training_come_with_the_last_item(
    start_vllm: StartVLLM, make_model: MakeModel, inline: bool, respond: Respond
) -> None:
    vllm = start_vllm(replies=[{"reasoning": "Hm.", "text": "Yes."}])
    model = make_model(
        vllm.url,
        return_token_id_information=True,
        request_prompt_and_generation_token_ids=inline,
        chat_template_kwargs={"style": "plain"},
    )

    got = respond(model, {"input": "Well?", "tools": [TOOL]})

    thought, message = got["output"]
    assert "prompt_token_ids" not in thought
    assert bytes(message["generation_token_ids"]).decode() == "<think>Hm.</think>Yes.<end>"
    assert len(message["generation_log_probs"]) == len(message["generation_token_ids"])
    assert bytes(message["prompt_token_ids"]).decode().startswith('{"style": "plain"}')
    assert bytes(message["prompt_token_ids"]).decode().endswith("<assistant>")
    assert len(vllm.tokenized) == (0 if inline else 1)
    assert vllm.requests[0]["logprobs"] is True


def test_token_ids_that_the_endpoint_does_not_send_are_an_error(
    start_vllm: StartVLLM, make_model: MakeModel, post: Post
) -> None:
    message = {"role": "assistant", "content": "Yes."}
    vllm = start_vllm(changes={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    (answer,) = post(make_model(vllm.url, return_token_id_information=True), {"input": "Well?"})

    assert answer.headers["x-nemo-gym-error-class"] == "RuntimeError"
    assert "no log-probs" in answer.json()


def test_a_native_endpoint_is_asked_as_it_is(start_vllm: StartVLLM, make_model: MakeModel, respond: Respond) -> None:
    vllm = start_vllm()
    model = make_model(
        vllm.url, is_responses_native=True, extra_body={"top_k": 1}, chat_template_kwargs={"enable_thinking": False}
    )

    got = respond(model, {"input": "hello", "temperature": 0.5})

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
