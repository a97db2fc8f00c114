"""What a model said in a chat completion, as items and as a response of the Responses API."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymCompletionUsage,
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymHostedToolItem,
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseUsage,
    NeMoGymSummary,
    training_variant_of,
)
from nemo_gym.responses_chat import think_tags
from nemo_gym.responses_chat.parts import plain_text, to_responses_content
from nemo_gym.schemas.token_ids import TOKEN_FIELDS, carries_token_ids

NewId: TypeAlias = Callable[[str], str]
"""Makes an id with the given prefix."""

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


def items_of_assistant(
    message: Mapping[str, Any], new_id: NewId, *, reads_think_tags: bool
) -> list[NeMoGymResponseOutputItem]:
    """The items of one assistant message: reasoning, text, tool calls. There is always at least one.

    Token ids on the message go to the last item.
    """
    text = plain_text(message.get("content"), "a message of the assistant")
    spoken = [field for name in ("reasoning_content", "reasoning") if isinstance(field := message.get(name), str)]
    blocks = [block for block in spoken[:1] if block]
    if reads_think_tags:
        found, text = think_tags.taken_apart(text)
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
    messages: Sequence[Mapping[str, Any]], new_id: NewId, *, reads_think_tags: bool
) -> list[NeMoGymResponseOutputItem]:
    """A whole chat as items."""
    items: list[NeMoGymResponseOutputItem] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "assistant":
            items += items_of_assistant(message, new_id, reads_think_tags=reads_think_tags)
        elif role == "tool":
            items.append(
                NeMoGymFunctionCallOutput(call_id=message["tool_call_id"], output=to_responses_content(content))
            )
        else:
            items.append(NeMoGymEasyInputMessage(role=role, content=to_responses_content(content), type="message"))
    return items


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
        return NeMoGymHostedToolItem.model_validate({"type": "custom_tool_call", **fields})
    return NeMoGymResponseFunctionToolCall(
        id=call["id"],
        call_id=call["id"],
        name=call["function"]["name"],
        arguments=call["function"]["arguments"],
        status="completed",
    )


def _with_token_ids(item: NeMoGymResponseOutputItem, message: Mapping[str, Any]) -> NeMoGymResponseOutputItem:
    token_fields = {name: message[name] for name in TOKEN_FIELDS if message.get(name) is not None}
    trained: Any = training_variant_of(type(item)).model_validate({**dict(item), **token_fields})
    return trained  # type: ignore[no-any-return]


def _usage(usage: NeMoGymCompletionUsage | None) -> NeMoGymResponseUsage | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
    reasoning = usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
    return NeMoGymResponseUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_tokens_details=None if cached is None else NeMoGymResponseInputTokensDetails(cached_tokens=cached),
        output_tokens_details=(
            None if reasoning is None else NeMoGymResponseOutputTokensDetails(reasoning_tokens=reasoning)
        ),
    )
