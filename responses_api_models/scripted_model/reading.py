"""Requests of the Responses and the Chat Completions API, read as conversations."""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from nemo_gym.openai_utils import (
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymFunctionCallOutput,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseReasoningItem,
)
from nemo_gym.responses_converter import taken_apart
from responses_api_models.scripted_model.conversation import Called, Conversation, Entry, Returned, Said, Thought, Tool


class UnreadableRequestError(ValueError):
    """A request whose `metadata.extra_body` is not what it should be."""


def conversation_of_responses(body: NeMoGymResponseCreateParamsNonStreaming) -> Conversation:
    """The conversation in a Responses request."""
    entries: list[Entry] = [Said("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        entries.append(Said("user", body.input))
    else:
        entries += [entry for item in body.input if (entry := _entry_of_item(item)) is not None]
    return Conversation(
        entries=tuple(entries),
        tools=tuple(_tools(body.tools)),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        wants_reasoning=bool(body.reasoning),
        max_output_tokens=body.max_output_tokens,
        seed=extra_body(body.metadata).get("seed"),
    )


def conversation_of_chat(body: NeMoGymChatCompletionCreateParamsNonStreaming) -> Conversation:
    """The conversation in a Chat Completions request."""
    seed = extra_body(body.metadata).get("seed")
    return Conversation(
        entries=tuple(entry for message in body.messages for entry in _entries_of_message(message)),
        tools=tuple(_tools(tool["function"] for tool in body.tools or () if tool["type"] == "function")),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        wants_reasoning=bool(body.reasoning_effort),
        max_output_tokens=body.max_completion_tokens or body.max_tokens,
        seed=body.seed if seed is None else seed,
    )


def extra_body(metadata: dict[str, str] | None) -> dict[str, Any]:
    """The JSON object in `metadata.extra_body`; empty when there is none."""
    text = (metadata or {}).get("extra_body")
    if not text:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UnreadableRequestError(f"metadata.extra_body must be JSON, {text[:200]!r} is not: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableRequestError(f"metadata.extra_body must hold a JSON object, not {text[:200]!r}")
    return value


def _entry_of_item(item: Any) -> Entry | None:
    if isinstance(item, NeMoGymResponseFunctionToolCall):
        return Called(item.call_id, item.name, item.arguments)
    if isinstance(item, NeMoGymFunctionCallOutput):
        return Returned(item.call_id, _text(item.output))
    if isinstance(item, NeMoGymResponseReasoningItem):
        return Thought("\n".join(part.text for part in (item.summary or item.content or ())))
    role = getattr(item, "role", None)
    return Said(role, _text(item.content)) if role else None  # the items of hosted tools say nothing to this model


def _entries_of_message(message: Any) -> Iterator[Entry]:
    role, text = message["role"], _text(message.get("content"))
    if role == "tool":
        yield Returned(message["tool_call_id"], text)
    elif role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        blocks, text = taken_apart(text)
        yield from (Thought(thought) for thought in ([reasoning] if reasoning else blocks))
        if text:
            yield Said(role, text)
        for call in message.get("tool_calls") or ():
            if call["type"] == "function":
                yield Called(call["id"], call["function"]["name"], call["function"]["arguments"])
    else:
        yield Said(role, text)


def _text(content: Any) -> str:
    """Text of a message, with a placeholder for every part that is none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text_of_part(part) for part in content)


def _text_of_part(part: Any) -> str:
    fields = part if isinstance(part, dict) else dict(part)
    text = fields.get("text", fields.get("refusal"))
    return text if isinstance(text, str) else f"[{fields.get('type')}]"


def _tools(functions: Iterable[Any]) -> Iterator[Tool]:
    for function in functions:
        if function.get("type", "function") == "function" and function.get("name"):
            yield Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def _tool_choice(choice: Any) -> str:
    if isinstance(choice, dict):
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        return name if isinstance(name, str) else str(choice.get("mode", "auto"))
    return choice or "auto"
