"""Rows as people have them, `messages` in chat format or a `prompt`, turned into `responses_create_params`.

The row keeps its fields; the parameters are added. A conversation that already ends with the
assistant's answer leaves nothing to ask, so it is refused rather than sent.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import json_type
from nemo_gym.row_files import MESSAGES_KEY_NAME, PROMPT_KEY_NAME, TOOLS_KEY_NAME

_SPEAKERS = ("system", "developer", "user", "assistant")


class ChatRowError(ConfigError, ValueError):
    """Messages that cannot be turned into parameters."""


def params_from_chat(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters for a row's `messages`, else its `prompt`; None when it has neither.

    Raises:
        ChatRowError: it has one, but not in chat format.
    """
    for key in (MESSAGES_KEY_NAME, PROMPT_KEY_NAME):
        conversation = row.get(key)
        if conversation is None:
            continue
        if isinstance(conversation, str) and key == PROMPT_KEY_NAME:
            return {"input": conversation, **_tools(row)}
        if not isinstance(conversation, list) or not conversation:
            wanted = "a list of messages" + (" or text" if key == PROMPT_KEY_NAME else "")
            raise ChatRowError(f"`{key}` must be {wanted}, not {json_type(conversation)}{_if_empty(conversation)}")
        return {"input": _input(conversation, key), **_tools(row)}
    return None


def _if_empty(value: object) -> str:
    return " without any" if value == [] else ""


def _input(messages: list[Any], key: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        try:
            items += _items(message)
        except ChatRowError as error:
            raise ChatRowError(f"`{key}[{position}]`: {error}") from None
    if messages[-1].get("role") == "assistant":
        raise ChatRowError(
            f"`{key}` ends with the assistant's turn, so there is nothing left to ask: leave that turn out"
        )
    return items


def _items(message: Any) -> Iterator[dict[str, Any]]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role == "tool":
        yield {
            "type": "function_call_output",
            "call_id": _text(message, "tool_call_id"),
            "output": _plain_text(message.get("content")),
        }
        return
    if role not in _SPEAKERS:
        raise ChatRowError(f"expected an object with a role (one of {', '.join((*_SPEAKERS, 'tool'))}) and content")
    content, calls = message.get("content"), message.get("tool_calls") or ()
    if content or not calls:
        yield {"role": role, "content": _content(content, role)}
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ChatRowError("a tool call must be an object with an `id` and a `function`")
        yield {
            "type": "function_call",
            "call_id": _text(call, "id"),
            "name": _text(function, "name"),
            "arguments": _text(function, "arguments"),
        }


def _content(content: Any, role: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatRowError(f"content must be text or a list of parts, not {json_type(content)}")
    return [_part(part, role) for part in content]


def _part(part: Any, role: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return {"type": "output_text" if role == "assistant" else "input_text", "text": _text(part, "text")}
    if kind == "image_url":
        image = part.get("image_url")
        described = image if isinstance(image, Mapping) else {"url": image}
        return {
            "type": "input_image",
            "image_url": _text(described, "url"),
            "detail": described.get("detail") or "auto",
        }
    if kind == "file" and isinstance(part.get("file"), Mapping):
        return {"type": "input_file", **part["file"]}
    if isinstance(kind, str) and kind.startswith(("input_", "output_")):
        return dict(part)
    raise ChatRowError(f"a content part of the type {kind!r} is not known here")


def _plain_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_text(part, "text") for part in content)
    if not isinstance(content, str):
        raise ChatRowError(f"a tool's content must be text, not {json_type(content)}")
    return content


def _text(holder: Any, key: str) -> str:
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, str):
        raise ChatRowError(f"`{key}` must be text, not {json_type(value)}")
    return value


def _tools(row: Mapping[str, Any]) -> dict[str, Any]:
    tools = row.get(TOOLS_KEY_NAME)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) and "type" in tool for tool in tools):
        return {}  # a field of the verifier that happens to have this name
    return {TOOLS_KEY_NAME: [_tool(tool) for tool in tools]} if tools else {}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function is described in an object of its own in chat format, and beside its type in ours."""
    function = tool.get("function")
    return {"type": tool["type"], **function} if isinstance(function, Mapping) else dict(tool)
