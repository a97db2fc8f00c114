import json
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionAssistantMessageForTrainingParam,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionMessage,
    NeMoGymChatCompletionMessageForTraining,
    NeMoGymChatCompletionMessageToolCall,
    NeMoGymChatCompletionUserMessageParam,
    NeMoGymChoice,
    NeMoGymFunction,
)

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CUSTOM_CALL = {"id": "call_2", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}


def completion(**message: Any) -> dict[str, Any]:
    choice = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", **message}}
    return {"id": "c1", "choices": [choice], "created": 1700000000, "model": "m", "object": "chat.completion"}


def test_a_completion_comes_back_with_everything_the_provider_sent() -> None:
    body = completion(content=None, reasoning_content="hm", tool_calls=[TOOL_CALL, CUSTOM_CALL])
    body["choices"][0]["logprobs"] = {"content": [{"token": "token_id:3", "logprob": -0.5}]}
    body["usage"] = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": 0},
        "completion_tokens_details": None,
    }

    read = NeMoGymChatCompletion.model_validate_json(json.dumps(body))

    assert read.model_dump(mode="json", exclude_unset=True) == body
    assert type(read.choices[0].message) is NeMoGymChatCompletionMessage


def test_a_message_with_token_ids_is_the_training_variant() -> None:
    body = completion(content="hi", **TOKENS)

    read = NeMoGymChatCompletion.model_validate_json(json.dumps(body))

    assert isinstance(read.choices[0].message, NeMoGymChatCompletionMessageForTraining)
    assert read.model_dump(mode="json", exclude_unset=True) == body


@pytest.mark.parametrize("absent", [*TOKENS])
def test_part_of_the_token_metadata_is_an_error(absent: str) -> None:
    partial = {name: value for name, value in TOKENS.items() if name != absent}

    with pytest.raises(ValidationError, match=f"must include all required fields; missing: {absent}"):
        NeMoGymChatCompletion.model_validate(completion(content="hi", **partial))
    with pytest.raises(ValidationError, match=f"must include all required fields; missing: {absent}"):
        NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(
            {"messages": [{"role": "assistant", "content": "hi", **partial}]}
        )


def test_a_completion_built_in_python_names_its_roles_and_types() -> None:
    call = NeMoGymChatCompletionMessageToolCall(id="call_1", function=NeMoGymFunction(name="f", arguments="{}"))
    choice = NeMoGymChoice(
        finish_reason="tool_calls", index=0, message=NeMoGymChatCompletionMessage(content=None, tool_calls=[call])
    )

    assert choice.model_dump(exclude_unset=True)["message"] == {
        "content": None,
        "role": "assistant",
        "tool_calls": [TOOL_CALL],
    }


def test_messages_stay_dicts_and_keep_unknown_keys() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d", "x": 1}]},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:,", "detail": "auto"}},
                {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
                {"type": "audio_url", "audio_url": {"url": "data:,"}},
                {"type": "video_url", "video_url": {"url": "data:,"}},
                {"type": "file", "file": {"file_id": "f"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL, CUSTOM_CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": "cold", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "hi", **TOKENS},
        {"role": "assistant", "tool_calls": [TOOL_CALL]},
    ]

    params = NeMoGymChatCompletionCreateParamsNonStreaming.model_validate_json(json.dumps({"messages": messages}))

    assert params.messages == messages
    assert params.model_dump(exclude_unset=True) == {"messages": messages}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "name": "f", "content": "x"},
        {"content": "x"},
        {"role": "user"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]},
    ],
)
def test_a_message_the_api_does_not_know_is_rejected_shortly(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        NeMoGymChatCompletionCreateParamsNonStreaming.model_validate({"messages": [message]})

    assert len(caught.value.errors()) <= 2
    assert len(str(caught.value)) < 1000


def test_unknown_parameters_are_ignored() -> None:
    params = NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(
        {"messages": [], "top_k": 20, "temperature": 1, "stream": False}
    )

    assert params.model_dump(exclude_unset=True) == {"messages": [], "temperature": 1.0, "stream": False}


def test_params_are_dumped_with_the_documented_fields_and_defaults() -> None:
    expected = (
        "messages model audio frequency_penalty logit_bias logprobs max_completion_tokens max_tokens metadata "
        "modalities n parallel_tool_calls prediction presence_penalty reasoning_effort response_format seed "
        "service_tier stop store stream_options temperature tool_choice tools top_logprobs top_p user "
        "web_search_options stream"
    )

    dumped = NeMoGymChatCompletionCreateParamsNonStreaming(messages=[]).model_dump()

    assert list(dumped) == expected.split()
    assert {name for name, value in dumped.items() if value is not None} == {"messages", "parallel_tool_calls"}


def test_tools_are_functions_or_custom() -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": None}},
        {"type": "custom", "custom": {"name": "sql"}},
    ]

    params = NeMoGymChatCompletionCreateParamsNonStreaming.model_validate({"messages": [], "tools": tools})

    assert params.tools == tools
    with pytest.raises(ValidationError):
        NeMoGymChatCompletionCreateParamsNonStreaming.model_validate({"messages": [], "tools": [{"type": "mcp"}]})


def test_streaming_is_not_offered() -> None:
    with pytest.raises(ValidationError, match="stream"):
        NeMoGymChatCompletionCreateParamsNonStreaming.model_validate({"messages": [], "stream": True})


def test_message_types_build_plain_dicts() -> None:
    user = NeMoGymChatCompletionUserMessageParam(role="user", content="hi")
    trained = NeMoGymChatCompletionAssistantMessageForTrainingParam(
        role="assistant",
        content="hi",
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
    )

    params = NeMoGymChatCompletionCreateParamsNonStreaming(messages=[user, trained])

    assert params.messages == [user, trained]
