"""The shapes in which rows come: chats that become parameters, and rows that are alike, of which one stands for all.

Rows as people have them, `messages` in chat format or a `prompt`, are turned into `responses_create_params`: the row
keeps its fields, the parameters are added. A conversation that already ends with the assistant's answer leaves nothing
to ask, so it is refused rather than sent.

Rows that are alike stand or fall together: one of each shape is put before the servers, however many there are. A shape
is the agent, the keys of the row and of its parameters, and the types of their values. Telling them apart costs a
fraction of parsing a row; what a type refuses because of a missing, unknown or mistyped field it refuses in all rows of
a shape.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import json_type
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.row_files import MESSAGES_KEY_NAME, PROMPT_KEY_NAME, TOOLS_KEY_NAME
from nemo_gym.schemas.run_requests import RowFault

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


logger = logging.getLogger(__name__)

_MOST_SHAPES = 200
"""Rows of a file with more of them have keys of their own; the others are not looked at."""
_MOST_SHOWN = 5


@dataclass
class Shape:
    """Rows that are alike."""

    agent: str
    row: dict[str, Any]
    """The first of them."""
    line: int
    """Its number, from 1."""
    count: int = 0


@dataclass
class RowShapes:
    """The shapes of the rows of one file."""

    shapes: dict[tuple[Any, ...], Shape] = field(default_factory=dict)
    _last_key: tuple[Any, ...] = ()
    _last: Shape | None = None

    def note(self, agent: str, row: dict[str, Any], line: int) -> None:
        """Take note of a row."""
        params = row[RESPONSES_CREATE_PARAMS_KEY_NAME]
        key = (agent, *row, *map(type, row.values()), *params, *map(type, params.values()))
        if key != self._last_key:  # rows alike mostly follow each other, and comparing is cheaper than hashing
            self._last_key, self._last = key, self._shape(key, agent, row, line)
        if self._last is not None:
            self._last.count += 1

    def _shape(self, key: tuple[Any, ...], agent: str, row: dict[str, Any], line: int) -> Shape | None:
        if key not in self.shapes and len(self.shapes) < _MOST_SHAPES:
            self.shapes[key] = Shape(agent, row, line)
        return self.shapes.get(key)

    def by_agent(self) -> dict[str, list[Shape]]:
        """The shapes, in the order of their first rows."""
        grouped: dict[str, list[Shape]] = {}
        for shape in self.shapes.values():
            grouped.setdefault(shape.agent, []).append(shape)
        return grouped


@dataclass
class Objections:
    """What those who will get the rows have against them."""

    refusals: list[str] = field(default_factory=list)
    """Reasons why rollouts are bound to fail, one line each, with the first row's line and how many there are."""
    doubts: list[str] = field(default_factory=list)
    """Reasons why they may fail, unless somebody on the way adds what is missing."""

    def add(self, where: str, shapes: Iterable[Shape], faults: Iterable[Iterable[RowFault]]) -> None:
        """Add what is wrong with the first row of each shape; `where` says what its number counts."""
        for shape, of_shape in zip(shapes, faults, strict=True):
            for fault in of_shape:
                also = f" ({shape.count:,} rows are like this)" if fault.is_of_shape and shape.count > 1 else ""
                line = f"{where} {shape.line}: {fault}{also}"
                (self.refusals if fault.is_certain else self.doubts).append(line)

    def settle(self, error_type: type[ConfigError], remedy: str, *, keep: bool) -> None:
        """Warn of doubts, once, and refuse rows that cannot be rolled out; with `keep`, only warn of these, too.

        Raises:
            ConfigError: of `error_type`.
        """
        if keep:
            self.doubts, self.refusals = [*self.refusals, *self.doubts], []
        if self.doubts:
            others = f" and {len(self.doubts) - 1} more" if len(self.doubts) > 1 else ""
            logger.warning(
                "some rollouts may fail, because a server may refuse their rows: %s%s", self.doubts[0], others
            )
        if self.refusals:
            shown = "".join(f"\n  {line}" for line in self.refusals[:_MOST_SHOWN])
            more = len(self.refusals) - _MOST_SHOWN
            shown += f"\n  and {more} more" if more > 0 else ""
            raise error_type(f"rows cannot be rolled out, so nothing was written:{shown}\n{remedy}")
