"""A Responses request as a request of the Anthropic Messages API: items become blocks, gathered into turns.

The Messages API wants the two roles to take turns, so what one side says in a row is one message. Fields that it does
not have are left out where an answer can do without them, and are an error where not.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import orjson

from nemo_gym.dialects.base import EXTRA_BODY, UnusableRequestError, object_in_metadata
from nemo_gym.jsonl import is_deeper

Fields: TypeAlias = dict[str, Any]
RAW_ARGUMENTS = "_raw"
"""The only key of a call's input whose arguments are no JSON object, or one that is too deep to be written again."""
_MOST_LEVELS = 200
_BLANK_LINE = "\n\n"
_TOOL_CHOICES = {"auto": "auto", "none": "none", "required": "any"}
_SYSTEM = ("system", "developer")
_LONG_NUMBER = re.compile(r"\d{19}")


class NoAnthropicFormError(UnusableRequestError, NotImplementedError):
    """A part of a Responses request that the Messages API has no words for."""


def request_to_anthropic(given: Mapping[str, Any], max_tokens: int) -> Fields:
    """The Messages request for `given`, the fields that a Responses request set; without a model."""
    for name in ("previous_response_id", "prompt"):
        if given.get(name) is not None:
            raise NoAnthropicFormError(f"{name} refers to something stored at the provider; send the conversation")
    asked = given["input"]
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    system = [given["instructions"]] if given.get("instructions") else []
    while items and items[0].get("role") in _SYSTEM:
        system.append(_plain_text(items.pop(0)["content"]))
    turns = _Turns()
    for item in items:
        turns.add(item)
    request: Fields = {"messages": turns.messages, "max_tokens": given.get("max_output_tokens") or max_tokens}
    if system:
        request["system"] = _BLANK_LINE.join(system)
    request |= {name: given[name] for name in ("temperature", "top_p") if given.get(name) is not None}
    if given.get("user"):
        request["metadata"] = {"user_id": given["user"]}
    extra = object_in_metadata(given.get("metadata"), EXTRA_BODY)
    if "stop" in extra:
        stop = extra["stop"]
        request["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if "top_k" in extra:
        request["top_k"] = extra["top_k"]
    return request | _tools(given) | _output_config(given)


def _output_config(given: Mapping[str, Any]) -> Fields:
    config: Fields = {}
    effort = (given.get("reasoning") or {}).get("effort")
    if effort is not None:
        config["effort"] = effort
    text_format = (given.get("text") or {}).get("format") or {}
    if text_format.get("type") == "json_schema":
        config["format"] = {"type": "json_schema", "schema": text_format.get("schema")}
    return {"output_config": config} if config else {}


def _tools(given: Mapping[str, Any]) -> Fields:
    if not given.get("tools"):
        return {}
    offered: Fields = {"tools": [_tool(tool) for tool in given["tools"]]}
    choice = given.get("tool_choice")
    made: Fields | None = None
    if isinstance(choice, str):
        made = {"type": _TOOL_CHOICES.get(choice, "auto")}
    elif isinstance(choice, Mapping) and choice.get("name"):
        made = {"type": "tool", "name": choice["name"]}
    if given.get("parallel_tool_calls") is False:
        made = {**(made or {"type": "auto"}), "disable_parallel_tool_use": True}
    return offered if made is None else {**offered, "tool_choice": made}


def _tool(tool: Mapping[str, Any]) -> Fields:
    if tool.get("type") != "function":
        raise NoAnthropicFormError(f"a tool of type {tool.get('type')!r} has no form in the Messages API")
    schema = tool.get("parameters") or {"type": "object", "properties": {}}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool["name"], "input_schema": schema, **described}


class _Turns:
    """Messages in the making."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []

    def add(self, item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            role = item["role"]
            self._say("assistant" if role == "assistant" else "user", *_parts(item["content"], role))
        elif kind == "reasoning":
            self._say("assistant", _thought(item))
        elif kind == "function_call":
            named = {"id": item["call_id"], "name": item["name"]}
            self._say("assistant", {"type": "tool_use", **named, "input": input_of_call(item.get("arguments"))})
        elif kind == "function_call_output":
            output = item["output"]
            content = output if isinstance(output, str) else _parts(output, "user")
            self._say("user", {"type": "tool_result", "tool_use_id": item["call_id"], "content": content})
        else:
            raise NoAnthropicFormError(f"an item of type {kind!r} has no form in the Messages API")

    def _say(self, role: str, *blocks: Fields) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += blocks
        elif blocks:
            self.messages.append({"role": role, "content": list(blocks)})


def _thought(item: Mapping[str, Any]) -> Fields:
    text = "\n".join(part["text"] for part in item.get("summary") or item.get("content") or ())
    sealed = item.get("encrypted_content") or ""
    if text or not sealed:
        return {"type": "thinking", "thinking": text, "signature": sealed}
    return {"type": "redacted_thinking", "data": sealed}


def input_of_call(arguments: Any) -> Fields:
    """The arguments of a call as the input of a block."""
    try:
        parsed = orjson.loads(arguments or "{}")
        if isinstance(parsed, dict) and is_deeper(arguments or "", _MOST_LEVELS):
            parsed = None
        elif _LONG_NUMBER.search(arguments or ""):
            parsed = json.loads(arguments)  # to the last digit: orjson rounds what exceeds 64 bits
    except ValueError:  # no JSON, or a number of more digits than Python reads
        parsed = None
    return parsed if isinstance(parsed, dict) else {RAW_ARGUMENTS: str(arguments)}


def _parts(content: Any, role: str) -> list[Fields]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_block(part, role) for part in content]


def _block(part: Mapping[str, Any], role: str) -> Fields:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": part["refusal"]}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image", "source": _source(part["image_url"])}
    if kind == "input_file" and (part.get("file_data") or part.get("file_url")):
        return {"type": "document", "source": _source(part.get("file_data") or part["file_url"])}
    raise NoAnthropicFormError(f"a part of type {kind!r} in a message of the {role} has no form in the Messages API")


def _source(url: str) -> Fields:
    head, comma, data = url.partition(",")
    if not url.startswith("data:") or not comma:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": head.removeprefix("data:").partition(";")[0], "data": data}


def _plain_text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
