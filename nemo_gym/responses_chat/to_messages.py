"""The items of a Responses conversation as chat messages.

Items are many, messages few: what the model produced in one go (reasoning, text, tool calls) becomes
one assistant message. The buffers hold that message until something else follows, or until an item
with token ids ends it: those sit on the last item of what was generated in one go.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nemo_gym.responses_chat import think_tags
from nemo_gym.responses_chat.errors import NoChatFormError
from nemo_gym.responses_chat.parts import plain_text, to_chat_content
from nemo_gym.schemas.token_ids import TOKEN_FIELDS, carries_token_ids

Item: TypeAlias = Mapping[str, Any]
Message: TypeAlias = dict[str, Any]


def to_chat_messages(given: str | Iterable[Item], *, with_token_ids: bool) -> list[Message]:
    """`given`, the input of a Responses request, as chat messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": [{"type": "text", "text": given}]}]
    conversation = _Conversation(with_token_ids)
    for position, item in enumerate(given):
        conversation.add(item, f"input[{position}]")
    conversation.flush()
    return conversation.messages


@dataclass
class _Conversation:
    """The messages so far, and the assistant message that is being gathered."""

    with_token_ids: bool
    messages: list[Message] = field(default_factory=list)
    _text: str = ""
    _tool_calls: list[dict[str, Any]] = field(default_factory=list)
    _token_fields: dict[str, Any] = field(default_factory=dict)

    def add(self, item: Item, where: str) -> None:
        """Take one item; `where` names it in errors."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            parts = item.get("summary") or item.get("content") or ()
            self._text += think_tags.wrapped(part["text"] for part in parts)
        elif kind in ("function_call", "custom_tool_call"):
            self._tool_calls.append(_tool_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._say("tool", item["output"], where, tool_call_id=item["call_id"])
        else:
            raise NoChatFormError(
                f"{where}: an item of type {kind!r} has no form in the Chat Completions API; messages, reasoning, "
                "function calls and custom tool calls with their outputs have one"
            )
        self._note_token_ids(item)

    def flush(self) -> None:
        """Emit the assistant message gathered so far, if there is one."""
        if self._text or self._tool_calls or self._token_fields:
            message: Message = {"role": "assistant", "content": self._text or None}
            if self._tool_calls:
                message["tool_calls"] = self._tool_calls
            elif not self._text:
                message["content"] = ""
            self.messages.append({**message, **self._token_fields})
        self._text, self._tool_calls, self._token_fields = "", [], {}

    def _add_message(self, item: Item, where: str) -> None:
        role = item["role"]
        if role == "assistant":
            thoughts = item.get("reasoning_content") or item.get("reasoning") or ""
            self._text += think_tags.wrapped([thoughts]) + plain_text(item.get("content"), where)
            self._tool_calls += item.get("tool_calls") or ()
        elif role == "tool":
            self._say(role, item["content"], where, tool_call_id=item["tool_call_id"])
        else:
            self._say(role, item["content"], where)

    def _say(self, role: str, content: Any, where: str, **more: Any) -> None:
        self.flush()
        self.messages.append({"role": role, "content": to_chat_content(content, where), **more})

    def _note_token_ids(self, item: Item) -> None:
        if self.with_token_ids and carries_token_ids(item):
            self._token_fields = {name: item[name] for name in TOKEN_FIELDS if item.get(name) is not None}
            self.flush()


def _tool_call(item: Item) -> dict[str, Any]:
    if item["type"] == "custom_tool_call":
        return {
            "id": item["call_id"],
            "type": "custom",
            "custom": {"name": item["name"], "input": item.get("input") or ""},
        }
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }
