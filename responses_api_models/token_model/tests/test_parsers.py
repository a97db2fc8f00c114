import json
from typing import Any

import pytest

from responses_api_models.token_model.parsers import TOOL_PARSERS, read_answer, read_reasoning

TOOLS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ["hm"], "yes"),
        ("hm\n</think>\n\nyes", True, ["hm"], "yes"),
        ("<think>\nhm\n</think>\n\nyes", True, ["hm"], "yes"),
        ("hm, and then it was cut", True, ["hm, and then it was cut"], ""),
        ("before <think>cut", False, ["cut"], "before "),
        ("\n  yes ", False, [], "\n  yes "),
        ("<think>\n\n</think>\n\nyes", False, [], "yes"),
    ],
)
def test_thoughts_are_taken_out(text: str, is_open: bool, reasoning: list[str], rest: str) -> None:
    assert read_reasoning(text, is_open=is_open) == (reasoning, rest)


@pytest.mark.parametrize(
    ("parser", "text", "left"),
    [
        ("hermes", 'Sure.\n<tool_call>\n{"name":  "add", "arguments": {"a":1,"note" : "x"}}\n</tool_call>', "Sure."),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "x"}}', ""),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "note": "x"}}', ""),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "note": "x"}}]', ""),
        (
            "qwen3_coder",
            "Sure.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx\n</parameter>\n"
            "</function>\n</tool_call>",
            "Sure.",
        ),
    ],
)
def test_tool_calls_are_read_as_each_family_writes_them(parser: str, text: str, left: str) -> None:
    message = read_answer(text, parser=TOOL_PARSERS[parser], tools=TOOLS, is_open=False, has_reasoning=True)
    function = message["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 1, "note": "x"})
    assert message["content"] == (left or None)


@pytest.mark.parametrize(
    ("parser", "text", "count"),
    [
        ("hermes", '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b", "arguments": "{}"}</tool_call>', 2),
        ("llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', 2),
        ("mistral", '[TOOL_CALLS][{"name": "a"}, {"name": "b"}]', 2),
        ("hermes", "<tool_call>{broken</tool_call>", 0),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 0),
        ("llama3_json", "{broken", 0),
        ("llama3_json", '{"answer": 42}', 0),
        ("llama3_json", "It is 42.", 0),
        ("mistral", "[TOOL_CALLS] nothing", 0),
        ("mistral", '[TOOL_CALLS] {"name": "a"}', 0),
        ("qwen3_coder", "<tool_call><function=add>", 0),
    ],
)
def test_several_calls_are_several_and_what_cannot_be_read_stays_text(parser: str, text: str, count: int) -> None:
    message = read_answer(text, parser=TOOL_PARSERS[parser], tools=TOOLS, is_open=False, has_reasoning=True)
    assert len(message.get("tool_calls", ())) == count
    if not count:
        assert message["content"] == text


def test_without_parsers_the_text_is_the_answer() -> None:
    text: Any = '<think>x</think><tool_call>{"name": "a"}</tool_call>'
    message = read_answer(text, parser=None, tools={}, is_open=True, has_reasoning=False)
    assert message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("parser", "form"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {"a": %s}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": %s}}]'),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>%s</parameter></function></tool_call>"),
    ],
)
def test_what_is_nested_too_deeply_to_be_read_is_still_an_answer(parser: str, form: str) -> None:
    text = form % ("[" * 100_000 + "]" * 100_000)

    message = read_answer(text, parser=TOOL_PARSERS[parser], tools=TOOLS, is_open=False, has_reasoning=False)

    if parser == "qwen3_coder":
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["a"].startswith("[[[")
    else:
        assert message["content"] == text


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {"a": %s}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": %s}}]'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_arguments_of_any_depth_are_a_call_or_text(parser: str, text: str) -> None:
    for depth in (*range(850, 1001), 100_000):
        given = text % ("[" * depth + "]" * depth)
        message = read_answer(given, parser=TOOL_PARSERS[parser], tools=TOOLS, is_open=False, has_reasoning=False)

        assert "tool_calls" in message or message["content"] == given
