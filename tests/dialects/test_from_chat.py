"""What a model says in a chat arrives complete as a response of the Responses API."""

from typing import Any

import pytest
from openai.types import responses as sdk

from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessage,
)
from nemo_gym.responses_converter import ResponsesConverter, split_responses_input_output_items

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


def completion(message: dict[str, Any], **choice: Any) -> NeMoGymChatCompletion:
    """As vLLM's documentation shows it, with the fields it always sends."""
    return NeMoGymChatCompletion.model_validate(
        {
            "id": "chatcmpl-8bd1f0a6a0bb4d6f8b1c",
            "object": "chat.completion",
            "created": 1753000000,
            "model": "Qwen/Qwen3-8B",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": None,
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                        "function_call": None,
                        "tool_calls": [],
                        "reasoning_content": None,
                        **message,
                    },
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": None,
                    **choice,
                }
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {"prompt_tokens": 20, "total_tokens": 26, "completion_tokens": 6, "prompt_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
        }
    )


def response(answer: NeMoGymChatCompletion, **params: Any) -> NeMoGymResponse:
    asked = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "hello", **params})
    answered = ResponsesConverter().chat_completion_to_response(asked, answer, model="configured")
    return NeMoGymResponse.model_validate_json(answered.model_dump_json())


def test_a_completion_of_vllm_becomes_a_response() -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    answer = completion(
        {"content": "<think>A tool.\nYes.</think>\nLet me see.", "tool_calls": [call]}, finish_reason="tool_calls"
    )

    got = response(answer, tools=[WEATHER], tool_choice="required", temperature=0.5, instructions="Be brief.")

    thinks, says, calls = got.output
    assert thinks.model_dump(include={"type", "summary"}) == {
        "type": "reasoning",
        "summary": [{"text": "A tool.\nYes.", "type": "summary_text"}],
    }
    assert isinstance(says, NeMoGymResponseOutputMessage)
    assert got.output_text == "\nLet me see."
    assert calls.model_dump() == {
        "arguments": "{}",
        "call_id": "call_7",
        "name": "get_weather",
        "type": "function_call",
        "id": "call_7",
        "status": "completed",
    }
    assert [item.id.partition("_")[0] for item in (got, thinks, says)] == ["resp", "rs", "msg"]  # type: ignore[union-attr]
    assert (got.model, got.created_at, got.status, got.incomplete_details) == (
        "configured",
        1753000000,
        "completed",
        None,
    )
    assert (got.tool_choice, got.temperature, got.instructions, got.tools) == ("required", 0.5, "Be brief.", [WEATHER])
    assert got.usage is not None
    assert got.usage.model_dump() == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 26,
    }


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 1}}, (4, 1)),
        ({"cached_input_tokens": 4, "reasoning_output_tokens": 1}, (4, 1)),
        ({"cache_read_input_tokens": 4}, (4, 0)),
        ({"prompt_tokens_details": {"cached_tokens": 3}, "cached_input_tokens": 4}, (3, 0)),
    ],
)
def test_details_of_the_usage_are_told_when_the_provider_tells_them(
    details: dict[str, Any], expected: tuple[int, int]
) -> None:
    answer = completion({"content": "hi"})
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 9, **details}
    told = NeMoGymChatCompletion.model_validate({**answer.model_dump(), "usage": usage})

    got = response(told).usage

    assert got is not None
    assert got.total_tokens == 9
    assert (got.input_tokens_details.cached_tokens, got.output_tokens_details.reasoning_tokens) == expected
    assert response(NeMoGymChatCompletion.model_validate({**answer.model_dump(), "usage": None})).usage is None


def test_openais_own_library_accepts_the_response() -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    answer = completion({"content": "<think>Hm.</think>Let me see.", "tool_calls": [call]}, finish_reason="length")

    got = response(answer, tools=[WEATHER], tool_choice="required", reasoning={"effort": "low"}).model_dump()

    del got["usage"]  # vLLM tells no details, which the library takes for granted
    assert sdk.Response.model_validate(got).output_text == "Let me see."


@pytest.mark.parametrize(
    ("finish_reason", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_an_answer_that_was_cut_off_says_so(finish_reason: str, reason: str) -> None:
    got = response(completion({"content": "half"}, finish_reason=finish_reason))

    assert got.status == "incomplete"
    assert got.incomplete_details is not None
    assert got.incomplete_details.reason == reason


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_answer_is_an_empty_message(content: str | None) -> None:
    (item,) = response(completion({"content": content})).output

    assert isinstance(item, NeMoGymResponseOutputMessage)
    assert [part.text for part in item.content] == [""]  # type: ignore[union-attr]


def test_a_refusal_is_a_refusal() -> None:
    (item,) = response(completion({"refusal": "I will not."})).output

    assert item.model_dump()["content"] == [{"refusal": "I will not.", "type": "refusal"}]


def test_token_ids_are_on_the_last_item_only() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    first, *_, last = response(completion({"content": "<think>Hm.</think>", "tool_calls": [call], **TOKENS})).output

    assert "prompt_token_ids" not in first.model_dump()
    assert isinstance(last, NeMoGymResponseFunctionToolCallForTraining)
    assert last.model_dump(include=set(TOKENS)) == TOKENS


def test_think_tags_stay_in_the_text_without_a_reasoning_parser() -> None:
    converter = ResponsesConverter(uses_reasoning_parser=False)

    (item,) = converter.postprocess_chat_response(completion({"content": "<think>Hm.</think>Yes."}).choices[0])

    assert item.content[0].text == "<think>Hm.</think>Yes."  # type: ignore[union-attr,index]


def test_a_chat_of_any_origin_becomes_items() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]

    items = ResponsesConverter().chat_completions_messages_to_responses_items(chat)

    assert [item.type for item in items] == [
        "message",
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "message",
    ]
    given, made = split_responses_input_output_items(items)
    assert (len(given), len(made)) == (2, 4)
    assert split_responses_input_output_items([item.model_dump() for item in items])[0] == [
        item.model_dump() for item in given
    ]


def test_a_part_without_a_form_in_the_responses_api_is_an_error_that_names_it() -> None:
    chat = [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "u"}}]}]

    with pytest.raises(NotImplementedError, match="audio_url"):
        ResponsesConverter().chat_completions_messages_to_responses_items(chat)


def test_a_conversation_in_which_the_model_has_no_say_is_all_input() -> None:
    items = ResponsesConverter().chat_completions_messages_to_responses_items([{"role": "user", "content": "Hi"}])

    assert split_responses_input_output_items(items) == (items, [])


def test_a_call_of_a_custom_tool_is_an_item() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}

    (item,) = response(completion({"tool_calls": [call]})).output
    assert item.model_dump(exclude={"id"}) == {
        "type": "custom_tool_call",
        "call_id": "c",
        "name": "shell",
        "input": "ls",
    }
