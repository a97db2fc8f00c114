"""An answer of the model as a completion of the Chat Completions API, with the extensions vLLM has."""

from typing import Any

from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionMessage,
    NeMoGymChatCompletionMessageForTraining,
    NeMoGymChoice,
    NeMoGymCompletionUsage,
)
from responses_api_models.scripted_model.brain import Answer
from responses_api_models.scripted_model.conversation import Called, Said, Thought
from responses_api_models.scripted_model.responses_format import CREATED_AT
from responses_api_models.scripted_model.script import Usage
from responses_api_models.scripted_model.tokens import Token, generated_tokens, prompt_token_ids


def completion_of(
    answer: Answer,
    body: NeMoGymChatCompletionCreateParamsNonStreaming,
    vendor_fields: dict[str, Any],
    *,
    model: str,
    usage: Usage,
    with_token_ids: bool,
    splits_reasoning: bool,
) -> NeMoGymChatCompletion:
    """`answer` as a completion with one choice.

    `vendor_fields` are those of the request that only vLLM knows: `return_token_ids` adds the ids of prompt
    and answer, `return_tokens_as_token_ids` spells the tokens of log-probs as `token_id:<n>`.
    """
    message = _message(answer, splits_reasoning=splits_reasoning)
    choice: dict[str, Any] = {"index": 0, "finish_reason": _finish_reason(answer)}
    completion: dict[str, Any] = {}
    if with_token_ids or body.logprobs or vendor_fields.get("return_token_ids"):
        tokens = generated_tokens(answer.entries, is_cut=answer.is_cut, draws=answer.draws)
        prompt_ids = prompt_token_ids(answer.conversation)
        if with_token_ids:
            message |= _token_fields(prompt_ids, tokens)
        if body.logprobs:
            as_ids = bool(vendor_fields.get("return_tokens_as_token_ids"))
            choice["logprobs"] = {"content": [_log_prob(token, as_ids=as_ids) for token in tokens]}
        if vendor_fields.get("return_token_ids"):
            choice["token_ids"] = [token.id for token in tokens]
            completion["prompt_token_ids"] = prompt_ids
    message_type = NeMoGymChatCompletionMessageForTraining if with_token_ids else NeMoGymChatCompletionMessage
    choice["message"] = message_type.model_validate(message)
    return NeMoGymChatCompletion(
        id=answer.draws.identifier("chatcmpl", ""),
        choices=[NeMoGymChoice(**choice)],
        created=CREATED_AT,
        model=model,
        usage=_usage(answer, usage),
        **completion,
    )


def _message(answer: Answer, *, splits_reasoning: bool) -> dict[str, Any]:
    thoughts = [entry.text for entry in answer.entries if isinstance(entry, Thought)]
    text = "".join(entry.text for entry in answer.entries if isinstance(entry, Said))
    calls = [entry for entry in answer.entries if isinstance(entry, Called)]
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if thoughts and splits_reasoning:
        message["reasoning_content"] = "\n".join(thoughts)
    elif thoughts:
        message["content"] = "".join(f"<think>{thought}</think>" for thought in thoughts) + text
    if calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _token_fields(prompt_ids: list[int], tokens: list[Token]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt_ids,
        "generation_token_ids": [token.id for token in tokens],
        "generation_log_probs": [token.log_prob for token in tokens],
    }


def _log_prob(token: Token, *, as_ids: bool) -> dict[str, Any]:
    shown = f"token_id:{token.id}" if as_ids else token.text
    return {"token": shown, "logprob": token.log_prob, "bytes": list(token.text.encode()), "top_logprobs": []}


def _finish_reason(answer: Answer) -> str:
    if answer.incomplete is not None:
        return "length" if answer.is_cut else answer.incomplete
    return "tool_calls" if any(isinstance(entry, Called) for entry in answer.entries) else "stop"


def _usage(answer: Answer, usage: Usage) -> NeMoGymCompletionUsage | None:
    if not usage.report:
        return None
    counts = answer.counts
    details: dict[str, Any] = {}
    if usage.details:
        details["prompt_tokens_details"] = {"cached_tokens": counts.cached}
        details["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning}
    return NeMoGymCompletionUsage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.generation,
        total_tokens=counts.prompt + counts.generation,
        **details,
    )
