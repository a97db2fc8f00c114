"""A streamed answer of a model, put together again: what it says in the end, and whether it came to one."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import orjson

Ending = Literal["complete", "incomplete", "error"]
_RESPONSE_ENDS: dict[str, Ending] = {
    "response.completed": "complete",
    "response.incomplete": "incomplete",
    "response.failed": "error",
    "error": "error",
}
_MARKS = {
    "responses": tuple(f'"{kind}"'.encode() for kind in _RESPONSE_ENDS),
    "chat": (b"[DONE]", b'"error"', b"event: error"),
    "messages": (b'"message_stop"', b'"error"'),
}


class Event(NamedTuple):
    """One server-sent event."""

    kind: str
    data: Any
    """Its JSON, else its text."""


class Streamed(NamedTuple):
    """What a stream amounts to."""

    response: dict[str, Any] | None
    ending: Ending | None
    """None for one that broke off."""


def may_end(dialect: str, chunk: bytes) -> bool:
    """Whether a chunk looks as if it held the event that ends a stream; cheap, and never wrong about one that does."""
    return any(mark in chunk for mark in _MARKS[dialect])


def rebuilt(dialect: str, body: bytes) -> Streamed:
    """The answer that was streamed as `body`."""
    events = list(_events(body))
    if dialect == "responses":
        return _response(events)
    return _completion(events) if dialect == "chat" else _message(events)


def _events(body: bytes) -> Iterator[Event]:
    for block in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        kind, data = "", []
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            if name == b"event":
                kind = value.strip().decode(errors="replace")
            elif name == b"data":
                data.append(value.removeprefix(b" "))
        if not data:
            continue
        text = b"\n".join(data)
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError:
            parsed = text.decode(errors="replace")
        if isinstance(parsed, dict) and isinstance(parsed.get("type"), str):
            kind = kind or parsed["type"]
        yield Event(kind, parsed)


def _response(events: list[Event]) -> Streamed:
    last: dict[str, Any] | None = None
    for kind, data in events:
        if isinstance(data, dict) and isinstance(data.get("response"), dict):
            last = data["response"]
        if kind in _RESPONSE_ENDS:
            return Streamed(last, _RESPONSE_ENDS[kind])
    return Streamed(last, None)


def _completion(events: list[Event]) -> Streamed:
    whole: dict[str, Any] = {}
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    reason, ending = None, None
    for kind, data in events:
        if data == "[DONE]":
            ending = ending or "complete"
            break
        if not isinstance(data, dict):
            continue
        if kind == "error" or data.get("error") is not None:
            ending = "error"
            continue
        whole = whole or {name: data.get(name) for name in ("id", "created", "model")}
        whole |= {"usage": data["usage"]} if data.get("usage") else {}
        for choice in (data.get("choices") or ())[:1]:
            _add_delta(message, calls, choice.get("delta") or {})
            reason = choice.get("finish_reason") or reason
    if not whole:
        return Streamed(None, ending)  # type: ignore[arg-type]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    choices = [{"index": 0, "finish_reason": reason, "message": message}]
    return Streamed({**whole, "object": "chat.completion", "choices": choices}, ending)  # type: ignore[arg-type]


def _add_delta(message: dict[str, Any], calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    for name, target in (
        ("content", "content"),
        ("reasoning_content", "reasoning_content"),
        ("reasoning", "reasoning_content"),
    ):
        if isinstance(delta.get(name), str):
            message[target] = (message.get(target) or "") + delta[name]
    for call in delta.get("tool_calls") or ():
        made = calls.setdefault(call.get("index") or 0, {"type": "function", "function": {"name": "", "arguments": ""}})
        made |= {name: call[name] for name in ("id", "type") if call.get(name)}
        function = call.get("function") or {}
        for name in ("name", "arguments"):
            made["function"][name] += function.get(name) or ""


def _message(events: list[Event]) -> Streamed:
    whole: dict[str, Any] | None = None
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    ending: Ending | None = None
    for kind, data in events:
        if not isinstance(data, dict):
            continue
        if kind == "message_start":
            whole = dict(data.get("message") or {})
        elif kind == "content_block_start":
            blocks[data.get("index") or 0] = dict(data.get("content_block") or {})
        elif kind == "content_block_delta":
            index = data.get("index") or 0
            _add_to_block(blocks.setdefault(index, {}), inputs, index, data.get("delta") or {})
        elif kind == "message_delta" and whole is not None:
            whole |= {name: value for name, value in (data.get("delta") or {}).items() if value is not None}
            whole["usage"] = {**(whole.get("usage") or {}), **(data.get("usage") or {})}
        elif kind in ("message_stop", "error"):
            ending = "complete" if kind == "message_stop" else "error"
    if whole is None:
        return Streamed(None, ending)
    for index, text in inputs.items():
        blocks[index]["input"] = _parsed_input(text)
    return Streamed({**whole, "content": [blocks[index] for index in sorted(blocks)]}, ending)


def _add_to_block(block: dict[str, Any], inputs: dict[int, str], index: int, delta: dict[str, Any]) -> None:
    for name in ("text", "thinking", "signature"):
        if isinstance(delta.get(name), str):
            block[name] = (block.get(name) or "") + delta[name]
    if isinstance(delta.get("partial_json"), str):
        inputs[index] = inputs.get(index, "") + delta["partial_json"]


def _parsed_input(text: str) -> Any:
    try:
        return orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return {"_raw": text}
