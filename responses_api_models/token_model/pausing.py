"""One whole answer of an engine, however often a trainer changes the weights while it is generated.

A generation that a pause stops ends with the reason `abort` and the tokens it has. Once the gate is open again it goes
on from them. Thoughts and tool calls are read when the answer is whole, so it does not matter where it was cut.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from nemo_gym.base_responses_api_model import GenerationGate, GenerationInterrupted
from responses_api_models.token_model.engines import ABORTED, Generation
from responses_api_models.vllm_model.interruptions import pause_or_give_up

Ask = Callable[[list[int], int | None], Awaitable[Generation]]
"""(prompt, most tokens) -> what the engine says to it."""
Part = tuple[Any, Any, int]
"""The versions of the weights at the beginning and at the end of a part, and its tokens."""


async def whole_generation(
    gate: GenerationGate, ask: Ask, prompt: list[int], limit: int | None
) -> tuple[Generation, dict[str, Any]]:
    """What is said to a prompt, at most `limit` tokens, and the fields that tell of the weights that said it.

    Raises:
        RuntimeError: the engine aborts again and again although nobody paused.
    """
    whole, parts, empty_handed, began = Generation([], [], ABORTED), list[Part](), 0, gate.version

    async def generate() -> Generation:
        nonlocal began
        began = gate.version
        left = None if limit is None else limit - len(whole.token_ids)
        return await ask([*prompt, *whole.token_ids], left)

    while True:
        try:
            said = await gate.run(generate)
        except GenerationInterrupted:
            continue
        if said.token_ids or not parts:
            versions = (began, gate.version) if said.weight_version is None else (said.weight_version,) * 2
            parts.append((*versions, len(said.token_ids)))
        ids, log_probs = [*whole.token_ids, *said.token_ids], [*whole.log_probs, *said.log_probs]
        cached = said.cached_tokens if not whole.token_ids else whole.cached_tokens
        whole = replace(said, token_ids=ids, log_probs=log_probs, cached_tokens=cached)
        if whole.finish_reason != ABORTED:
            return whole, weights_of(parts)
        if limit is not None and len(ids) >= limit:
            return replace(whole, finish_reason="length"), weights_of(parts)
        empty_handed = 0 if gate.is_shut or said.token_ids else empty_handed + 1
        await pause_or_give_up(empty_handed)


def weights_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a message whose parts were said by these weights; none where nothing is known of them."""
    parts = [part for part in parts if part[2]] or parts[:1]
    told = [(_number(began), _number(ended), tokens) for began, ended, tokens in parts]
    if any(began is None or ended is None for began, ended, _ in told):
        last = parts[-1][1]
        return {} if last is None or isinstance(last, bool) else {"weight_version": str(last)}
    fields: dict[str, Any] = {"weight_versions": [told[0][0], told[-1][1]]}
    if len(told) > 1:
        fields["weight_segments"] = [[began, tokens] for began, _, tokens in told]
    return fields


def _number(version: Any) -> int | None:
    """A version as a number; None where it is not told, or no number."""
    if version is None or isinstance(version, bool):
        return None
    try:
        return int(version)
    except (TypeError, ValueError):
        return None
