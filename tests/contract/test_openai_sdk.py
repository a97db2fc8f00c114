"""What travels here is what OpenAI's own SDK reads and writes.

`model_validate` is stricter than the SDK's client, which accepts nearly anything, so
single answers are held against the former. Whole trajectories, which hold tool outputs
no endpoint returns, and the requests the SDK sends go through a real client and server.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from openai.types import CompletionUsage
from openai.types import responses as sdk
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from pydantic import BaseModel

from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionMessage,
    NeMoGymChatCompletionMessageToolCall,
    NeMoGymChoice,
    NeMoGymFunction,
    NeMoGymFunctionCallOutput,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseUsage,
    NeMoGymSummary,
)

USAGE = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 15,
}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}


def our_response(**fields: Any) -> NeMoGymResponse:
    output = [
        NeMoGymResponseReasoningItem(id="rs_1", summary=[NeMoGymSummary(text="a tool helps")]),
        NeMoGymResponseFunctionToolCall(arguments="{}", call_id="call_1", name="get_weather"),
        NeMoGymResponseOutputMessage(
            id="msg_1",
            content=[NeMoGymResponseOutputText(text="It is cold."), NeMoGymResponseOutputRefusal(refusal="No more.")],
        ),
    ]
    return NeMoGymResponse.model_validate({"id": "r", "created_at": 1.5, "model": "m", "output": output, **fields})


def sdk_response() -> sdk.Response:
    return sdk.Response.model_validate(
        {
            "id": "resp_1",
            "created_at": 1700000000.0,
            "model": "gpt-4.1",
            "object": "response",
            "output": [
                sdk.ResponseReasoningItem.model_validate(
                    {
                        "id": "rs_1",
                        "type": "reasoning",
                        "summary": [{"type": "summary_text", "text": "a tool helps"}],
                        "content": [{"type": "reasoning_text", "text": "hm"}],
                        "encrypted_content": "AA==",
                    }
                ),
                sdk.ResponseFunctionToolCall(
                    type="function_call", name="f", arguments="{}", call_id="c", id="fc_1", status="completed"
                ),
                sdk.ResponseFunctionWebSearch.model_validate(
                    {
                        "id": "ws_1",
                        "type": "web_search_call",
                        "status": "completed",
                        "action": {"type": "search", "query": "weather"},
                    }
                ),
                sdk.ResponseOutputMessage(
                    id="msg_1",
                    type="message",
                    role="assistant",
                    status="completed",
                    content=[
                        sdk.ResponseOutputText.model_validate(
                            {
                                "type": "output_text",
                                "text": "It is cold.",
                                "annotations": [
                                    {
                                        "type": "url_citation",
                                        "url": "https://example.org",
                                        "title": "t",
                                        "start_index": 0,
                                        "end_index": 2,
                                    }
                                ],
                                "logprobs": [{"token": "It", "bytes": [73, 116], "logprob": -0.1, "top_logprobs": []}],
                            }
                        ),
                        sdk.ResponseOutputRefusal(type="refusal", refusal="No more."),
                    ],
                ),
            ],
            "parallel_tool_calls": True,
            "tool_choice": {"type": "function", "name": "f"},
            "tools": [TOOL],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "incomplete_details": {"reason": "max_output_tokens"},
            "metadata": {"run": "1"},
            "status": "incomplete",
            "usage": USAGE,
        }
    )


def sdk_completion() -> ChatCompletion:
    function = Function(name="f", arguments="{}")
    call = ChatCompletionMessageFunctionToolCall(id="call_1", type="function", function=function)
    return ChatCompletion(
        id="c1",
        created=1700000000,
        model="gpt-4.1",
        object="chat.completion",
        choices=[
            Choice(
                finish_reason="tool_calls",
                index=0,
                message=ChatCompletionMessage(role="assistant", content=None, tool_calls=[call]),
            ),
            Choice(finish_reason="stop", index=1, message=ChatCompletionMessage(role="assistant", refusal="No.")),
        ],
        usage=CompletionUsage(
            prompt_tokens=1,
            completion_tokens=2,
            total_tokens=3,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=1),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=1),
        ),
    )


def dumps_of(model: BaseModel) -> list[dict[str, Any]]:
    """As the API would send it, and with every field spelled out."""
    return [model.model_dump(mode="json", by_alias=True, exclude_unset=only_given) for only_given in (True, False)]


def test_the_sdk_reads_the_responses_we_write() -> None:
    ours = our_response(usage=USAGE, incomplete_details={"reason": "content_filter"}, tools=[TOOL], status="incomplete")

    theirs = sdk.Response.model_validate(ours.model_dump(mode="json"))

    assert [type(item) for item in theirs.output] == [
        sdk.ResponseReasoningItem,
        sdk.ResponseFunctionToolCall,
        sdk.ResponseOutputMessage,
    ]
    assert theirs.output_text == ours.output_text == "It is cold."
    assert theirs.usage is not None
    assert theirs.usage.input_tokens_details.cached_tokens == 4
    assert theirs.incomplete_details is not None
    assert theirs.incomplete_details.reason == "content_filter"


def test_the_sdk_reads_items_for_training() -> None:
    item = NeMoGymResponseFunctionToolCallForTraining(
        arguments="{}",
        call_id="c",
        name="f",
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
    )

    theirs = sdk.Response.model_validate(our_response(output=[item]).model_dump(mode="json"))

    assert isinstance(theirs.output[0], sdk.ResponseFunctionToolCall)
    assert theirs.output[0].to_dict()["generation_token_ids"] == [2]


@pytest.mark.parametrize("dump", dumps_of(sdk_response()))
def test_responses_the_sdk_writes_come_back_unchanged(dump: dict[str, Any]) -> None:
    ours = NeMoGymResponse.model_validate(dump)

    assert [type(item).__name__ for item in ours.output] == [
        "NeMoGymResponseReasoningItem",
        "NeMoGymResponseFunctionToolCall",
        "NeMoGymResponseFunctionWebSearch",
        "NeMoGymResponseOutputMessage",
    ]
    assert ours.output_text == sdk_response().output_text
    assert sdk.Response.model_validate(ours.model_dump(mode="json", exclude_unset=True)) == sdk_response()
    assert sdk.Response.model_validate(ours.model_dump(mode="json")).model_dump() == sdk_response().model_dump()
    dump["output"][0].pop("status", None)
    assert ours.model_dump(mode="json", exclude_unset=True) == dump


def test_items_of_the_sdk_are_taken_as_objects_too() -> None:
    by_object = our_response(output=sdk_response().output)
    by_fields = our_response(output=sdk_response().model_dump(exclude_unset=True)["output"])

    assert by_object == by_fields


def test_tools_and_settings_of_the_sdk_are_taken_as_objects_too() -> None:
    theirs = sdk_response()
    names = ("tools", "tool_choice", "reasoning", "text", "incomplete_details", "usage")

    ours = our_response(**{name: getattr(theirs, name) for name in names})

    assert isinstance(theirs.tools[0], sdk.FunctionTool)
    dump = theirs.model_dump(mode="json", exclude_unset=True)
    assert {name: ours.to_dict()[name] for name in names} == {name: dump[name] for name in names}


def test_a_request_takes_tools_as_objects_of_the_sdk() -> None:
    tool = sdk.FunctionTool.model_validate(TOOL)

    params = NeMoGymResponseCreateParamsNonStreaming(input="hi", tools=[tool], tool_choice="required")

    assert params.model_dump(exclude_unset=True) == {"input": "hi", "tools": [TOOL], "tool_choice": "required"}


@pytest.mark.parametrize("options", [{}, {"mode": "json"}, {"exclude_none": True}])
def test_a_response_has_the_methods_of_the_sdks_own(options: dict[str, Any]) -> None:
    call = NeMoGymResponseFunctionToolCall(arguments="{}", call_id="call_1", name="f")
    ours = our_response(
        output=[call], usage=USAGE, parallel_tool_calls=True, tool_choice="auto", tools=[], object="response"
    )
    theirs = sdk.Response.model_validate(ours.model_dump(mode="json", exclude_unset=True))

    assert ours.to_dict(**options) == theirs.to_dict(**options)
    assert ours.to_json(indent=None) == ours.model_dump_json(exclude_unset=True)
    assert json.loads(ours.to_json()) == json.loads(theirs.to_json())
    assert ours.output[0].to_dict() == theirs.output[0].to_dict() == call.to_dict()


def test_a_reasoning_item_of_the_sdk_loses_only_its_status() -> None:
    item = sdk.ResponseReasoningItem(id="rs_1", type="reasoning", summary=[], status="completed")

    [ours] = our_response(output=[item]).model_dump(exclude_unset=True)["output"]

    assert ours == {"id": "rs_1", "type": "reasoning", "summary": []}


def test_the_sdk_reads_the_completions_we_write() -> None:
    call = NeMoGymChatCompletionMessageToolCall(id="call_1", function=NeMoGymFunction(name="f", arguments="{}"))
    message = NeMoGymChatCompletionMessage(content=None, tool_calls=[call])
    ours = NeMoGymChatCompletion(
        id="c1",
        created=1,
        model="m",
        choices=[NeMoGymChoice(finish_reason="tool_calls", index=0, message=message)],
    )

    theirs = ChatCompletion.model_validate(ours.model_dump(mode="json"))

    assert theirs.choices[0].message.tool_calls == [
        ChatCompletionMessageFunctionToolCall(id="call_1", type="function", function=Function(name="f", arguments="{}"))
    ]


@pytest.mark.parametrize("dump", dumps_of(sdk_completion()))
def test_completions_the_sdk_writes_come_back_unchanged(dump: dict[str, Any]) -> None:
    ours = NeMoGymChatCompletion.model_validate(dump)

    assert ours.model_dump(mode="json", exclude_unset=True) == dump
    assert ChatCompletion.model_validate(ours.model_dump(mode="json", exclude_unset=True)) == ChatCompletion(**dump)


@contextmanager
def serving(app: FastAPI) -> Iterator[OpenAI]:
    """An SDK client of `app`, which listens on a loopback port until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with OpenAI(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def test_a_conversation_between_the_sdk_and_our_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    app = FastAPI()
    requests: list[BaseModel] = []

    @app.post("/responses")
    async def responses(body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        requests.append(body)
        output = [*our_response().output, NeMoGymFunctionCallOutput(call_id="call_1", output="cold")]
        usage = NeMoGymResponseUsage(input_tokens=1, output_tokens=2, total_tokens=3)
        return our_response(output=output, usage=usage, tools=body.tools)

    @app.post("/chat/completions")
    async def chat(body: NeMoGymChatCompletionCreateParamsNonStreaming) -> NeMoGymChatCompletion:
        requests.append(body)
        return NeMoGymChatCompletion.model_validate(sdk_completion().model_dump())

    first = {"role": "user", "content": "What is the weather?"}
    with serving(app) as client:
        answer = client.responses.create(model="m", input=[first], tools=[TOOL])  # type: ignore[list-item]
        replay = [first, *(item.to_dict() for item in answer.output)]
        client.responses.create(model="m", input=replay)  # type: ignore[arg-type]
        completion = client.chat.completions.create(model="m", messages=[first])  # type: ignore[list-item]

    assert [item.type for item in answer.output] == ["reasoning", "function_call", "message", "function_call_output"]
    assert isinstance(answer.output[2], sdk.ResponseOutputMessage)
    assert answer.output_text == "It is cold."
    assert completion == sdk_completion()
    replayed = requests[1]
    assert isinstance(replayed, NeMoGymResponseCreateParamsNonStreaming)
    assert [type(item) for item in replayed.input[1:]] == [type(item) for item in our_response().output] + [
        NeMoGymFunctionCallOutput
    ]
