"""What a captured model call tells: who answered, how it ended, how long it took, what it used.

A streamed answer is put together again: what it says in the end, and whether it came to one.

Numbers that an endpoint does not tell stay unknown: null is not 0.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.config_types import ModelServerRef
from nemo_gym.jsonl import is_deeper
from nemo_gym.observability.store import CaptureStore

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
_RAW = "_raw"
_MOST_LEVELS = 200
"""Of the arguments of a call, so that every parser can read the record that has them."""
_NUMBERS = (int, float)
_PLAIN_NUMBERS = {*_NUMBERS}
_PLAIN_USAGE = {"input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"}
_ELSEWHERE = frozenset({"choices", "content", "stop_reason"})
"""Fields of answers in other dialects than Responses that tell how they ended, or hold tool calls and thoughts."""
_SUMMED = ("tokens_in", "tokens_out", "tokens_reasoning", "tokens_total", "cached_tokens", "latency_total_ms")
_STATUS_CATEGORIES = {401: "auth", 403: "auth", 404: "not_found", 408: "timeout", 429: "rate_limit", 504: "timeout"}


class ModelCallRecord(BaseModel):
    """One captured call."""

    model_config = ConfigDict(defer_build=True, protected_namespaces=())

    model_call_id: str | None = None
    response_id: str | None = None
    call_index: int
    model_ref: ModelServerRef | None = None
    model: str | None = None
    dialect: str | None = None
    status_code: int | None = None
    response_status: str | None = None
    finish_reason: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_reasoning: int | None = None
    tokens_total: int | None = None
    request: dict[str, Any] | None = None
    response: dict[str, Any] | None = None
    request_raw: str | None = None
    response_raw: str | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    reasoning_content: str | None = None
    cache_hit: bool | None = None
    cached_tokens: int | None = None
    cache_creation_tokens: int | None = None
    error_category: str | None = None
    latency_total_ms: float | None = None
    latency_ttft_ms: float | None = None


def category_of_status(status: int) -> str | None:
    """What kind of failure a status is; None for none."""
    if status < 400:
        return None
    return _STATUS_CATEGORIES.get(status, "client_error" if status < 500 else "upstream_error")


def extract_token_stats(usage: Any) -> dict[str, int | None]:
    """The tokens that a `usage` of any dialect tells."""
    if type(usage) is not dict:
        usage = usage if isinstance(usage, Mapping) else {}
    elif usage.keys() == _PLAIN_USAGE and (plain := _plain_stats(usage)) is not None:
        return plain
    return _any_stats(usage)


def _plain_stats(usage: dict[str, Any]) -> dict[str, int | None] | None:
    """Those of a usage of the Responses API that tells all of them; None for another."""
    read, written, total = usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]
    of_input, of_output = usage["input_tokens_details"], usage["output_tokens_details"]
    if not (type(of_input) is type(of_output) is dict and len(of_input) == len(of_output) == 1):
        return None
    cached, reasoning = of_input.get("cached_tokens"), of_output.get("reasoning_tokens")
    if not (type(read) is type(written) is type(total) is type(cached) is type(reasoning) is int):
        return None
    if read < 0 or written < 0 or total < 0 or cached < 0 or reasoning < 0:
        return None
    return {
        "tokens_in": read,
        "tokens_out": written,
        "tokens_total": total,
        "tokens_reasoning": reasoning,
        "cached_tokens": cached,
        "cache_creation_tokens": None,
    }


def _any_stats(told: Mapping[str, Any]) -> dict[str, int | None]:
    read = _first(told, "input_tokens", "prompt_tokens")
    created = _first(told, "cache_creation_input_tokens")
    beside = [count for count in (_first(told, "cache_read_input_tokens"), created) if count is not None]
    if beside and not (read is None and sum(beside) == 0):
        read = (read or 0) + sum(beside)  # the Messages API does not count them among its input tokens
    written = _first(told, "output_tokens", "completion_tokens")
    total = _first(told, "total_tokens")
    if total is None and read is not None and written is not None:
        total = read + written
    output_details = _details(told, "output_tokens_details", "completion_tokens_details")
    reasoning = _first(output_details, "reasoning_tokens")
    input_details = _details(told, "prompt_tokens_details", "input_tokens_details")
    cached = _first(input_details, "cached_tokens", "cached_input_tokens")
    return {
        "tokens_in": read,
        "tokens_out": written,
        "tokens_total": total,
        "tokens_reasoning": _first(told, "reasoning_output_tokens") if reasoning is None else reasoning,
        "cached_tokens": _first(told, "cache_read_input_tokens", "cached_input_tokens") if cached is None else cached,
        "cache_creation_tokens": created,
    }


def _first(told: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        count = told.get(name)
        if type(count) is int and count >= 0:
            return count
    return None


def _details(told: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return next((details for name in names if isinstance(details := told.get(name), Mapping)), {})


def build_model_call_record(exchange: Mapping[str, Any], *, call_index: int) -> ModelCallRecord:
    """What a captured exchange tells."""
    return ModelCallRecord.model_validate(call_fields(exchange, call_index))


def call_fields(exchange: Mapping[str, Any], call_index: int) -> dict[str, Any]:
    """The same as plain JSON, all fields in their order."""
    request, response = _object(exchange.get("request")), _object(exchange.get("response"))
    payloads = {
        "request": request,
        "response": response,
        "request_raw": exchange.get("request_raw"),
        "response_raw": exchange.get("response_raw"),
    }
    return _fields(exchange, response or {}, request or {}, call_index, payloads)


def _fields(
    exchange: Mapping[str, Any],
    response: dict[str, Any],
    request: dict[str, Any],
    call_index: int,
    payloads: dict[str, Any],
) -> dict[str, Any]:
    """With what was asked and said in their midst."""
    told = response.get
    model, status, response_id = told("model"), told("status"), told("id")
    stats = extract_token_stats(told("usage"))
    cached = stats["cached_tokens"]
    is_plain = _ELSEWHERE.isdisjoint(response)
    calls, thoughts = _in_output(told("output")) if is_plain else _tool_calls_and_thoughts(response)
    noted = exchange.get
    return {
        "model_call_id": noted("model_call_id"),
        "response_id": response_id if isinstance(response_id, str) else None,
        "call_index": call_index,
        "model_ref": noted("model_ref"),
        "model": model if model and isinstance(model, str) else _text(request.get("model")),
        "dialect": noted("dialect"),
        "status_code": noted("status_code"),
        "response_status": status if isinstance(status, str) else None,
        "finish_reason": None if is_plain and told("incomplete_details") is None else _finish_reason(response),
        "started_at": noted("started_at"),
        "completed_at": noted("completed_at"),
        "tokens_in": stats["tokens_in"],
        "tokens_out": stats["tokens_out"],
        "tokens_reasoning": stats["tokens_reasoning"],
        "tokens_total": stats["tokens_total"],
        **payloads,
        "tool_calls": calls,
        "reasoning_content": "\n".join(thoughts) or None,
        "cache_hit": None if cached is None else cached > 0,
        "cached_tokens": cached,
        "cache_creation_tokens": stats["cache_creation_tokens"],
        "error_category": noted("error_category"),
        "latency_total_ms": noted("latency_ms"),
        "latency_ttft_ms": noted("latency_ttft_ms"),
    }


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _finish_reason(response: Mapping[str, Any]) -> str | None:
    if isinstance(reason := response.get("stop_reason"), str):
        return reason
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(first, dict) and isinstance(reason := first.get("finish_reason"), str):
        return reason
    details = response.get("incomplete_details")
    return _text(details.get("reason")) if isinstance(details, dict) else None


def _tool_calls_and_thoughts(response: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Of an answer in any dialect."""
    calls, thoughts = _in_output(response.get("output"))
    for choice in _objects(response.get("choices"))[:1]:
        message = _object(choice.get("message")) or {}
        spoken = message.get("reasoning_content") or message.get("reasoning")
        thoughts += [spoken] if isinstance(spoken, str) else []
        for call in _objects(message.get("tool_calls")):
            function = _object(call.get("function")) or {}
            calls.append(_call(call.get("id"), function.get("name"), function.get("arguments")))
    for block in _objects(response.get("content")):
        if block.get("type") == "tool_use":
            calls.append(_call(block.get("id"), block.get("name"), block.get("input")))
        elif block.get("type") == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
    return calls, thoughts


def _in_output(items: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Tool calls and thoughts of an answer of the Responses API."""
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if kind == "function_call":
            calls.append(_call(item.get("call_id"), item.get("name"), item.get("arguments")))
        elif kind == "reasoning":
            thoughts += [part["text"] for part in _objects(item.get("summary")) if isinstance(part.get("text"), str)]
    return calls, thoughts


def _objects(value: Any) -> Sequence[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else ()


def _call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = {_RAW: arguments} if is_deeper(arguments, _MOST_LEVELS) else orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = {_RAW: arguments}
    return {"call_id": call_id, "name": name, "arguments": arguments}


def read_model_call_records(store: CaptureStore, rollout_id: str) -> list[ModelCallRecord]:
    """The captured calls of a rollout.

    Raises:
        ValueError: a line is damaged.
    """
    calls = store.read(rollout_id)
    return [build_model_call_record(call, call_index=index) for index, call in enumerate(calls)]


def read_available_model_call_records(store: CaptureStore, rollout_id: str) -> tuple[list[ModelCallRecord], int]:
    """Those that can be read, and how many lines cannot."""
    calls, invalid = store.read_available(rollout_id)
    records = []
    for index, call in calls:
        try:
            records.append(build_model_call_record(call, call_index=index))
        except ValueError:
            invalid += 1
    return records, invalid


def aggregate_model_call_records(calls: Sequence[ModelCallRecord]) -> dict[str, Any]:
    """Sums over calls."""
    return summed([{name: getattr(call, name) for name in _SUMMED} for call in calls])


def summed(calls: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over calls given as JSON; what no call tells is null."""
    given = list(calls)
    sums: dict[str, Any] = {}
    for name in _SUMMED:
        told = [call.get(name) for call in given]
        if not {*map(type, told)} <= _PLAIN_NUMBERS:
            told = [value for value in told if isinstance(value, _NUMBERS)]
        sums[name] = sum(told) if told else None
    if isinstance(sums["latency_total_ms"], float):
        sums["latency_total_ms"] = round(sums["latency_total_ms"], 2)
    return {**sums, "num_calls": len(given)}


def aggregate_model_call_metrics(store: CaptureStore, rollout_id: str) -> dict[str, Any]:
    """Sums over the captured calls of a rollout."""
    return aggregate_model_call_records(read_model_call_records(store, rollout_id))


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
    """The answer that was streamed as `body`.

    Raises:
        ValueError: nobody has said how streams of that dialect are put together.
    """
    together = {"responses": _response, "chat": _completion, "messages": _message}.get(dialect)
    if together is None:
        raise ValueError(f"how streams of the dialect {dialect!r} are put together is not known")
    return together(list(_events(body)))


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
