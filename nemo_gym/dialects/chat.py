"""The Chat Completions API as a dialect: what its endpoints answer, made uniform, and as items of the Responses API.

In between, reasoning travels as `<think>` blocks in the text of assistant messages, and token ids of earlier turns
on the messages they belong to. Endpoints that split reasoning off get it put back into the text; a prompt that no
longer fits becomes an empty answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from time import time
from typing import Any, TypeAlias
from uuid import uuid4

import aiohttp
from pydantic import ValidationError

from nemo_gym.dialects.base import NoResponsesFormError, UnusableRequestError, set_fields, sse
from nemo_gym.dialects.to_chat import SAME_NAME, Part, fields_as_tags, plain_text, taken_apart, to_chat_request, wrapped
from nemo_gym.http.errors import readable
from nemo_gym.http.model_answers import EndpointSettings
from nemo_gym.schemas.hosted_items import NeMoGymResponseCustomToolCall
from nemo_gym.schemas.openai_chat import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionMessage,
    NeMoGymChoice,
    NeMoGymCompletionUsage,
)
from nemo_gym.schemas.openai_items import (
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseReasoningItem,
    NeMoGymSummary,
    training_variant_of,
)
from nemo_gym.schemas.openai_responses import (
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseUsage,
)
from nemo_gym.schemas.wire import TOKEN_FIELDS, WEIGHT_FIELDS, carries_token_ids

_STREAMS_ALONE = frozenset({"stream", "stream_options"})
NewId: TypeAlias = Callable[[str], str]
"""Makes an id with the given prefix."""
TakeApart: TypeAlias = Callable[[str], tuple[list[str], str]]
"""Splits what a model said into its think blocks and the rest."""
_ECHOED = (
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "service_tier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FINISHED: dict[Any, str] = {reason: finish for finish, reason in _INCOMPLETE.items()}
_TOO_LONG = re.compile(
    r"context[ _](?:length|window|limit|size)|max_tokens|max_completion_tokens|max_new_tokens|max_model_len"
    r"|maximum (?:model|input|prompt|sequence) length|maximum number of tokens|(?:prompt|input|request) is too long"
    r"|max_prompt_len|too many tokens|reduce the length of|must have less than \d+ tokens",
    re.IGNORECASE,
)
_WRONG_PARAMETER = re.compile(
    r"unsupported[ _](?:parameter|value)|not supported|unrecognized|unexpected keyword|extra_forbidden|extra inputs",
    re.IGNORECASE,
)


def items_of_assistant(
    message: Mapping[str, Any], new_id: NewId, take_apart: TakeApart
) -> list[NeMoGymResponseOutputItem]:
    """The items of one assistant message: reasoning, text, tool calls. There is always at least one.

    Token ids on the message go to the last item.
    """
    text = plain_text(message.get("content"), "a message of the assistant")
    spoken = [field for name in ("reasoning_content", "reasoning") if isinstance(field := message.get(name), str)]
    blocks = [block for block in spoken[:1] if block]
    found, text = take_apart(text)
    blocks += found
    items: list[NeMoGymResponseOutputItem] = []
    if blocks:
        items.append(
            NeMoGymResponseReasoningItem(id=new_id("rs"), summary=[NeMoGymSummary(text=block) for block in blocks])
        )
    calls = message.get("tool_calls") or ()
    refusal = message.get("refusal")
    if text or refusal or not (blocks or calls):
        items.append(_message(text, refusal, new_id))
    items += [_call(call, new_id) for call in calls]
    if carries_token_ids(message):
        items[-1] = _with_token_ids(items[-1], message)
    return items


def items_of_messages(
    messages: Sequence[Mapping[str, Any]], new_id: NewId, take_apart: TakeApart
) -> list[NeMoGymResponseOutputItem]:
    """A whole chat as items."""
    items: list[NeMoGymResponseOutputItem] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "assistant":
            items += items_of_assistant(message, new_id, take_apart)
        elif role == "tool":
            items.append(
                NeMoGymFunctionCallOutput(call_id=message["tool_call_id"], output=to_responses_content(content))
            )
        else:
            items.append(NeMoGymEasyInputMessage(role=role, content=to_responses_content(content), type="message"))
    return items


def request_of(
    given: Mapping[str, Any], new_id: NewId, take_apart: TakeApart
) -> NeMoGymResponseCreateParamsNonStreaming:
    """The Responses request for `given`, the fields that a Chat Completions request set.

    Raises:
        UnusableRequestError: the Responses API has no form for it.
    """
    request = {name: given[name] for name in SAME_NAME if given.get(name) is not None}
    limit = given.get("max_completion_tokens") or given.get("max_tokens")
    if limit is not None:
        request["max_output_tokens"] = limit
    if given.get("reasoning_effort") is not None:
        request["reasoning"] = {"effort": given["reasoning_effort"]}
    if given.get("tools"):
        request["tools"] = [{"type": tool["type"], **tool[tool["type"]]} for tool in given["tools"]]
    if given.get("response_format"):
        request["text"] = {"format": _text_format(given["response_format"])}
    choice = given.get("tool_choice") or "auto"
    if isinstance(choice, Mapping) and isinstance(choice.get(choice.get("type", "")), Mapping):
        choice = {"type": choice["type"], **choice[choice["type"]]}
    try:
        items = items_of_messages(given["messages"], new_id, take_apart)
        return NeMoGymResponseCreateParamsNonStreaming.model_validate(
            {"input": items, "tool_choice": choice, **request}
        )
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise UnusableRequestError(f"as a Responses request it has a flaw in {where}: {problem['msg']}") from error


def _text_format(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """What form an answer is to have; a schema lies at the top level in the Responses API."""
    schema = response_format.get("json_schema")
    return {**schema, "type": "json_schema"} if isinstance(schema, Mapping) else dict(response_format)


def response_of(
    completion: NeMoGymChatCompletion,
    output: list[NeMoGymResponseOutputItem],
    params: NeMoGymResponseCreateParamsNonStreaming,
    *,
    response_id: str,
    model: str,
) -> NeMoGymResponse:
    """The response around `output`: the request's settings echoed, usage and end as the completion tells them."""
    reason = _INCOMPLETE.get(completion.choices[0].finish_reason or "")
    return NeMoGymResponse(
        id=response_id,
        created_at=completion.created,
        model=model,
        object="response",
        output=output,
        status="incomplete" if reason else "completed",
        incomplete_details=NeMoGymIncompleteDetails(reason=reason) if reason else None,
        usage=_usage(completion.usage),
        **{name: getattr(params, name) for name in _ECHOED},
    )


def _message(text: str, refusal: str | None, new_id: NewId) -> NeMoGymResponseOutputMessage:
    content: list[NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal] = []
    if text or not refusal:
        content.append(NeMoGymResponseOutputText(text=text, annotations=[]))
    if refusal:
        content.append(NeMoGymResponseOutputRefusal(refusal=refusal))
    return NeMoGymResponseOutputMessage(id=new_id("msg"), content=content)


def _call(call: Mapping[str, Any], new_id: NewId) -> NeMoGymResponseOutputItem:
    if call.get("type") == "custom":
        custom = call["custom"]
        fields = {"id": new_id("ctc"), "call_id": call["id"], "name": custom["name"], "input": custom["input"]}
        return NeMoGymResponseCustomToolCall.model_validate(fields)
    return NeMoGymResponseFunctionToolCall(
        id=call["id"],
        call_id=call["id"],
        name=call["function"]["name"],
        arguments=call["function"]["arguments"],
        status="completed",
    )


def _with_token_ids(item: NeMoGymResponseOutputItem, message: Mapping[str, Any]) -> NeMoGymResponseOutputItem:
    names = (*TOKEN_FIELDS, *WEIGHT_FIELDS)
    token_fields = {name: message[name] for name in names if message.get(name) is not None}
    trained: Any = training_variant_of(type(item)).model_validate({**dict(item), **token_fields})
    return trained  # type: ignore[no-any-return]


def _usage(usage: NeMoGymCompletionUsage | None) -> NeMoGymResponseUsage | None:
    if usage is None:
        return None
    cached = usage_detail(
        usage, "prompt_tokens_details", "cached_tokens", "cached_input_tokens", "cache_read_input_tokens"
    )
    reasoning = usage_detail(usage, "completion_tokens_details", "reasoning_tokens", "reasoning_output_tokens")
    return NeMoGymResponseUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=cached or 0),
        output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=reasoning or 0),
    )


def usage_detail(usage: Any, group: str, name: str, *top_level_aliases: str) -> int | None:
    """Return the count `name` in a group of a usage, else the first alias that holds a count beside the groups.

    The usage and its groups may be mappings or objects.
    """
    nested = _member(_member(usage, group), name)
    counts = (nested, *(_member(usage, alias) for alias in top_level_aliases))
    return next((count for count in counts if type(count) is int), None)


def _member(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def to_responses_content(content: Any) -> Any:
    """The content of a chat message to the model, or of a tool, in the form of the Responses API."""
    if isinstance(content, str) or content is None:
        return content or ""
    try:
        return [_to_responses_part(part) for part in content]
    except KeyError as error:
        raise UnusableRequestError(f"messages: a part lacks its {error}") from error


def _to_responses_part(part: Part) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part["text"]}
    if kind == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail") or "auto"}
    if kind == "video_url":
        video = part["video_url"]
        return {"type": "input_video", "video_url": video["url"] if set(video) == {"url"} else video}
    if kind == "file":
        return {"type": "input_file", **part["file"]}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise NoResponsesFormError(
        f"A part of type {kind!r} has no form in the Responses API; text, image_url, video_url, file and "
        "input_audio have one"
    )


@dataclass
class ChatDialect:
    """Puts requests into the Chat Completions API and its answers back; see `Dialect`."""

    return_token_id_information: bool = False
    """Send the token ids of earlier turns back with them, for endpoints that continue from exactly those."""
    uses_reasoning_parser: bool = True
    """Read `<think>` blocks in what the model says as reasoning; else they stay in its text."""

    def new_id(self, prefix: str) -> str:
        """An id for an item or a response: `msg_...`, `rs_...`, `resp_...`."""
        return f"{prefix}_{uuid4().hex}"

    def read_reasoning(self, text: str) -> tuple[list[str], str]:
        """Return the reasoning in a text of the model, block by block, and the rest of the text."""
        return taken_apart(text)

    def write_reasoning(self, texts: Iterable[str]) -> str:
        """Return reasoning as it is sent back inside the text of an earlier message."""
        return wrapped(texts)

    def _take_apart(self, text: str) -> tuple[list[str], str]:
        return self.read_reasoning(text) if self.uses_reasoning_parser else ([], text)

    def request_to(self, params: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        """The Chat Completions request that asks the same; of the request only fields that were set count.

        Raises:
            NotImplementedError: it holds something the Chat Completions API has no form for.
            ValueError: it contradicts itself.
        """
        return to_chat_request(
            set_fields(params), with_token_ids=self.return_token_id_information, wrap=self.write_reasoning
        )

    def response_from(
        self, params: NeMoGymResponseCreateParamsNonStreaming, answer: NeMoGymChatCompletion, model: str | None = None
    ) -> NeMoGymResponse:
        """The response to `params` that the first choice of a completion amounts to.

        Its `model` is the one asked for, else the one that answered, unless another is given.
        """
        return response_of(
            answer,
            self.items_of_choice(answer.choices[0]),
            params,
            response_id=self.new_id("resp"),
            model=model or params.model or answer.model,
        )

    def request_from(self, request: Mapping[str, Any]) -> NeMoGymResponseCreateParamsNonStreaming:
        """The Responses request that asks the same as a Chat Completions request."""
        return request_of(request, self.new_id, self._take_apart)

    def items_from(self, messages: Sequence[Mapping[str, Any]]) -> list[NeMoGymResponseOutputItem]:
        """A whole chat, of whatever origin, as items of the Responses API."""
        return items_of_messages(messages, self.new_id, self._take_apart)

    def response_to(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """The completion that says the same as a response, given as JSON."""
        return completion_of_response(response)

    def events_of(self, answer: Mapping[str, Any]) -> Iterator[str]:
        """A completion as the chunks by which it is streamed."""
        return chunks_of(answer)

    def items_of_choice(self, choice: NeMoGymChoice) -> list[NeMoGymResponseOutputItem]:
        """The output items of one choice."""
        return self.items_of_message(choice.message.model_dump(exclude_none=True))

    def items_of_message(self, message: Mapping[str, Any]) -> list[NeMoGymResponseOutputItem]:
        """The output items of one assistant message."""
        return items_of_assistant(message, self.new_id, self._take_apart)


def completion_of_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """The completion that says the same as a response, both as JSON has them; tool items of providers are left out."""
    texts, thoughts, calls, refusals = [], [], [], []
    token_fields: dict[str, Any] = {}
    for item in response.get("output") or ():
        kind, parts = item.get("type", "message"), item.get("content")
        if kind == "message":
            spoken = [{"text": parts}] if isinstance(parts, str) else parts or ()
            texts += [part["text"] for part in spoken if part.get("text")]
            refusals += [part["refusal"] for part in spoken if part.get("refusal")]
        elif kind == "reasoning":
            thoughts += [part["text"] for part in item.get("summary") or parts or ()]
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "custom_tool_call":
            custom = {"name": item["name"], "input": item.get("input") or ""}
            calls.append({"id": item["call_id"], "type": "custom", "custom": custom})
        token_fields |= {name: item[name] for name in TOKEN_FIELDS if item.get(name) is not None}
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    message |= {"refusal": "".join(refusals)} if refusals else {}
    message |= {"tool_calls": calls} if calls else {}
    reason = _FINISHED.get((response.get("incomplete_details") or {}).get("reason"), "tool_calls" if calls else "stop")
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(response.get("created_at") or time()),
        "model": response.get("model") or "",
        "choices": [{"index": 0, "finish_reason": reason, "message": {**message, **token_fields}, "logprobs": None}],
        "usage": _chat_usage(response.get("usage")),
    }


def _chat_usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    read, written = usage.get("input_tokens") or 0, usage.get("output_tokens") or 0
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": usage.get("total_tokens") or read + written,
        "prompt_tokens_details": {"cached_tokens": (usage.get("input_tokens_details") or {}).get("cached_tokens")},
        "completion_tokens_details": {
            "reasoning_tokens": (usage.get("output_tokens_details") or {}).get("reasoning_tokens")
        },
    }


def sanitize_streaming_chat_body(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A chat request that asks for a stream as one that does not, and whether it wants the usage told."""
    known = NeMoGymChatCompletionCreateParamsNonStreaming.model_fields
    clean = {name: value for name, value in body.items() if name in known and name not in _STREAMS_ALONE}
    options = body.get("stream_options")
    return clean, bool(isinstance(options, dict) and options.get("include_usage"))


def chunks_of(completion: Mapping[str, Any], *, include_usage: bool = False) -> Iterator[str]:
    """A completion as the chunks of a stream, each choice in a few, and `[DONE]`; token ids are not streamed."""
    head: dict[str, Any] = {name: completion.get(name) for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    if completion.get("system_fingerprint"):
        head["system_fingerprint"] = completion["system_fingerprint"]
    for choice in completion.get("choices") or ():
        index = choice.get("index", 0)
        for delta in _deltas(choice.get("message") or {}):
            yield sse({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        end = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
        yield sse({**head, "choices": [end]})
    if include_usage and completion.get("usage") is not None:
        yield sse({**head, "choices": [], "usage": completion["usage"]})
    yield "data: [DONE]\n\n"


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": message.get("role") or "assistant"}
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if thoughts:
        yield {"reasoning_content": thoughts}
    for name in ("content", "refusal"):
        if message.get(name):
            yield {name: message[name]}
    calls = message.get("tool_calls")
    if calls:
        kept = ("id", "type", "function", "custom")
        named = [{name: call[name] for name in kept if call.get(name) is not None} for call in calls]
        yield {"tool_calls": [{"index": index, **call} for index, call in enumerate(named)]}


def is_too_long(error: aiohttp.ClientResponseError) -> bool:
    """Whether an endpoint refused a request because prompt and answer exceed what the model can hold.

    An endpoint that merely does not know a parameter (`max_tokens` at some providers) refuses every
    request; taking that for a long conversation would turn a wrong setting into empty answers.
    """
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return True
    if error.status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return False
    content = getattr(error, "response_content", b"")
    said = readable(content if isinstance(content, bytes) else str(content))
    return bool(_TOO_LONG.search(said)) and not _WRONG_PARAMETER.search(said)


def too_long_response(params: NeMoGymResponseCreateParamsNonStreaming, model: str) -> NeMoGymResponse:
    """The answer to a conversation that no longer fits: incomplete, without a word."""
    completion = empty_completion(model, "length", int(time()))
    return response_of(completion, [], params, response_id=f"resp_{uuid4().hex}", model=model)


def empty_completion(model: str, finish_reason: str, created: int) -> NeMoGymChatCompletion:
    """A completion in which the model says nothing, and why."""
    return NeMoGymChatCompletion(
        id="chtcmpl-123",
        created=created,
        model=model,
        choices=[
            NeMoGymChoice(
                index=0,
                finish_reason=finish_reason,
                message=NeMoGymChatCompletionMessage(content=None, tool_calls=None),
            )
        ],
    )


def with_reasoning_in_text(
    answer: dict[str, Any], settings: EndpointSettings, *, splits_reasoning: bool
) -> dict[str, Any]:
    """`answer` with the reasoning of its first choice, if any, in a think block before the text.

    Raises:
        RuntimeError: it holds no message.
        AssertionError: there is reasoning in a field although the endpoint is said not to split it off.
    """
    choices = answer.get("choices") or ()
    if not choices or not isinstance(choices[0].get("message"), dict):
        raise RuntimeError(
            f"The model endpoint {settings.base_url} answered without a message; check {settings.base_url_key}"
        )
    message = fields_as_tags(
        choices[0]["message"],
        splits_reasoning=splits_reasoning,
        setting=f"uses_reasoning_parser of {settings.server_name}",
    )
    return {**answer, "choices": [{**choices[0], "message": message}, *choices[1:]]}
