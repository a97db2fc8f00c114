"""The Responses API as clients stream it: what they send beyond the API made fit, and a response as events.

A response is made whole first and told in events then. Clients such as Codex send tools in namespaces, items of their
own and settings that no server knows: what has a form here is kept under it, the rest left out with a warning, since a
client that streams has no other way to go on.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from uuid import uuid4

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from nemo_gym.dialects.base import sse
from nemo_gym.schemas.openai_items import NeMoGymResponseInputItem
from nemo_gym.schemas.openai_responses import NeMoGymResponseCreateParamsNonStreaming

logger = logging.getLogger(__name__)

NAMESPACE_TOOL_DELIMITER = "__"
NamespaceMap: TypeAlias = dict[str, tuple[str, str]]
"""The name of a tool here, and the namespace and name that its client gave it."""
Fields: TypeAlias = dict[str, Any]
_SYSTEM = ("system", "developer")
_BLANK_LINE = "\n\n"
_ITEM: TypeAdapter[Any] = TypeAdapter(NeMoGymResponseInputItem)


def flatten_namespace_tools(tools: Any) -> tuple[list[Any], NamespaceMap]:
    """Tools without namespaces: those inside one are called `<namespace>__<tool>`."""
    flat: list[Any] = []
    names: NamespaceMap = {}
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
            flat.append(tool)
            continue
        space = str(tool.get("name"))
        inside = tool.get("tools")
        for inner in inside if isinstance(inside, list) else ():
            if isinstance(inner, Mapping) and inner.get("name"):
                name = f"{space}{NAMESPACE_TOOL_DELIMITER}{inner['name']}"
                names[name] = space, str(inner["name"])
                flat.append({**inner, "type": "function", "name": name})
    return flat, names


def sanitize_streaming_responses_body(body: Mapping[str, Any]) -> tuple[Fields, NamespaceMap]:
    """A request of a client that streams as one that can be answered, and the names of its tools there."""
    clean = {name: value for name, value in body.items() if name != "stream"}
    tools, names = flatten_namespace_tools(clean.get("tools"))
    items = clean.get("input")
    if isinstance(items, list):
        kept, more, more_names = _kept_items(items)
        tools, names = [*tools, *more], names | more_names
        clean |= _with_leading_instructions(kept, clean.get("instructions"))
    fit = [tool for tool in tools if _is_fit_tool(tool)]
    for tool in tools:
        if tool not in fit:
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            logger.warning("/v1/responses: a tool of type %r is left out: no server here knows it", kind)
    if isinstance(clean.get("tools"), list) or fit:
        clean["tools"] = fit
    known = NeMoGymResponseCreateParamsNonStreaming.model_fields
    return {name: value for name, value in clean.items() if name in known}, names


def _kept_items(items: list[Any]) -> tuple[list[Any], list[Any], NamespaceMap]:
    """The items that can be read, and the tools that items bring."""
    kept: list[Any] = []
    tools: list[Any] = []
    names: NamespaceMap = {}
    for item in items:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "additional_tools":
            flat, more = flatten_namespace_tools(item.get("tools"))
            functions = [tool for tool in flat if isinstance(tool, Mapping) and tool.get("type") == "function"]
            if len(functions) < len(flat):
                logger.warning("/v1/responses: additional tools that are no functions are left out")
            tools += functions
            names |= more
            continue
        if kind == "function_call" and item.get("namespace"):
            joined = f"{item['namespace']}{NAMESPACE_TOOL_DELIMITER}{item.get('name')}"
            item = {name: value for name, value in item.items() if name != "namespace"} | {"name": joined}
        try:
            _ITEM.validate_python(item)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]["msg"]
            logger.warning("/v1/responses: an item of type %r is left out: %s", kind, problem)
        else:
            kept.append(item)
    return kept, tools, names


def _with_leading_instructions(items: list[Any], instructions: Any) -> Fields:
    """The items, and as `instructions` what system and developer say before anybody else does."""
    if instructions is not None and not isinstance(instructions, str):
        return {"input": items}  # refused later
    texts = [instructions] if instructions else []
    at = 0
    while at < len(items) and items[at].get("role") in _SYSTEM:
        content = items[at].get("content")
        parts = [{"text": content}] if isinstance(content, str) else content or ()
        if any("text" not in part for part in parts):
            break  # an image has no form in instructions
        texts.append("".join(part.get("text") or "" for part in parts))
        at += 1
    return {"input": items[at:], **({"instructions": _BLANK_LINE.join(texts)} if texts else {})}


def _is_fit_tool(tool: Any) -> bool:
    try:
        NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "", "tools": [tool]})
    except ValidationError:
        return False
    return True


def validate_streaming_responses_params(body: Mapping[str, Any]) -> NeMoGymResponseCreateParamsNonStreaming:
    """The request, without fields that nobody knows.

    Raises:
        RequestValidationError: something else is wrong with it (answered with 422).
    """
    left = dict(body)
    while True:
        try:
            return NeMoGymResponseCreateParamsNonStreaming.model_validate(left)
        except ValidationError as error:
            unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
            if not any(_drop(left, loc) for loc in unknown):
                raise invalid(error) from error


def invalid(error: ValidationError) -> RequestValidationError:
    """What FastAPI would have raised for a body."""
    found = error.errors(include_url=False)
    return RequestValidationError([{**item, "loc": ("body", *item["loc"])} for item in found])


def _drop(value: Any, loc: tuple[Any, ...]) -> bool:
    for step in loc[:-1]:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            continue  # a step that is no key names a type in a union
    return isinstance(value, dict) and value.pop(loc[-1], _drop) is not _drop


def synthesize_responses_sse(response_json: Mapping[str, Any], ns_map: NamespaceMap | None = None) -> Iterator[str]:
    """A response as the events by which it is streamed; tools have their clients' names again."""
    events = _Events()
    output = [_renamed(item, ns_map or {}) for item in response_json.get("output") or ()]
    whole = {**response_json, "output": output}
    yield events.event("response.created", response={**whole, "status": "in_progress", "output": []})
    for index, item in enumerate(output):
        yield from events.of_item(index, item)
    yield events.event(f"response.{_end_of(response_json)}", response=whole)


def _end_of(response: Mapping[str, Any]) -> str:
    if response.get("error") is not None or response.get("status") == "failed":
        return "failed"
    is_whole = response.get("incomplete_details") is None and response.get("status") != "incomplete"
    return "completed" if is_whole else "incomplete"


def synthesize_responses_failure_sse(message: str, *, code: str = "server_error") -> Iterator[str]:
    """The events of a response that could not be made."""
    events = _Events()
    head = {"id": f"resp_{uuid4().hex}", "object": "response", "output": []}
    yield events.event("response.created", response={**head, "status": "in_progress"})
    failed = {**head, "status": "failed", "error": {"code": code, "message": message}}
    yield events.event("response.failed", response=failed)


def _renamed(item: Fields, names: NamespaceMap) -> Fields:
    known = names.get(item.get("name", "")) if item.get("type") == "function_call" else None
    return item if known is None else {**item, "namespace": known[0], "name": known[1]}


class _Events:
    """Events of one stream, which are numbered."""

    def __init__(self) -> None:
        self._number = -1

    def event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    def of_item(self, index: int, item: Fields) -> Iterator[str]:
        """An item as it appears, grows and is done."""
        kind = item.get("type", "message")
        place = {"item_id": item.get("id") or "", "output_index": index}
        if kind == "message" and isinstance(item.get("content"), list):
            begun = {**item, "status": "in_progress", "content": []}
            yield self.event("response.output_item.added", output_index=index, item=begun)
            for number, part in enumerate(item["content"]):
                yield from self._of_part({**place, "content_index": number}, part)
        elif kind == "function_call":
            begun = {**item, "status": "in_progress", "arguments": ""}
            yield self.event("response.output_item.added", output_index=index, item=begun)
            arguments = item.get("arguments") or ""
            yield self.event("response.function_call_arguments.delta", **place, delta=arguments)
            done = {"arguments": arguments, "name": item.get("name")}
            yield self.event("response.function_call_arguments.done", **place, **done)
        yield self.event("response.output_item.done", output_index=index, item=item)

    def _of_part(self, place: Fields, part: Fields) -> Iterator[str]:
        field = "refusal" if part.get("type") == "refusal" else "text"
        name = "refusal" if field == "refusal" else "output_text"
        more: Fields = {} if field == "refusal" else {"logprobs": []}
        yield self.event("response.content_part.added", **place, part={**part, field: ""})
        yield self.event(f"response.{name}.delta", **place, delta=part.get(field) or "", **more)
        yield self.event(f"response.{name}.done", **place, **{field: part.get(field) or ""}, **more)
        yield self.event("response.content_part.done", **place, part=part)
