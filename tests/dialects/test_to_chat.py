"""A Responses request, put to a Chat Completions endpoint, asks the same."""

import pickle
from typing import Any

import pytest

from nemo_gym.dialects.base import NoChatFormError, UnusableRequestError
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.responses_converter import ResponsesConverter

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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("required", "required"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            },
        ),
    ],
)
def test_the_choice_of_tools_is_translated(given: Any, expected: Any) -> None:
    assert chat_request(input="hello", tools=[WEATHER], tool_choice=given)["tool_choice"] == expected


def test_any_json_object_may_be_demanded() -> None:
    request = chat_request(input="hello", text={"format": {"type": "json_object"}})

    assert request["response_format"] == {"type": "json_object"}


def test_tool_messages_of_a_chat_are_understood() -> None:
    items: Any = [
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hm."}, {"type": "refusal", "refusal": "No."}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    params = NeMoGymResponseCreateParamsNonStreaming.model_construct(input=items)

    chat = ResponsesConverter().responses_to_chat_completion_create_params(params)

    assert chat.messages == [
        {"role": "assistant", "content": "Hm.No."},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]


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
        (
            {"input": [{"type": "web_search_call", "id": "ws_1"}]},
            r"web_search_call.*has no Chat Completions representation",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}]},
            r"input\[0\].*input_image.*file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}]}, "file_url"),
        ({"input": "hello", "tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": "hello", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hello", "tools": [WEATHER], "tool_choice": {"type": "mcp", "server_label": "x"}}, "mcp"),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "may only hold text",
        ),
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


def test_custom_tools_go_on() -> None:
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
