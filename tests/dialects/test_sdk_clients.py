"""The official SDKs against running servers whose authors know one API, or both: all dialects, streamed or not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from nemo_gym.responses_streaming import sanitize_streaming_responses_body

SERVER = Path(__file__).with_name("speaking_server.py")
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
MESSAGES_TOOL: Any = {"name": "weather", "description": "Tells it", "input_schema": WEATHER}


@contextmanager
def speaking(kind: str, *options: str) -> Iterator[str]:
    command = [sys.executable, str(SERVER), kind, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


@pytest.fixture(scope="module", params=["responses", "chat", "both"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with speaking(request.param) as address:
        yield address


@pytest.fixture
def openai_sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/ng-rollout/3-1/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_sdk(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{url}/ng-rollout/3-1", api_key="none", max_retries=0) as client:
        yield client


def test_responses_are_answered_whole_and_as_a_stream(openai_sdk: openai.OpenAI) -> None:
    whole = openai_sdk.responses.create(model="m", input="hi")
    assert whole.output_text == "You said: hi"

    with openai_sdk.responses.stream(model="m", input="hi", instructions="Be brief") as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert final.output_text == "You said: hi"
    assert final.usage is not None
    assert final.usage.total_tokens == 18
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 2
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "You said: hi"
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})


def test_responses_call_tools_in_a_stream(openai_sdk: openai.OpenAI) -> None:
    stream = openai_sdk.responses.create(model="m", input="hi", tools=[TOOL], stream=True)
    done = [event.item for event in stream if event.type == "response.output_item.done"]

    (call,) = [item for item in done if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    replayed: Any = [
        {"role": "user", "content": "hi"},
        *(item.model_dump(exclude_none=True) for item in done),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = openai_sdk.responses.create(model="m", input=replayed, tools=[TOOL])
    assert answer.output_text == "You said: rain"


def test_a_response_that_was_cut_off_ends_its_stream_as_incomplete(openai_sdk: openai.OpenAI) -> None:
    events = list(openai_sdk.responses.create(model="m", input="hi", max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete"


def test_a_failure_is_told_within_a_stream_of_responses_and_by_status_elsewhere(
    openai_sdk: openai.OpenAI, anthropic_sdk: anthropic.Anthropic
) -> None:
    *_, last = openai_sdk.responses.create(model="m", input="fail", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "slow down" in last.response.error.message

    messages: Any = [{"role": "user", "content": "fail"}]
    with pytest.raises(openai.RateLimitError) as of_chat:
        openai_sdk.chat.completions.create(model="m", messages=messages, stream=True)
    with pytest.raises(openai.RateLimitError) as of_response:
        openai_sdk.responses.create(model="m", input="fail")
    with pytest.raises(anthropic.RateLimitError) as of_message:
        anthropic_sdk.messages.create(model="m", max_tokens=100, messages=messages)
    for refused in (of_chat, of_response, of_message):
        assert "slow down" in refused.value.response.text


def test_a_response_that_failed_is_a_failure_in_every_dialect() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with (
        speaking("responses") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as harness,
    ):
        *_, last = client.responses.create(model="m", input="hi", user="break", stream=True)
        assert last.type == "response.failed"
        for is_streamed in (False, True):
            with pytest.raises(openai.InternalServerError) as of_chat:
                client.chat.completions.create(model="m", messages=messages, user="break", stream=is_streamed)
            assert "server_error: out of memory" in of_chat.value.response.text
            with pytest.raises(anthropic.InternalServerError, match="server_error: out of memory"):
                harness.messages.create(
                    model="m", max_tokens=9, messages=messages, metadata={"user_id": "break"}, stream=is_streamed
                )


def test_chats_are_answered_whole_and_as_a_stream(openai_sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hi"}]
    whole = openai_sdk.chat.completions.create(model="m", messages=messages)
    assert whole.choices[0].message.content == "You said: hi"
    assert whole.choices[0].finish_reason == "stop"

    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(openai_sdk.chat.completions.create(model="m", messages=messages, **options))

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "You said: hi"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me see."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 18


def test_chats_call_tools_in_a_stream(openai_sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with openai_sdk.chat.completions.stream(model="m", messages=messages, tools=[CHAT_TOOL]) as stream:
        completion = stream.get_final_completion()

    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    called: Any = choice.message.tool_calls[0]
    assert (called.id, called.function.name, called.function.arguments) == ("call_1", "weather", '{"city": "Oslo"}')
    messages += [
        {"role": "assistant", "tool_calls": [called.model_dump(exclude={"function": {"parsed_arguments"}})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    again = openai_sdk.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
    assert again.choices[0].message.content == "You said: rain"


def test_messages_are_answered_whole_and_as_a_stream(anthropic_sdk: anthropic.Anthropic) -> None:
    asked: Any = {"model": "claude", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], "system": "S"}
    whole = anthropic_sdk.messages.create(**asked)
    with anthropic_sdk.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()

    assert text == "You said: hi"
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[-1].text == "You said: hi"  # type: ignore[union-attr]
        assert (message.model, message.stop_reason) == ("claude", "end_turn")
        assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)


def test_messages_call_tools_and_hear_what_they_say(anthropic_sdk: anthropic.Anthropic) -> None:
    conversation: Any = [{"role": "user", "content": "hi"}]
    settings: Any = {"model": "claude", "max_tokens": 100, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}
    with anthropic_sdk.messages.stream(**settings, messages=conversation) as stream:
        asked = stream.get_final_message()

    assert asked.stop_reason == "tool_use"
    (call,) = [block for block in asked.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    conversation += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = anthropic_sdk.messages.create(**settings, messages=conversation)
    assert answer.content[-1].text == "You said: rain"


def test_a_message_that_was_cut_off_says_so(anthropic_sdk: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    assert anthropic_sdk.messages.create(model="m", max_tokens=1, messages=messages).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "search_result", "source": "x", "title": "t", "content": []}], "search_result"),
        ([{"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}}], "image/tiff"),
        (7, "text or a list of blocks"),
        ([{"type": "text"}], "a block lacks its 'text'"),
        ([{"type": "tool_use", "name": "t", "input": {}}], "a block lacks its 'id'"),
        ([{"type": "tool_result", "tool_use_id": "c", "content": 7}], "no Messages request"),
    ],
)
def test_what_has_no_form_is_refused_in_the_words_of_the_messages_api(
    anthropic_sdk: anthropic.Anthropic, content: Any, words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        anthropic_sdk.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_long_numbers_in_arguments_reach_the_harness_and_come_back_to_the_last_digit() -> None:
    with (
        speaking("responses") as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        conversation: Any = [{"role": "user", "content": "count"}]
        settings: Any = {"model": "m", "max_tokens": 9, "tools": [MESSAGES_TOOL]}
        asked = client.messages.create(**settings, messages=conversation)
        (call,) = [block for block in asked.content if block.type == "tool_use"]
        assert call.input == {"n": 2**70}
        with client.messages.stream(**settings, messages=conversation) as stream:
            assert f'{{"n": {2**70}}}' in [event.partial_json for event in stream if event.type == "input_json"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "many"}
        conversation += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**settings, messages=conversation).content[-1].text == "You said: many"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "audio_url", "audio_url": {"url": "https://sound"}}, "A part of type 'audio_url' has no form"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "a part lacks its 'url'"),
        ({"type": "image_url", "image_url": {"url": 7}}, "a flaw in"),
    ],
)
def test_a_chat_without_a_form_as_a_response_is_refused(part: Any, words: str) -> None:
    with speaking("responses") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
        assert words in refused.value.response.text


def test_a_body_that_is_wrong_is_refused_as_ever(openai_sdk: openai.OpenAI) -> None:
    wrong_input: Any = [{"type": "nonsense"}]
    with pytest.raises(openai.UnprocessableEntityError):
        openai_sdk.responses.create(model="m", input=wrong_input)
    wrong_messages: Any = "hi"
    with pytest.raises(openai.UnprocessableEntityError):
        openai_sdk.chat.completions.create(model="m", messages=wrong_messages, stream=True)


@pytest.mark.parametrize(
    "wrong", [{"instructions": 5, "input": [{"role": "system", "content": "s"}]}, {"tools": "weather"}]
)
def test_a_stream_that_is_asked_for_wrongly_is_refused(wrong: Any) -> None:
    with speaking("responses") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.UnprocessableEntityError):
            client.responses.create(**{"model": "m", "input": "hi", "stream": True, **wrong})
        odd: Any = {"type": "namespace", "name": "crm", "tools": 5}
        assert list(client.responses.create(model="m", input="hi", tools=[odd], stream=True))[-1].type == (
            "response.completed"
        )


def test_an_image_among_the_first_instructions_stays() -> None:
    shown = {"role": "system", "content": [{"type": "input_image", "image_url": "https://image"}]}
    begin: Any = [{"role": "developer", "content": "Be brief"}, shown, {"role": "user", "content": "hi"}]
    asked, _ = sanitize_streaming_responses_body({"input": begin, "stream": True})
    assert (asked["instructions"], asked["input"]) == ("Be brief", begin[1:])


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("babble", "not JSON"),
        ("count on", f'{{"n": {"7" * 5000}}}'),
        *((f"nest {levels}", f'{{"n": {"[" * levels}{2**70}{"]" * levels}}}') for levels in (300, 960, 1000, 9000)),
    ],
)
def test_a_call_whose_arguments_cannot_be_read_reaches_the_harness_and_comes_back(said: str, arguments: str) -> None:
    with (
        speaking("responses") as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        conversation: Any = [{"role": "user", "content": said}]
        settings: Any = {"model": "m", "max_tokens": 9, "tools": [MESSAGES_TOOL]}
        asked = client.messages.create(**settings, messages=conversation)
        (call,) = [block for block in asked.content if block.type == "tool_use"]
        assert call.input == {"_raw": arguments}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "no such city", "is_error": True}
        conversation += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**settings, messages=conversation).content[-1].text == "You said: no such city"


def test_a_client_with_namespaces_and_items_of_its_own_is_understood() -> None:
    space: Any = {"type": "namespace", "name": "crm", "tools": [TOOL]}
    items: Any = [
        {"role": "developer", "content": "Be brief"},
        {"type": "additional_tools", "tools": [{**TOOL, "name": "more"}]},
        {"type": "unheard_of", "secret": 1},
        {"role": "user", "content": "hi"},
    ]
    with speaking("responses") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        more: Any = {"client_metadata": {"x": 1}}
        events = list(client.responses.create(model="m", input=items, tools=[space], stream=True, extra_body=more))
    earlier = {"type": "function_call", "call_id": "c", "name": "weather", "namespace": "crm", "arguments": "{}"}
    (sent_back,) = sanitize_streaming_responses_body({"input": [earlier], "stream": True})[0]["input"]
    assert sent_back == {"type": "function_call", "call_id": "c", "name": "crm__weather", "arguments": "{}"}

    assert events[-1].type == "response.completed"
    response = events[-1].response
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.name == "weather"
    assert call.model_dump()["namespace"] == "crm"
    assert response.instructions == "Be brief"


def test_a_responses_request_can_be_asked_of_an_endpoint_that_speaks_messages() -> None:
    from nemo_gym.anthropic_converter import AnthropicConverter
    from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming

    converter = AnthropicConverter()
    items: Any = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}],
        },
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "encrypted_content": "s",
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{oops"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    asked = NeMoGymResponseCreateParamsNonStreaming.model_validate(
        {
            "input": items,
            "instructions": "S",
            "tools": [TOOL],
            "max_output_tokens": 50,
            "metadata": {"extra_body": '{"stop": "x"}'},
        }
    )
    request = converter.responses_to_anthropic(asked, "claude", 10, None, None, {})

    assert request["system"] == "S\n\nBe brief"
    assert [message["role"] for message in request["messages"]] == ["user", "assistant", "user"]
    assert [block["type"] for block in request["messages"][0]["content"]] == ["text", "image"]
    assert request["messages"][1]["content"][1]["input"] == {"_raw": "{oops"}
    assert (request["max_tokens"], request["stop_sequences"]) == (50, ["x"])
    with speaking("responses") as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        said = client.messages.create(**request)
    answer = converter.anthropic_to_responses(said.model_dump(mode="json"), asked, "claude")

    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (11, 7)
    back = converter.anthropic_request_to_responses(request)
    assert [item.type for item in back.input][1:] == ["reasoning", "function_call", "function_call_output"]  # type: ignore[union-attr]
    assert back.metadata == {"extra_body": '{"stop":["x"]}'}
    with pytest.raises(ValueError, match="thinking and thinking_budget_tokens both"):
        converter.responses_to_anthropic(asked, "m", 1, {"type": "enabled"}, 100, {})
    stored = asked.model_copy(update={"previous_response_id": "resp_1"})
    with pytest.raises(NotImplementedError, match="previous_response_id"):
        converter.responses_to_anthropic(stored, "m", 1, None, None, {})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("auto", "auto"), ("none", "none"), ("any", "required"), ("tool", {"type": "function", "name": "weather"})],
)
def test_everything_that_a_messages_request_says_is_asked(choice: str, expected: Any) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    body = {
        "model": "claude",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        "tools": [{"name": "weather"}],
        "tool_choice": {"type": choice, "name": "weather", "disable_parallel_tool_use": True},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}, picture]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "signed"},
                    {"type": "text", "text": "I ask"},
                    {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}]},
        ],
    }
    from nemo_gym.anthropic_converter import AnthropicConverter

    asked = AnthropicConverter().anthropic_request_to_responses(body).model_dump(mode="json", exclude_unset=True)

    kinds = [item["type"] for item in asked["input"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    look, thought, said, call, output = asked.pop("input")
    assert [part["type"] for part in look["content"]] == ["input_text", "input_image"]
    assert look["content"][1]["image_url"] == "data:image/png;base64,aa"
    assert (thought["summary"][0]["text"], thought["encrypted_content"]) == ("hm", "signed")
    assert (said["role"], said["content"]) == ("assistant", "I ask")
    assert (call["call_id"], call["name"], json.loads(call["arguments"])) == ("c", "weather", {"city": "Oslo"})
    assert (output["call_id"], output["output"]) == ("c", "rain")
    assert json.loads(asked.pop("metadata")["extra_body"]) == {"stop": ["END"], "top_k": 3}
    schema = {"type": "object", "properties": {}}
    assert asked == {
        "model": "claude",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "user": "u",
        "instructions": "one\ntwo",
        "tools": [{"type": "function", "name": "weather", "strict": False, "parameters": schema}],
        "tool_choice": expected,
        "parallel_tool_calls": False,
    }
