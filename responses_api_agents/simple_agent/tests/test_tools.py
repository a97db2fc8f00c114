"""Reading calls of tools: what is carried out, and what is answered to the model instead."""

import json
from typing import Any

import pytest

from responses_api_agents.simple_agent.tools import (
    MAX_ARGUMENT_DEPTH,
    BadCallError,
    declared_tools,
    parsed_arguments,
    tool_path,
)


def nested(depth: int) -> str:
    """An object with lists inside one another, `depth` in all."""
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{}", {}),
        (' {"a": [1, 2.5, "\\u00e9\\ud83d\\ude00", null]} ', {"a": [1, 2.5, "\u00e9\U0001f600", None]}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": ' + "9" * 4000 + "}", {"a": int("9" * 4000)}),
        ('{"a": "[[[{{{' + "[" * 500 + '"}', {"a": "[[[{{{" + "[" * 500}),
        ('{"\\u0000": 1e-400}', {"\x00": 0.0}),
    ],
)
def test_objects_are_taken_as_they_are(text: str, arguments: dict[str, Any]) -> None:
    assert parsed_arguments(text) == arguments


def test_depth_has_a_limit() -> None:
    assert parsed_arguments(nested(MAX_ARGUMENT_DEPTH))
    assert len(parsed_arguments('{"a": [' + "[]," * 500 + "[]]}")["a"]) == 501


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "JSONDecodeError"),
        ("{oops", "JSONDecodeError"),
        ("{'a': 1}", "JSONDecodeError"),
        ("{} {}", "JSONDecodeError"),
        ("\x00", "JSONDecodeError"),
        ("[1]", "they must be a JSON object, such as {}, and are an array"),
        ('"a"', "and are a string"),
        ("null", "and are null"),
        ("true", "and are a boolean"),
        ("7", "and are a number"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e309}', "1e309 is too large for a number"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
        ('{"a": "\ud800"}', "half of a surrogate pair"),
        (nested(MAX_ARGUMENT_DEPTH + 1), "nested more than 100 deep"),
        (nested(900), "nested more than 100 deep"),
        (nested(100_000), "nested more than 100 deep"),
        ('{"a":' * 100_000, "nested more than 100 deep"),
    ],
)
def test_what_is_wrong_with_arguments_is_told(text: str, told: str) -> None:
    with pytest.raises(BadCallError, match=r"^Invalid tool call arguments: ") as caught:
        parsed_arguments(text)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.is_malformed


@pytest.mark.parametrize(("name", "path"), [("a", "/a"), ("a/b", "/a/b"), ("a b?", "/a%20b%3F"), ("\u00e9", "/%C3%A9")])
def test_a_tool_that_is_offered_has_a_path(name: str, path: str) -> None:
    assert tool_path(name, frozenset({name})) == path


def test_names_that_are_told_to_the_model_are_short_and_printable() -> None:
    with pytest.raises(BadCallError) as caught:
        tool_path("\ud800\n" + "x" * 10**6, frozenset(f"tool_{number:04}" for number in range(1000)))
    told = str(caught.value)
    assert told.startswith("There is no tool '\\ud800\\nxxx")
    assert told.endswith("tool_0048, tool_0049 and 950 more")
    assert len(told) < 1000


def test_an_environment_that_declares_no_tools_offers_none() -> None:
    for answer in (b"{}", b"", b"null", b'{"tools": null}', b'{"tools": []}', b'["tools"]'):
        assert declared_tools(answer, "environment") == []


@pytest.mark.parametrize("tools", [7, ["name"], [{"name": "a"}], [{"type": "function"}]])
def test_declared_tools_that_are_none_are_an_error(tools: Any) -> None:
    with pytest.raises(RuntimeError, match="'environment' answered /seed_session with wrong tools"):
        declared_tools(json.dumps({"tools": tools}).encode(), "environment")
