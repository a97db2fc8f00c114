"""What a model wrote, read: thoughts, text and tool calls. The tokens stay what they are, whatever is read from them.

A tool call that cannot be read stays in the text, as the model wrote it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from nemo_gym.responses_converter import taken_apart

_BEGIN, _END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_CODER_CALL = re.compile(r"<tool_call>\s*<function=([^<>\n]+)>")
_CODER_CALL_END = re.compile(r"</function>\s*(?:</tool_call>|\Z)")
_CODER_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_CODER_PARAMETER_END = re.compile("</parameter>")
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"


class Thought(NamedTuple):
    """An answer without its thoughts, and these."""

    reasoning: list[str]
    rest: str


class Calls(NamedTuple):
    """An answer without its tool calls, and these as `(name, arguments as JSON text)`."""

    text: str
    calls: list[tuple[str, str]]


ToolParser = Callable[[str, Mapping[str, Any]], Calls | None]
"""Reads an answer, given the tools' parameters by name; None when there is no tool call that can be read."""


def read_reasoning(text: str, *, is_open: bool) -> Thought:
    """Take the think blocks out; one that never ends, because the answer was cut off, goes to the end.

    `is_open` says that the prompt has opened the first one.
    """
    if is_open and not text.lstrip().startswith(_BEGIN):
        text = _BEGIN + text
    blocks, rest = taken_apart(text)
    before, begun, unfinished = rest.partition(_BEGIN)
    if begun:
        blocks, rest = [*blocks, unfinished], before
    return Thought([block.strip("\n") for block in blocks if block.strip()], rest.lstrip("\n") if blocks else rest)


def read_answer(
    text: str, *, parser: ToolParser | None, tools: Mapping[str, Any], is_open: bool, has_reasoning: bool
) -> dict[str, Any]:
    """The assistant message that a text amounts to; thoughts stand in think blocks before the rest."""
    thought = read_reasoning(text, is_open=is_open) if has_reasoning else Thought([], text)
    try:
        found = parser(thought.rest, tools) if parser is not None else None
    except RecursionError:  # a call that could only just be read
        found = None
    content = thought.rest if found is None else found.text.rstrip()
    content = "".join(f"{_BEGIN}{block}{_END}" for block in thought.reasoning) + content
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if found is None:
        return {**message, "content": content}
    message["tool_calls"] = [
        {"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in found.calls
    ]
    return message


def hermes(text: str, tools: Mapping[str, Any]) -> Calls | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write."""
    before, *written = text.split(_CALL)
    calls = [_call(each.partition(_CALL_END)[0]) for each in written]
    if not calls or any(call is None for call in calls):
        return None
    return Calls(before, [call for call in calls if call is not None])


def llama3_json(text: str, tools: Mapping[str, Any]) -> Calls | None:
    """`{"name": ..., "parameters": {...}}` and nothing else, several with semicolons between, as Llama 3 writes."""
    stripped = text.replace(_PYTHON_TAG, "").strip()
    if not stripped.startswith("{"):
        return None
    calls, place, decoder = [], 0, json.JSONDecoder()
    while place < len(stripped):
        try:
            value, place = decoder.raw_decode(stripped, place)
        except (ValueError, RecursionError):
            return None
        call = _named(value)
        if call is None:
            return None
        calls.append(call)
        while place < len(stripped) and stripped[place] in "; \n":
            place += 1
    return Calls("", calls)


def mistral(text: str, tools: Mapping[str, Any]) -> Calls | None:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, as Mistral writes."""
    before, marked, written = text.partition(_MISTRAL)
    try:
        values = json.loads(written.strip()) if marked else None
    except (ValueError, RecursionError):
        return None
    calls = [_named(value) for value in values] if isinstance(values, list) else []
    if not calls or any(call is None for call in calls):
        return None
    return Calls(before, [call for call in calls if call is not None])


def qwen3_coder(text: str, tools: Mapping[str, Any]) -> Calls | None:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, as Qwen3-Coder writes.

    Values are text unless the tool's parameters say otherwise.
    """
    written = list(_enclosed(text, _CODER_CALL, _CODER_CALL_END))
    if not written:
        return None
    calls = []
    for _, name, content in written:
        kinds = ((tools.get(name) or {}).get("properties") or {}) if isinstance(tools.get(name), Mapping) else {}
        given = _enclosed(content, _CODER_PARAMETER, _CODER_PARAMETER_END)
        arguments = {
            key: _value(value.removeprefix("\n").removesuffix("\n"), kinds.get(key)) for _, key, value in given
        }
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return Calls(text[: written[0][0]], calls)


def _enclosed(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> Iterator[tuple[int, str, str]]:
    """Where each pair begins, the name in it, and what stands between; in linear time, unlike one pattern for both."""
    place = 0
    while (begun := begin.search(text, place)) and (ended := end.search(text, begun.end())):
        yield begun.start(), begun[1], text[begun.end() : ended.start()]
        place = ended.end()


TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
}


def _call(text: str) -> tuple[str, str] | None:
    try:
        return _named(json.loads(text.strip()))
    except (ValueError, RecursionError):
        return None


def _named(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return value["name"], arguments
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _without_line_ends(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
