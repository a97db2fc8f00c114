"""An answer of the model as a response of the Responses API."""

from typing import Any

from nemo_gym.openai_utils import (
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputText,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseUsage,
    NeMoGymSummary,
    training_variant_of,
)
from responses_api_models.scripted_model.brain import Answer
from responses_api_models.scripted_model.conversation import Called, ModelEntry, Thought
from responses_api_models.scripted_model.script import Usage
from responses_api_models.scripted_model.tokens import generated_tokens, prompt_token_ids

CREATED_AT = 1_700_000_000
"""The time in every answer: equal requests get equal answers, to the last byte."""
LOG_PROBS_OF_TEXT = "message.output_text.logprobs"
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
    "user",
)


def response_of(
    answer: Answer,
    body: NeMoGymResponseCreateParamsNonStreaming,
    *,
    model: str,
    usage: Usage,
    with_token_ids: bool,
) -> NeMoGymResponse:
    """`answer`, with the request's settings echoed as the API does."""
    output = [_item(entry, answer, number) for number, entry in enumerate(answer.entries)]
    if LOG_PROBS_OF_TEXT in (body.include or ()):
        _add_log_probs(output, answer)
    if with_token_ids and output:
        output[-1] = _with_token_ids(output[-1], answer)
    status = "completed" if answer.incomplete is None else "incomplete"
    return NeMoGymResponse(
        id=answer.draws.identifier("resp", ""),
        created_at=CREATED_AT,
        model=model,
        output=output,
        status=status,
        incomplete_details=NeMoGymIncompleteDetails(reason=answer.incomplete) if answer.incomplete else None,
        usage=_usage(answer, usage),
        **{name: getattr(body, name) for name in _ECHOED},
    )


def _item(entry: ModelEntry, answer: Answer, number: int) -> NeMoGymResponseOutputItem:
    draws = answer.draws
    if isinstance(entry, Thought):
        return NeMoGymResponseReasoningItem(
            id=draws.identifier("rs", str(number)), summary=[NeMoGymSummary(text=entry.text)]
        )
    is_last = number == len(answer.entries) - 1
    status: Any = "incomplete" if is_last and answer.is_cut else "completed"
    if isinstance(entry, Called):
        return NeMoGymResponseFunctionToolCall(
            id=draws.identifier("fc", str(number)),
            call_id=entry.call_id,
            name=entry.name,
            arguments=entry.arguments,
            status=status,
        )
    return NeMoGymResponseOutputMessage(
        id=draws.identifier("msg", str(number)), content=[NeMoGymResponseOutputText(text=entry.text)], status=status
    )


def _add_log_probs(output: list[NeMoGymResponseOutputItem], answer: Answer) -> None:
    for item, entry in zip(output, answer.entries, strict=True):
        if isinstance(item, NeMoGymResponseOutputMessage):
            tokens = generated_tokens([entry], is_cut=False, draws=answer.draws)[1:-1]
            shown = [{"token": token.text, "logprob": token.log_prob, "top_logprobs": []} for token in tokens]
            item.content = [NeMoGymResponseOutputText(text=entry.text, logprobs=shown)]  # type: ignore[union-attr]


def _with_token_ids(item: NeMoGymResponseOutputItem, answer: Answer) -> NeMoGymResponseOutputItem:
    tokens = generated_tokens(answer.entries, is_cut=answer.is_cut, draws=answer.draws)
    trained: Any = training_variant_of(type(item)).model_validate(
        {
            **item.model_dump(exclude_unset=True),
            "prompt_token_ids": prompt_token_ids(answer.conversation),
            "generation_token_ids": [token.id for token in tokens],
            "generation_log_probs": [token.log_prob for token in tokens],
        }
    )
    return trained  # type: ignore[no-any-return]


def _usage(answer: Answer, usage: Usage) -> NeMoGymResponseUsage | None:
    if not usage.report:
        return None
    counts = answer.counts
    told = int(usage.details)
    return NeMoGymResponseUsage(
        input_tokens=counts.prompt,
        output_tokens=counts.generation,
        total_tokens=counts.prompt + counts.generation,
        input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=told * counts.cached),
        output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=told * counts.reasoning),
    )
