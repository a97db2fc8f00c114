"""The Anthropic Messages API as a dialect, for harnesses that ask in it and for endpoints that speak it.

A conversation there is messages made of blocks, two roles taking turns: what the Responses API has as items of their
own (thoughts, calls, what tools said) are blocks inside a message. Signatures of thoughts travel as
`encrypted_content`, so that an endpoint gets back what it signed. Arguments of a call that are no JSON object travel
as `{"_raw": text}`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import time
from typing import Any, TypeAlias
from uuid import uuid4

import orjson
from pydantic import TypeAdapter, ValidationError

from nemo_gym.dialects.base import EXTRA_BODY, UnusableRequestError, json_text, set_fields, sse
from nemo_gym.dialects.to_anthropic import RAW_ARGUMENTS, input_of_call, request_to_anthropic
from nemo_gym.schemas.openai_items import NeMoGymResponseOutputItem
from nemo_gym.schemas.openai_responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

logger = logging.getLogger(__name__)

Block: TypeAlias = Mapping[str, Any]
Fields: TypeAlias = dict[str, Any]

SUPPORTED_ANTHROPIC_IMAGE_MEDIA_TYPES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
_SAME_NAME = ("model", "temperature", "top_p")
_ROLES = ("user", "assistant", "system")
_EMPTY_SCHEMA: Fields = {"type": "object", "properties": {}}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_INCOMPLETE = {"max_tokens": "max_output_tokens", "model_context_window_exceeded": "max_output_tokens"}
_STOP_REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
_ITEMS: TypeAdapter[list[NeMoGymResponseOutputItem]] = TypeAdapter(list[NeMoGymResponseOutputItem])


@dataclass(frozen=True)
class AnthropicDialect:
    """Puts requests into the Messages API and its answers back; see `Dialect`."""

    model: str = ""
    """The model to ask for; the one that the request names when empty."""
    max_tokens: int = 4096
    """What to allow for an answer when the request does not say: the Messages API wants it said."""
    thinking: Mapping[str, Any] | None = None
    """How the model is to think, in the words of the Messages API."""

    def request_to(self, params: NeMoGymResponseCreateParamsNonStreaming) -> Fields:
        """The Messages request that asks the same.

        Raises:
            NotImplementedError: it holds something the Messages API has no form for.
        """
        given = set_fields(params)
        request = request_to_anthropic(given, self.max_tokens)
        request["model"] = self.model or given.get("model") or ""
        if self.thinking is not None:
            request["thinking"] = dict(self.thinking)
        return request

    def response_from(
        self, params: NeMoGymResponseCreateParamsNonStreaming, answer: Mapping[str, Any], model: str | None = None
    ) -> NeMoGymResponse:
        """The response to `params` that a message of the Messages API amounts to."""
        reason = _INCOMPLETE.get(answer.get("stop_reason") or "")
        if answer.get("stop_reason") == "refusal":
            reason = "content_filter"
        given = set_fields(params)
        echoed = {name: given[name] for name in ("instructions", "metadata", "temperature", "top_p") if name in given}
        return NeMoGymResponse.model_validate(
            {
                "id": answer.get("id") or _new_id("resp"),
                "created_at": int(time()),
                "object": "response",
                "model": model or answer.get("model") or params.model or "",
                "output": _items_of_answer(answer.get("content") or ()),
                "status": "incomplete" if reason else "completed",
                "incomplete_details": {"reason": reason} if reason else None,
                "usage": _usage_from(answer.get("usage")),
                "tools": given.get("tools") or [],
                "tool_choice": given.get("tool_choice") or "auto",
                "parallel_tool_calls": given.get("parallel_tool_calls", True),
                **echoed,
            }
        )

    def request_from(self, request: Mapping[str, Any]) -> NeMoGymResponseCreateParamsNonStreaming:
        """The Responses request that asks the same as a Messages request.

        Raises:
            UnusableRequestError: it is no Messages request, or holds what the Responses API has no form for.
        """
        try:
            fields = _fields_from(request)
        except KeyError as error:
            raise UnusableRequestError(f"messages: a block lacks its {error}") from error
        except (AttributeError, TypeError) as error:
            raise UnusableRequestError(f"it is no Messages request: {error}") from error
        try:
            return NeMoGymResponseCreateParamsNonStreaming.model_validate(fields)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise UnusableRequestError(f"as a Responses request it has a flaw in {where}: {problem['msg']}") from error

    def items_from(self, messages: Sequence[Mapping[str, Any]]) -> list[NeMoGymResponseOutputItem]:
        """A conversation of the Messages API as items of the Responses API."""
        return _ITEMS.validate_python([item for message in messages for item in _items_of_message(message)])

    def response_to(self, response: Mapping[str, Any], model: str | None = None) -> Fields:
        """The message that says the same as a response, given as JSON."""
        blocks = [block for item in response.get("output") or () for block in _blocks_of(item)]
        usage = response.get("usage") or {}
        return {
            "id": _new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model or response.get("model") or "",
            "content": blocks,
            "stop_reason": _stop_reason(response, blocks),
            "usage": {
                "input_tokens": usage.get("input_tokens") or 0,
                "output_tokens": usage.get("output_tokens") or 0,
            },
        }

    def events_of(self, answer: Mapping[str, Any]) -> Iterator[str]:
        """A message as the events by which the Messages API streams it."""
        usage = answer.get("usage") or {}
        start = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**usage, "output_tokens": 0}
        yield _event("message_start", message=start)
        for index, block in enumerate(answer.get("content") or ()):
            shell, deltas = _streamed(block)
            yield _event("content_block_start", index=index, content_block=shell)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {"stop_reason": answer.get("stop_reason"), "stop_sequence": answer.get("stop_sequence")}
        yield _event("message_delta", delta=end, usage={"output_tokens": usage.get("output_tokens") or 0})
        yield _event("message_stop")


def error_body(message: str, kind: str = "invalid_request_error") -> Fields:
    """An error in the shape of the Messages API."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def _messages(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UnusableRequestError("messages: at least one message is needed, each with a role and content")
    return messages


def _fields_from(request: Mapping[str, Any]) -> Fields:
    fields = {name: request[name] for name in _SAME_NAME if request.get(name) is not None}
    fields["input"] = [item for message in _messages(request) for item in _items_of_message(message)]
    if request.get("max_tokens") is not None:
        fields["max_output_tokens"] = request["max_tokens"]
    if instructions := _joined_texts(request.get("system"), "system"):
        fields["instructions"] = instructions
    return fields | _tools_from(request) | _settings_from(request)


def _settings_from(request: Mapping[str, Any]) -> Fields:
    """Settings with another name, or another place, in the Responses API; of the rest, what is lost is said once."""
    fields: Fields = {}
    wanted = request.get("output_config") or {}
    if wanted.get("effort"):
        fields["reasoning"] = {"effort": wanted["effort"]}
    if (wanted.get("format") or {}).get("type") == "json_schema":
        fields["text"] = {"format": {"name": "output", **wanted["format"]}}
    extra = {"stop": request.get("stop_sequences"), "top_k": request.get("top_k")}
    if any(value is not None for value in extra.values()):
        given = {name: value for name, value in extra.items() if value is not None}
        fields["metadata"] = {EXTRA_BODY: orjson.dumps(given).decode()}
    user = (request.get("metadata") or {}).get("user_id")
    if isinstance(user, str):
        fields["user"] = user
    if (request.get("thinking") or {}).get("type") == "enabled":
        _say_once("thinking.budget_tokens has no form in the Responses API; output_config.effort is passed on")
    return fields


@cache
def _say_once(text: str) -> None:
    logger.warning("/v1/messages: %s", text)


def _tools_from(request: Mapping[str, Any]) -> Fields:
    fields: Fields = {}
    if request.get("tools"):
        fields["tools"] = [_tool_from(tool) for tool in request["tools"]]
    choice = request.get("tool_choice")
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "tool":
            fields["tool_choice"] = {"type": "function", "name": choice.get("name")}
        elif kind in _TOOL_CHOICES:
            fields["tool_choice"] = _TOOL_CHOICES[kind]
        else:
            raise UnusableRequestError(f"tool_choice.type is {kind!r}; auto, any, tool and none are known")
        if choice.get("disable_parallel_tool_use"):
            fields["parallel_tool_calls"] = False
    return fields


def _tool_from(tool: Any) -> Fields:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom") or not tool.get("name"):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise UnusableRequestError(f"tools: {kind!r} is a tool of the provider; only tools with an input_schema work")
    made = {"type": "function", "name": tool["name"], "strict": bool(tool.get("strict", False))}
    made["parameters"] = tool.get("input_schema") or _EMPTY_SCHEMA
    return {**made, "description": tool["description"]} if tool.get("description") else made


def _items_of_message(message: Any) -> Iterator[Fields]:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise UnusableRequestError(f"messages: a message needs a role, one of {', '.join(_ROLES)}")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content, "type": "message"}
        return
    if not isinstance(content, list):
        raise UnusableRequestError("messages: the content of a message is text or a list of blocks")
    parts: list[Fields] = []
    for block in content:
        part = _part_from(block, role)
        if part is not None:
            parts.append(part)
            continue
        yield from _message_of(role, parts)
        parts = []
        yield _item_from(block)
    yield from _message_of(role, parts)


def _message_of(role: str, parts: list[Fields]) -> Iterator[Fields]:
    if not parts:
        return
    is_plain = len(parts) == 1 and "text" in parts[0]
    yield {"role": role, "content": parts[0]["text"] if is_plain else parts, "type": "message"}


def _part_from(block: Any, role: str = "user") -> Fields | None:
    """A block that is part of a message; None for one that is an item of its own."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        by_model: Fields = {"annotations": []} if role == "assistant" else {}
        return {"type": "output_text" if role == "assistant" else "input_text", "text": block["text"], **by_model}
    if kind == "image":
        return {"type": "input_image", "detail": "auto", "image_url": _image_url(block.get("source") or {})}
    if kind == "document":
        return _document(block)
    return None


def _image_url(source: Block) -> str:
    if source.get("type") == "url":
        return str(source.get("url"))
    media_type = source.get("media_type")
    if source.get("type") != "base64" or media_type not in SUPPORTED_ANTHROPIC_IMAGE_MEDIA_TYPES:
        known = ", ".join(sorted(SUPPORTED_ANTHROPIC_IMAGE_MEDIA_TYPES))
        raise UnusableRequestError(f"an image of {media_type!r} by {source.get('type')!r} has no form; known: {known}")
    return f"data:{media_type};base64,{source.get('data')}"


def _document(block: Block) -> Fields:
    source = block.get("source") or {}
    name = block.get("title") or "document"
    if source.get("type") == "text":
        return {"type": "input_text", "text": source.get("data") or ""}
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "input_file", "filename": name, "file_data": url}
    if source.get("type") == "url":
        return {"type": "input_file", "filename": name, "file_url": source.get("url")}
    raise UnusableRequestError(f"a document by {source.get('type')!r} has no form in the Responses API")


def _item_from(block: Any) -> Fields:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "tool_use":
        made = {"type": "function_call", "id": block["id"], "call_id": block["id"], "name": block["name"]}
        return {**made, "arguments": _arguments(block.get("input")), "status": "completed"}
    if kind == "tool_result":
        output = _tool_output(block.get("content"))
        if block.get("is_error"):
            _say_once("is_error of a tool's result has no form in the Responses API; the model sees what the tool said")
        return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": output}
    if kind == "thinking":
        summary = [{"type": "summary_text", "text": block.get("thinking") or ""}]
        signature = {"encrypted_content": block["signature"]} if block.get("signature") else {}
        return {"type": "reasoning", "id": _new_id("rs"), "summary": summary, **signature}
    if kind == "redacted_thinking":
        return {"type": "reasoning", "id": _new_id("rs"), "summary": [], "encrypted_content": block.get("data")}
    raise UnusableRequestError(f"a block of type {kind!r} has no form in the Responses API")


def _arguments(given: Any) -> str:
    if isinstance(given, Mapping) and set(given) == {RAW_ARGUMENTS} and isinstance(given[RAW_ARGUMENTS], str):
        return str(given[RAW_ARGUMENTS])
    return json_text(given if given is not None else {})


def _tool_output(content: Any) -> str | list[Fields]:
    if content is None or isinstance(content, str):
        return content or ""
    if all(isinstance(block, Mapping) and block.get("type") == "text" for block in content):
        return "\n".join(block["text"] for block in content)
    parts = [_part_from(block) for block in content]
    if None in parts:
        kinds = [block.get("type") if isinstance(block, Mapping) else block for block in content]
        raise UnusableRequestError(f"a tool_result of {kinds} has no form in the Responses API")
    return [part for part in parts if part is not None]


def _joined_texts(system: Any, where: str) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    try:
        return "\n".join(block["text"] for block in system)
    except (TypeError, KeyError) as error:
        raise UnusableRequestError(f"{where}: text or text blocks are expected") from error


def _blocks_of(item: Mapping[str, Any]) -> Iterator[Fields]:
    """The blocks that say the same as an item of a response."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        parts = item.get("summary") or item.get("content") or ()
        text = "\n".join(part.get("text") or "" for part in parts)
        sealed = item.get("encrypted_content")
        if text or not sealed:
            yield {"type": "thinking", "thinking": text, "signature": sealed or ""}
        else:
            yield {"type": "redacted_thinking", "data": sealed}
    elif kind == "message" and item.get("role", "assistant") == "assistant":
        yield from _texts(item.get("content"))
    elif kind == "function_call":
        yield {
            "type": "tool_use",
            "id": item["call_id"],
            "name": item["name"],
            "input": input_of_call(item.get("arguments")),
        }
    elif kind == "custom_tool_call":
        given = {"input": item.get("input") or ""}
        yield {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": given}


def _texts(content: Any) -> Iterator[Fields]:
    if isinstance(content, str):
        content = [{"text": content}]
    for part in content or ():
        text = part.get("text") or part.get("refusal")
        if text:
            yield {"type": "text", "text": text}


def _stop_reason(response: Mapping[str, Any], blocks: Iterable[Block]) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in _STOP_REASONS:
        return _STOP_REASONS[reason]
    return "tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn"


def _usage_from(usage: Any) -> Fields | None:
    """Tokens that were read from a cache, or put there, are not among the `input_tokens` of the Messages API."""
    if not isinstance(usage, Mapping):
        return None
    cached = usage.get("cache_read_input_tokens") or 0
    read = (usage.get("input_tokens") or 0) + cached + (usage.get("cache_creation_input_tokens") or 0)
    written = usage.get("output_tokens") or 0
    return {
        "input_tokens": read,
        "output_tokens": written,
        "total_tokens": read + written,
        "input_tokens_details": {"cached_tokens": cached},
    }


def _items_of_answer(blocks: Iterable[Block]) -> list[Fields]:
    """The output items of a message; texts in a row are one message."""
    items: list[Fields] = []
    for block in blocks:
        if block.get("type") == "text":
            part = {"type": "output_text", "text": block["text"], "annotations": block.get("citations") or []}
            if items and items[-1]["type"] == "message":
                items[-1]["content"].append(part)
            else:
                message = {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": "completed"}
                items.append({**message, "content": [part]})
        else:
            items.append(_item_from(block))
    return items


def _streamed(block: Block) -> tuple[Fields, list[Fields]]:
    """How a block begins, and what is added to it then."""
    streamed = _STREAMED.get(block["type"])
    return (dict(block), []) if streamed is None else streamed(block)


_STREAMED: dict[str, Callable[[Block], tuple[Fields, list[Fields]]]] = {
    "text": lambda block: ({"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]),
    "thinking": lambda block: (
        {"type": "thinking", "thinking": "", "signature": ""},
        [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block.get("signature") or ""},
        ],
    ),
    "tool_use": lambda block: (
        {**block, "input": {}},
        [{"type": "input_json_delta", "partial_json": json_text(block["input"])}],
    ),
}


def _event(name: str, **fields: Any) -> str:
    return sse({"type": name, **fields}, name)
