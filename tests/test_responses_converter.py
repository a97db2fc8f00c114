"""A Responses request asks the same as a chat, and what a chat answers arrives complete."""

import pickle
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
from nemo_gym.responses_chat.errors import NoChatFormError, UnusableRequestError
from nemo_gym.responses_converter import ResponsesConverter, split_responses_input_output_items

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


def chat_request(converter: ResponsesConverter | None = None, **params: Any) -> dict[str, Any]:
    asked = NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
    chat = (converter or ResponsesConverter()).responses_to_chat_completion_create_params(asked)
    return chat.model_dump(exclude_unset=True)


def messages_of(items: list[Any], **settings: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = chat_request(ResponsesConverter(**settings), input=items)["messages"]
    return messages


def thought(*texts: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": t} for t in texts], **more}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def called(call_id: str = "call_1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "get_weather", "arguments": '{"city": "Oslo"}', **more}


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


# Responses to chat


def test_text_as_input_is_one_user_message_with_a_text_part() -> None:
    assert chat_request(input="hello") == {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    }


def test_what_the_model_did_in_one_turn_is_one_message() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        thought("A tool", " helps."),
        said("Let me see. "),
        called("call_1"),
        called("call_2"),
        {"type": "function_call_output", "call_id": "call_1", "output": "cold"},
        {"type": "function_call_output", "call_id": "call_2", "output": "colder"},
        {"role": "assistant", "content": "Cold."},
    ]
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}

    assert messages_of(items) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "<think>A tool</think><think> helps.</think>Let me see. ",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": function},
                {"id": "call_2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
        {"role": "tool", "tool_call_id": "call_2", "content": "colder"},
        {"role": "assistant", "content": "Cold."},
    ]


def test_a_turn_of_tool_calls_alone_has_no_content() -> None:
    (message,) = messages_of([called()])

    assert message["content"] is None


def test_parts_of_every_kind_go_on() -> None:
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": "https://host/cat.png"},
        {"type": "input_image", "image_url": "https://host/dog.png", "detail": "low"},
        {"type": "input_video", "video_url": "https://host/cat.mp4"},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "input_file", "file_data": "data:text/plain;base64,aGk=", "filename": "hi.txt"},
    ]

    (message,) = messages_of([{"role": "user", "content": parts}])

    assert message["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "https://host/cat.png", "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": "https://host/dog.png", "detail": "low"}},
        {"type": "video_url", "video_url": {"url": "https://host/cat.mp4"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,aGk=", "filename": "hi.txt"}},
    ]


def test_a_tool_may_answer_in_parts() -> None:
    output = [{"type": "input_text", "text": "cold"}]

    messages = messages_of([called(), {"type": "function_call_output", "call_id": "call_1", "output": output}])

    assert messages[1] == {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "cold"}],
    }


def test_chat_shaped_assistant_items_are_understood() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    (message,) = messages_of([{"role": "assistant", "content": "Hm.", "tool_calls": [call]}])

    assert message == {"role": "assistant", "content": "Hm.", "tool_calls": [call]}


def test_instructions_take_in_the_system_messages_in_front() -> None:
    items = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": [{"type": "input_text", "text": "Two."}]},
        {"role": "user", "content": "Go."},
        {"role": "system", "content": "Later."},
    ]

    messages = chat_request(input=items, instructions="Zero.")["messages"]

    assert messages == [
        {"role": "system", "content": "Zero.\n\nOne.\n\nTwo."},
        {"role": "user", "content": "Go."},
        {"role": "system", "content": "Later."},
    ]


def test_settings_are_translated() -> None:
    request = chat_request(
        input="hello",
        max_output_tokens=7,
        reasoning={"effort": "low"},
        temperature=0.3,
        top_p=0.9,
        user="me",
        metadata={"extra_body": "{}"},
        truncation="auto",
        max_tool_calls=3,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}},
    )
    del request["messages"]

    assert request == {
        "max_tokens": 7,
        "reasoning_effort": "low",
        "temperature": 0.3,
        "top_p": 0.9,
        "user": "me",
        "metadata": {"extra_body": "{}"},
        "tools": [
            {
                "type": "function",
                "function": {name: WEATHER[name] for name in ("name", "description", "parameters")},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }


def test_nulls_and_settings_about_absent_tools_are_left_out() -> None:
    request = chat_request(
        input="hello",
        temperature=None,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning=None,
        text={"format": {"type": "text"}},
    )

    assert set(request) == {"messages"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_demanding_a_tool_without_offering_one_is_an_error(choice: Any) -> None:
    with pytest.raises(ValueError, match="offers no tools"):
        chat_request(input="hello", tool_choice=choice)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, r"input\[0\].*web_search_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}]},
            r"input\[0\].*input_image.*file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}]}, "file_url"),
        ({"input": "hello", "tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": "hello", "previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_has_no_chat_form_is_an_error_that_names_it(params: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words) as caught:
        chat_request(**params)

    assert isinstance(caught.value, NoChatFormError)
    assert caught.value.status_code == 400


def test_errors_about_requests_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(UnusableRequestError("n must be 1")))

    assert (type(copy), str(copy), copy.status_code) == (UnusableRequestError, "n must be 1", 400)


def test_custom_tools_travel_both_ways() -> None:
    tool = {"type": "custom", "name": "shell", "description": "Run it"}
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "a.txt"},
    ]

    request = chat_request(input=items, tools=[tool], tool_choice={"type": "custom", "name": "shell"})

    call = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    assert request["tools"] == [{"type": "custom", "custom": {"name": "shell", "description": "Run it"}}]
    assert request["tool_choice"] == {"type": "custom", "custom": {"name": "shell"}}
    assert request["messages"][0]["tool_calls"] == [call]
    assert request["messages"][1] == {"role": "tool", "tool_call_id": "c", "content": "a.txt"}
    (item,) = response(completion({"tool_calls": [call]})).output
    assert item.model_dump(exclude={"id"}) == {
        "type": "custom_tool_call",
        "call_id": "c",
        "name": "shell",
        "input": "ls",
    }


def test_token_ids_stay_with_the_turn_they_belong_to() -> None:
    items = [{"role": "user", "content": "1"}, said("a", **TOKENS), {"role": "user", "content": "2"}, said("b")]

    with_ids = messages_of(items, return_token_id_information=True)
    without = messages_of(items)

    assert with_ids[1] == {"role": "assistant", "content": "a", **TOKENS}
    assert with_ids[3] == {"role": "assistant", "content": "b"}
    assert not any("prompt_token_ids" in message for message in without)


def test_turns_that_follow_each_other_are_told_apart_by_their_token_ids() -> None:
    items = [{"role": "user", "content": "1"}, thought("Hm.", **TOKENS), thought("Well."), said("a", **TOKENS)]

    messages = messages_of(items, return_token_id_information=True)

    assert [message["content"] for message in messages] == ["1", "<think>Hm.</think>", "<think>Well.</think>a"]
    assert all("generation_token_ids" in message for message in messages[1:])


# Chat to Responses


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
        "input_tokens_details": None,
        "output_tokens": 6,
        "output_tokens_details": None,
        "total_tokens": 26,
    }


def test_details_of_the_usage_are_told_when_the_provider_tells_them() -> None:
    answer = completion({"content": "hi"})
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    told = NeMoGymChatCompletion.model_validate({**answer.model_dump(), "usage": usage})

    got = response(told).usage

    assert got is not None
    assert (got.total_tokens, got.input_tokens_details.cached_tokens, got.output_tokens_details.reasoning_tokens) == (  # type: ignore[union-attr]
        9,
        4,
        1,
    )
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


def test_a_conversation_in_which_the_model_has_no_say_is_all_input() -> None:
    items = ResponsesConverter().chat_completions_messages_to_responses_items([{"role": "user", "content": "Hi"}])

    assert split_responses_input_output_items(items) == (items, [])
