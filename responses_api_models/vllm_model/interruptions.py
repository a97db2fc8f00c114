"""Answers that a trainer interrupts to change the weights: what was generated is kept, and gone on from.

The trainer has the server pause. Nothing is asked of the endpoints from then on; what they are generating they end,
if they are told how (`abort_path`, or by the trainer itself), with the finish reason `abort` and the tokens so far.
When the server goes on, those tokens follow the prompt in a request to `/completions`, which takes token ids: no text
is tokenized anew. What did not end is cancelled, and the same is asked again, as is what cannot be gone on from: an
answer to a request with tools, whose calls the endpoint has to find in the whole of it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nemo_gym.base_responses_api_model import GenerationGate, GenerationInterrupted
from nemo_gym.openai_utils import REQUIRED_TOKEN_FIELDS
from responses_api_models.vllm_model.completions import PlainCompletions

logger = logging.getLogger(__name__)

ABORTED = "abort"
_MOST_EMPTY_HANDED = 8
_OPEN, _CLOSE = "<think>", "</think>"
_LIMITS = ("max_completion_tokens", "max_tokens")
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a request, and returns the answer with token ids on its message."""


@dataclass
class _Kept:
    """What was generated before interruptions."""

    message: dict[str, Any] | None = None
    segments: list[list[Any]] = field(default_factory=list)
    """`[version, tokens]` of each part."""
    start: int | None = None
    """The version that the first token kept was generated with."""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


async def whole_answer(gate: GenerationGate, outgoing: dict[str, Any], ask: Ask, go_on: Ask) -> dict[str, Any]:
    """The answer to a chat request, however often it is interrupted, with the versions of the weights on its message.

    `ask` sends chats, `go_on` requests for `/completions`.
    """
    kept, empty_handed, began = _Kept(), 0, gate.version

    async def generate() -> dict[str, Any]:
        nonlocal began
        began = gate.version
        return await (ask(outgoing) if kept.message is None else go_on(_continuation(outgoing, kept)))

    while True:
        try:
            answer = await gate.run(generate)
        except GenerationInterrupted:
            continue
        answer = _stamped(_joined(kept, answer), kept, began, gate.version, _version_told(answer))
        choice = answer["choices"][0]
        if choice["finish_reason"] != ABORTED:
            return answer
        if _is_used_up(outgoing, choice["message"]):
            return {**answer, "choices": [{**choice, "finish_reason": "length"}]}
        before = kept.tokens
        _keep(kept, choice["message"], outgoing)
        empty_handed = 0 if gate.is_shut or kept.tokens > before else empty_handed + 1
        await pause_or_give_up(empty_handed)


def said_nothing(answer: dict[str, Any]) -> bool:
    """Whether an answer was aborted before its first token; there may be no log-probs in it then."""
    choice = answer["choices"][0]
    return choice.get("finish_reason") == ABORTED and not (choice.get("logprobs") or {}).get("content")


def with_no_tokens(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer that said nothing, in the shape of one that said something."""
    choice = answer["choices"][0]
    message = {**choice["message"], **{name: [] for name in REQUIRED_TOKEN_FIELDS}}
    return {**answer, "choices": [{**choice, "message": message}]}


async def pause_or_give_up(empty_handed: int) -> None:
    """Wait before an answer that was aborted, although nobody paused, is asked for again.

    Raises:
        RuntimeError: that happens again and again, and nothing is gained by it.
    """
    if empty_handed > _MOST_EMPTY_HANDED:
        raise RuntimeError(
            f"The endpoint aborted the same answer {empty_handed} times although no pause was asked for; pause this "
            "server before the endpoint is stopped"
        )
    if empty_handed:
        await asyncio.sleep(min(1.0, 0.05 * 2**empty_handed))


def _keep(kept: _Kept, message: dict[str, Any], outgoing: dict[str, Any]) -> None:
    if outgoing.get("tools"):
        _warn_once("answers to requests with tools are generated anew when interrupted: calls are found in whole ones")
        return
    if message["generation_token_ids"]:
        kept.message, kept.start = message, (message.get("weight_versions") or [None])[0]
        kept.segments = message.get("weight_segments") or [[kept.start, len(message["generation_token_ids"])]]


def _continuation(outgoing: dict[str, Any], kept: _Kept) -> dict[str, Any]:
    assert kept.message is not None
    prompt = [*kept.message["prompt_token_ids"], *kept.message["generation_token_ids"]]
    request = PlainCompletions(lambda _: prompt, adds_special_tokens=False).request(outgoing)  # type: ignore[arg-type, return-value]
    limit = _limit(outgoing)
    return request if limit is None else {**request, "max_tokens": limit - kept.tokens}


def _joined(kept: _Kept, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with what was kept before it."""
    if kept.message is None:
        return answer
    before, choice = kept.message, answer["choices"][0]
    message = choice["message"]
    asked = [*before["prompt_token_ids"], *before["generation_token_ids"]]
    if said_nothing(answer):
        message = {**message, "prompt_token_ids": asked}
    if message["prompt_token_ids"] != asked:
        raise RuntimeError(
            f"The endpoint went on from other tokens than the {len(asked)} it was given: it has to take token ids as "
            "`prompt` of /completions as they are"
        )
    ids, log_probs = REQUIRED_TOKEN_FIELDS[1:]
    whole = {
        **message,
        "content": _text(before["content"] or "", message["content"] or "", choice["finish_reason"]),
        "prompt_token_ids": before["prompt_token_ids"],
        ids: [*before[ids], *message[ids]],
        log_probs: [*before[log_probs], *message[log_probs]],
    }
    usage = answer.get("usage")
    if usage:
        counts = {"prompt_tokens": len(before["prompt_token_ids"]), "completion_tokens": len(whole[ids])}
        usage = {**usage, **counts, "total_tokens": sum(counts.values())}
    return {**answer, "usage": usage, "choices": [{**choice, "message": whole}]}


def _text(before: str, after: str, finish_reason: str | None) -> str:
    """The text of both; thoughts that were cut off in the middle go on, and end where the policy ends them."""
    if not before.startswith(_OPEN) or not before.endswith(_CLOSE):
        return before + after
    thoughts = before.removesuffix(_CLOSE)
    if _CLOSE in after:
        return thoughts + after
    return before + after if finish_reason == "stop" else f"{thoughts}{after}{_CLOSE}"


def _stamped(
    answer: dict[str, Any], kept: _Kept, began: int | None, ended: int | None, told: int | None
) -> dict[str, Any]:
    """An answer with the versions of the weights on its message, as far as they are known."""
    began, ended = (began, ended) if told is None else (told, told)
    choice = answer["choices"][0]
    message = choice["message"]
    versions = [began if kept.message is None else kept.start, ended]
    if None in versions:
        return answer
    fields: dict[str, Any] = {"weight_versions": versions}
    if kept.message is not None:
        fields["weight_segments"] = [*kept.segments, [began, len(message["generation_token_ids"]) - kept.tokens]]
    return {**answer, "choices": [{**choice, "message": {**message, **fields}}]}


def _version_told(answer: dict[str, Any]) -> int | None:
    """The version of its weights that an endpoint tells with its answer, as SGLang does."""
    metadata = answer.get("metadata")
    told = answer.get("weight_version", metadata.get("weight_version") if isinstance(metadata, dict) else None)
    try:
        return None if told is None or isinstance(told, bool) else int(told)
    except (TypeError, ValueError):
        return None


def _limit(outgoing: dict[str, Any]) -> int | None:
    return next((outgoing[name] for name in _LIMITS if outgoing.get(name) is not None), None)


def _is_used_up(outgoing: dict[str, Any], message: dict[str, Any]) -> bool:
    limit = _limit(outgoing)
    return limit is not None and len(message["generation_token_ids"]) >= limit


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
