"""Answers that are almost right are made right, others stay as they are."""

from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from nemo_gym.http.model_answers import (
    read_json,
    validated_json,
    with_whole_calls,
    without_half_pairs,
)
from nemo_gym.openai_utils import NeMoGymChatCompletion, NeMoGymResponse


@pytest.mark.parametrize(
    ("body", "mended"),
    [
        (rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'),
        (rb'"\ud83d"', rb'"\ufffd"'),
        (rb'"\ude00"', rb'"\ufffd"'),
        (rb'"\uDE00\uD83D"', rb'"\ufffd\ufffd"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\ud83d and more"', rb'"\ufffd and more"'),
        (rb'"\\ud83d"', rb'"\\ud83d"'),
        (rb'"\\\ud83d"', rb'"\\\ufffd"'),
        (rb'"\n\"\u00e9"', rb'"\n\"\u00e9"'),
        (b'"\xed\xa0\xbd"', '"\ufffd\ufffd\ufffd"'.encode()),
        (b'"\xff"', '"\ufffd"'.encode()),
        ('"é😀"'.encode(), '"é😀"'.encode()),
    ],
)
def test_half_of_a_pair_becomes_a_replacement_and_nothing_else_changes(body: bytes, mended: bytes) -> None:
    assert without_half_pairs(body) == mended
    orjson.loads(mended)


def test_whole_json_is_passed_on_as_it_came() -> None:
    body = b' {"a": 1} '

    assert read_json(body) == ({"a": 1}, body)
    assert read_json(rb'{"a": "\ud800"}') == ({"a": "\ufffd"}, rb'{"a": "\ufffd"}')


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"a": ', rb'{"a": "\ud800"', rb'"\ud8"'])
def test_what_is_no_json_stays_none(body: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        read_json(body)


ENVELOPE: dict[str, Any] = {"id": "r", "created_at": 1, "model": "m", "object": "response"}


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        ({}, "", ""),
        ({"name": None, "arguments": None}, "", ""),
        ({"name": 7, "arguments": {"a": [1]}}, "", '{"a": [1]}'),
        ({"name": "f", "arguments": "{", "call_id": "c"}, "f", "{"),
        ({"name": "f", "arguments": "{}", "call_id": "", "id": 7}, "f", "{}"),
    ],
)
def test_a_call_has_a_name_an_id_and_arguments_in_either_api(call: dict[str, Any], name: str, arguments: str) -> None:
    response = {**ENVELOPE, "output": [{"type": "function_call", **call}]}
    given = {key: value for key, value in call.items() if key in ("name", "arguments")}
    chosen = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant"}}
    chosen["message"] = {"role": "assistant", "tool_calls": [{"id": call.get("call_id"), "function": given}]}
    chat = {"id": "c", "created": 1, "model": "m", "object": "chat.completion", "choices": [chosen]}

    (item,) = validated_json(NeMoGymResponse, orjson.dumps(response)).output
    (message,) = [choice.message for choice in validated_json(NeMoGymChatCompletion, orjson.dumps(chat)).choices]

    assert item.type == "function_call"
    assert (item.name, item.arguments) == (name, arguments)
    assert item.call_id == call.get("call_id") or item.call_id.startswith("call_")
    (tool_call,) = message.tool_calls or []
    assert tool_call.type == "function"
    assert (tool_call.function.name, tool_call.function.arguments) == (name, arguments)
    assert tool_call.id


def test_two_calls_without_an_id_get_different_ones() -> None:
    mended = with_whole_calls({"output": [{"type": "function_call"}, {"type": "function_call"}]})

    first, second = (item["call_id"] for item in mended["output"])
    assert first != second


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "text",
        {},
        {"output": None, "choices": 3},
        {"output": [None, {"type": "message", "content": []}], "choices": [None, {"message": None}, {"message": {}}]},
        {"choices": [{"message": {"tool_calls": [None, {"type": "custom", "custom": {}}]}}]},
    ],
)
def test_what_is_no_call_is_left_alone(answer: Any) -> None:
    assert with_whole_calls(answer) == answer


class Counted(BaseModel):
    count: int


def test_an_answer_that_cannot_be_mended_is_refused() -> None:
    with pytest.raises(ValidationError, match="count"):
        validated_json(Counted, b'{"count": "many"}')
    with pytest.raises(ValidationError, match="Invalid JSON"):
        validated_json(Counted, b"<html>")
