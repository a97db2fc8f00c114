"""Whatever a conversation holds, it survives the way into a chat and back, to the last space."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym.dialects.base import set_fields
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.responses_converter import ResponsesConverter, split_responses_input_output_items

CONVERTER = ResponsesConverter(return_token_id_information=True)

text = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda value: "think>" not in value)
some_text = text.filter(bool)
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
ids = st.lists(st.integers(0, 2**31), max_size=4)
bundles = ids.flatmap(
    lambda generated: st.fixed_dictionaries(
        {
            "prompt_token_ids": ids,
            "generation_token_ids": st.just(generated),
            "generation_log_probs": st.lists(st.floats(-90, 0), min_size=len(generated), max_size=len(generated)),
        }
    )
)

text_parts = st.fixed_dictionaries({"type": st.just("input_text"), "text": text})
images = st.fixed_dictionaries(
    {"type": st.just("input_image"), "image_url": some_text, "detail": st.sampled_from(["auto", "low", "high"])}
)
videos = st.fixed_dictionaries({"type": st.just("input_video"), "video_url": some_text})
sounds = st.fixed_dictionaries(
    {"type": st.just("input_audio"), "input_audio": st.fixed_dictionaries({"data": text, "format": st.just("wav")})}
)
contents = text | st.lists(text_parts | images | videos | sounds, min_size=1, max_size=3)
spoken = st.fixed_dictionaries(
    {
        "type": st.just("message"),
        "role": st.sampled_from(["user", "system", "developer"]),
        "content": contents,
    }
)


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What a model does in one go, and what its tools answer."""
    items: list[dict[str, Any]] = []
    thoughts = draw(st.lists(some_text, max_size=2))
    if thoughts:
        summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
        items.append({"type": "reasoning", "id": "rs_x", "summary": summary})
    words = draw(text)
    if words:
        part = {"type": "output_text", "text": words, "annotations": []}
        items.append({"type": "message", "id": "msg_x", "role": "assistant", "status": "completed", "content": [part]})
    call_ids = draw(st.lists(names, max_size=2, unique=True))
    items += [
        {"type": "function_call", "id": call_id, "call_id": call_id, "name": draw(names), "arguments": draw(text)}
        for call_id in call_ids
    ]
    has_token_ids = draw(st.booleans())
    if items and has_token_ids:
        items[-1] |= draw(bundles)
    outputs = [{"type": "function_call_output", "call_id": call_id, "output": draw(text)} for call_id in call_ids]
    return items + outputs


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns of the model with something between them, as a chat has it."""
    items: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        items += [draw(spoken), *draw(turns())]
    return items


def essence(item: Any) -> dict[str, Any]:
    """An item without what is made anew on the way."""
    fields = item if isinstance(item, dict) else item.model_dump(exclude_none=True)
    return {name: value for name, value in fields.items() if name not in ("id", "status") and value is not None}


def chat_of(items: list[Any]) -> list[dict[str, Any]]:
    params = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": items})
    chat = CONVERTER.responses_to_chat_completion_create_params(params)
    messages: list[dict[str, Any]] = chat.model_dump(exclude_unset=True)["messages"]
    return messages


@settings(max_examples=200, deadline=None)
@given(conversations())
def test_items_come_back_from_a_chat_as_they_went(items: list[dict[str, Any]]) -> None:
    returned = CONVERTER.chat_completions_messages_to_responses_items(chat_of(items))

    assert [essence(item) for item in returned] == [essence(item) for item in items]


@settings(max_examples=200, deadline=None)
@given(conversations())
def test_a_chat_comes_back_from_items_as_it_went(items: list[dict[str, Any]]) -> None:
    chat = chat_of(items)

    returned = CONVERTER.chat_completions_messages_to_responses_items(chat)

    assert chat_of([item.model_dump(exclude_unset=True) for item in returned]) == chat


@given(conversations())
def test_given_fields_are_what_a_dump_holds(items: list[dict[str, Any]]) -> None:
    params = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": items, "temperature": 1.0})

    assert set_fields(params) == params.model_dump(exclude_unset=True)


tool_calls = st.fixed_dictionaries(
    {
        "id": names,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": names, "arguments": text}),
    }
)
messages = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": st.none() | text | st.tuples(some_text, text).map(lambda pair: f"<think>{pair[0]}</think>{pair[1]}"),
        "tool_calls": st.lists(tool_calls, max_size=3),
    },
    optional={"refusal": st.none(), "annotations": st.none(), "audio": st.none(), "function_call": st.none()},
)
completions = st.fixed_dictionaries(
    {
        "id": names.map(lambda name: f"chatcmpl-{name}"),
        "object": st.just("chat.completion"),
        "created": st.integers(0, 2**40),
        "model": names,
        "choices": st.fixed_dictionaries(
            {
                "index": st.just(0),
                "message": messages | st.tuples(messages, bundles).map(lambda pair: {**pair[0], **pair[1]}),
                "finish_reason": st.sampled_from(["stop", "tool_calls", "length", "content_filter"]),
                "stop_reason": st.none() | st.integers(0, 9) | text,
                "logprobs": st.none(),
            }
        ).map(lambda choice: [choice]),
    },
    optional={
        "usage": st.fixed_dictionaries(
            {
                "prompt_tokens": st.integers(0, 99),
                "completion_tokens": st.integers(0, 99),
                "total_tokens": st.integers(0),
            }
        ),
        "prompt_logprobs": st.none(),
    },
)


@settings(max_examples=200, deadline=None)
@given(completions)
def test_every_completion_becomes_a_response_that_says_the_same_when_it_is_sent_back(answer: dict[str, Any]) -> None:
    completion = NeMoGymChatCompletion.model_validate(answer)
    params = NeMoGymResponseCreateParamsNonStreaming(input="hello")

    made = CONVERTER.chat_completion_to_response(params, completion, model="m").model_dump_json()
    response = NeMoGymResponse.model_validate_json(made)

    assert response.output
    assert split_responses_input_output_items(response.output).input == []
    message = answer["choices"][0]["message"]
    expected = {name: message[name] for name in ("content", "tool_calls") if message[name]}
    expected |= {name: message[name] for name in message if name.endswith(("_ids", "_probs"))}
    returned = chat_of([item.model_dump(exclude_unset=True) for item in response.output])
    kept = [{name: one[name] for name in one if name != "role" and one[name]} for one in returned]
    assert kept == [{name: value for name, value in expected.items() if value}]
