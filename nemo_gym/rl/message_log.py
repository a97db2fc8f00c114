"""Message logs of exactly the tokens the policy saw and sampled: from an agent's answer, or what a generator returned.

Each output item with token ids tells the whole prompt of its turn and what was generated. The prompt must begin
with every token seen so far; what it adds becomes a `user` message, the generation an `assistant` message.

When they do not fit, the turn begins another sample of the same rollout, or is an error, as asked for. The error says
why, so that the cause can be found by reading: tokens drift when the text of
earlier turns is tokenized anew instead of being kept: the same text in other tokens, or a chat template that
changes what was said (drops thoughts, trims spaces, reorders arguments).

What a generator returned is checked, and put together when it was interrupted. Training on a guess is worse than not
training: lengths that contradict each other, a prompt that came back changed, and log-probs that no sampled token can
have are errors.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.rl.failures import (
    IncompleteTokenDataError,
    NoGenerationDataError,
    NonContiguousTokensError,
    RolloutDataFailure,
)
from nemo_gym.rl.interfaces import (
    GenerationOutputSpec,
    Message,
    MessageLog,
    Tokenizer,
    as_list,
    logprob_tensor,
    loss_mask_of,
    part_of,
    require_torch,
    with_tensors,
)
from nemo_gym.rl.samples import Samples
from nemo_gym.schemas.wire import WEIGHT_FIELDS

_SHOWN_BEFORE = 4
_SHOWN_AFTER = 6
PROMPT_IDS = "prompt_token_ids"
GENERATION_IDS = "generation_token_ids"
GENERATION_LOG_PROBS = "generation_log_probs"
DEFAULT_INVALID_TOOL_CALL_PATTERNS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
"""Marks that a tool-call parser should have consumed."""
DEFAULT_THINKING_TAGS = ("<think>", "</think>")


def describe_drift(turn: int, message_log: MessageLog, seen: list[int], prompt: list[int], tokenizer: Any) -> str:
    """The first difference between the tokens seen so far and the prompt of `turn`, with its surroundings."""
    place = next(
        (index for index, (old, new) in enumerate(zip(seen, prompt, strict=False)) if old != new),
        min(len(seen), len(prompt)),
    )
    return "\n".join(
        [
            f"Non-contiguous messages found: the prompt of turn {turn} ({len(prompt)} tokens) does not begin with the "
            f"{len(seen)} tokens of the turns before it.",
            f"The first difference is at token {place}, {_whereabouts(place, message_log)}:",
            f"  seen so far: {_excerpt(seen, place, tokenizer)}",
            f"  this prompt: {_excerpt(prompt, place, tokenizer)}",
            _verdict(seen, prompt, place, tokenizer),
        ]
    )


def _whereabouts(place: int, message_log: MessageLog) -> str:
    """Which earlier message a token belongs to."""
    start = 0
    for number, message in enumerate(message_log):
        end = start + len(message["token_ids"])
        if place < end:
            what = "generated in" if message["role"] == "assistant" else "given to"
            return f"{what} turn {number // 2 + 1}"
        start = end
    return "after everything seen so far"


def _excerpt(ids: list[int], place: int, tokenizer: Any) -> str:
    """The tokens around `place`, each with its text, a mark before the one that differs."""
    start, end = max(0, place - _SHOWN_BEFORE), place + _SHOWN_AFTER
    before = " ".join(_shown(token, tokenizer) for token in ids[start:place])
    after = " ".join(_shown(token, tokenizer) for token in ids[place:end]) or "(ends here)"
    left, right = "… " if start else "", " …" if end < len(ids) else ""
    return f"{left}{before} >>> {after}{right}"


def _shown(token: int, tokenizer: Any) -> str:
    text = _decoded([token], tokenizer)
    return str(token) if text is None else f"{token}:{text!r}"


def _verdict(seen: list[int], prompt: list[int], place: int, tokenizer: Any) -> str:
    if len(prompt) < len(seen) and place == len(prompt):
        return "The prompt ends too early: something dropped earlier messages before this turn."
    old, new = _decoded(seen[place:], tokenizer), _decoded(prompt[place:], tokenizer)
    if old is not None and new is not None and new.startswith(old):
        return (
            "The text is the same in other tokens: it was tokenized anew. Let the model server keep the token ids of "
            "earlier turns, or use one whose prompts are built from tokens."
        )
    return (
        "The text differs too: the chat template (or the agent) changes what was said before. Common causes are "
        "dropped thoughts, trimmed spaces and rewritten tool-call arguments."
    )


def _decoded(ids: list[int], tokenizer: Any) -> str | None:
    """The text of tokens; None when the tokenizer cannot tell."""
    try:
        return str(tokenizer.batch_decode([as_list(ids)])[0])
    except Exception:  # noqa: BLE001 - this text only helps to explain another error
        return None


def build_message_log(
    result: dict[str, Any],
    tokenizer: Any,
    invalid_tool_call_patterns: Sequence[str] | None = None,
    thinking_tags: Sequence[str] | None = None,
    *,
    branches: bool = True,
    explains: bool = True,
) -> dict[str, Any]:
    """`message_log`, `input_message_log` (its first message) and `full_result`, which has texts in place of tokens.

    Where the conversation was rewritten there are also `branches`, the message logs of the other samples, and `drift`,
    which says what happened first, unless nobody `explains` it: that costs a look at all tokens.

    Token ids and log-probs are tensors where torch is installed. `result` is an agent's answer to `/run`. Its items
    lose their token ids and log-probs and gain `prompt_str` and `generation_str`.

    Raises:
        NonContiguousTokensError: a prompt does not begin with the tokens before it, and no `branches` are wanted.
        NoGenerationDataError: no item has token ids.
    """
    assert isinstance(result, dict), f"an agent answered /run with {type(result).__name__}, not with an object"
    output = result["response"]["output"]
    items = [item for item in output if item.get(GENERATION_IDS)]
    if not items:
        raise NoGenerationDataError(_no_generation(result, output, tokenizer))
    patterns = invalid_tool_call_patterns or DEFAULT_INVALID_TOOL_CALL_PATTERNS
    tags = thinking_tags or DEFAULT_THINKING_TAGS
    samples = Samples()
    turns: list[tuple[list[int], list[int]]] = []
    drift = ""
    for turn, item in enumerate(items, 1):
        prompt, generation, log_probs = _take_tokens(item)
        if not (drift or (branches and not explains)) and not samples.goes_on(prompt):
            drift = describe_drift(turn, samples.logs[-1], samples.seen_last(), prompt, tokenizer)
            if not branches:
                raise NonContiguousTokensError(drift)
        flags = flags_of(item, patterns, tags)
        samples.add(prompt, _generated(generation, log_probs, {**flags, **_weights(item)}))
        turns.append((prompt, generation))
    _add_texts(items, turns, tokenizer)
    message_log, *others = [with_tensors(log) for log in samples.logs]
    built = {"message_log": message_log, "input_message_log": message_log[:1], "full_result": result}
    return {**built, "branches": others, "drift": drift} if others else built


def flags_of(item: Mapping[str, Any], patterns: Sequence[str], tags: Sequence[str]) -> dict[str, bool]:
    """Whether an item shows marks of a tool call that was not understood, or thinking tags where none belong."""
    text = _first_text(item.get("content"))
    if text is not None:
        malformed = any(tag in text for tag in tags)
    else:
        text = _first_text(item.get("summary")) if item.get("type") == "reasoning" else None
        malformed = text is not None and any(text.count(tag) > 1 for tag in tags)
    invalid = text is not None and any(pattern in text for pattern in patterns)
    return {"is_invalid_tool_call": invalid, "has_malformed_thinking": malformed}


def _take_tokens(item: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Take the token data out of an item, so that what is logged of the result stays small."""
    missing = [key for key in (PROMPT_IDS, GENERATION_LOG_PROBS) if key not in item]
    if missing:
        raise IncompleteTokenDataError(f"an item of type {item.get('type')!r} has {GENERATION_IDS} but no {missing}")
    generation, prompt, log_probs = item.pop(GENERATION_IDS), item.pop(PROMPT_IDS), item.pop(GENERATION_LOG_PROBS)
    if len(generation) != len(log_probs):
        counts = f"{len(generation)} generated tokens and {len(log_probs)} log-probs"
        raise IncompleteTokenDataError(f"an item of type {item.get('type')!r} has {counts}")
    # JSON knows no NaN: some servers write null instead.
    return prompt, generation, [math.nan if value is None else value for value in log_probs]


def _weights(item: dict[str, Any]) -> dict[str, Any]:
    """Which weights generated the item, as far as the model server told."""
    return {key: item[key] for key in WEIGHT_FIELDS if item.get(key) is not None}


def _generated(token_ids: list[int], log_probs: list[float], flags: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "token_ids": token_ids, "generation_logprobs": log_probs, **flags}


def _add_texts(items: list[dict[str, Any]], turns: list[tuple[list[int], list[int]]], tokenizer: Any) -> None:
    prompts, generations = [prompt for prompt, _ in turns], [generation for _, generation in turns]
    texts = zip(tokenizer.batch_decode(prompts), tokenizer.batch_decode(generations), strict=True)
    for item, (prompt_text, generation_text) in zip(items, texts, strict=True):
        item["prompt_str"] = prompt_text
        item["generation_str"] = generation_text


def _first_text(parts: Any) -> str | None:
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], dict):
        return None
    text = parts[0].get("text")
    return text if isinstance(text, str) else None


def _no_generation(result: dict[str, Any], output: list[dict[str, Any]], tokenizer: Any) -> str:
    asked = result.get("responses_create_params", {}).get("input")
    try:
        ids = tokenizer.apply_chat_template(asked, tokenize=True)
        # transformers answers with a mapping since version 5, and with the ids alone before that
        length = f"{len(ids['input_ids'] if isinstance(ids, Mapping) else ids)} tokens"
    except Exception as error:  # noqa: BLE001 - the length is only part of a message about something else
        length = f"of unknown length ({type(error).__name__}: {error})"
    kinds = ", ".join(str(item.get("type")) for item in output) or "none"
    return (
        f"the result has no generation data: none of its output items ({kinds}) carries token ids. Its prompt is "
        f"{length}. Either the prompt leaves the model no room to answer: drop or shorten it; or the model server "
        "returns no token ids: set return_token_id_information to true in its config"
    )


logger = logging.getLogger(__name__)

_MOST_LOG_PROB = 1e-4
"""What rounding may make of the logarithm of 1."""


class UnsoundOutputError(RolloutDataFailure):
    """What a generator returned cannot be what the policy generated; says what it is."""


def leader_worker(value: Any) -> int | None:
    """The worker that generated a row, given per row as an int or as a list of one; anything else is no worker."""
    if value is None:
        return None
    rows = value.tolist() if hasattr(value, "tolist") else value
    worker = rows[0] if isinstance(rows, list) and rows else rows
    if isinstance(worker, list) and len(worker) == 1:
        worker = worker[0]
    if type(worker) is int:
        return worker
    logger.warning("gen_leader_worker_idx is %r, neither numbers nor lists of one; its tokens are not counted", value)
    return None


def joined(parts: list[Message], tokenizer: Tokenizer, mask_older: bool) -> Message:
    """One message of what was said before and after interruptions.

    `weight_segments` says how many of its tokens each version of the weights has generated. With `mask_older`,
    `token_loss_mask` is 1 only for those of the last version.
    """
    torch = require_torch("the native rollout path")
    token_ids = torch.cat([part["token_ids"] for part in parts])
    message: Message = {
        "role": "assistant",
        "content": tokenizer.decode(token_ids, skip_special_tokens=True),
        "token_ids": token_ids,
        "weight_versions": [parts[0]["weight_versions"][0], parts[-1]["weight_versions"][1]],
        "weight_segments": [[part["weight_versions"][0], len(part["token_ids"])] for part in parts],
    }
    if all("generation_logprobs" in part for part in parts):
        message["generation_logprobs"] = torch.cat([part["generation_logprobs"] for part in parts])
    if mask_older:
        message["token_loss_mask"] = loss_mask_of(message["weight_segments"])
    return message


def is_sound(output: GenerationOutputSpec | None, input_ids: Any) -> bool:
    """Whether what a generator had told when it was stopped can be gone on from; only its last output has to be."""
    if output is None:
        return False
    try:
        generated = generated_part(output, input_ids)
        if "logprobs" in output:
            require_sound_log_probs(logprob_tensor(part_of(output["logprobs"][0], generated)))
    except UnsoundOutputError:
        return False
    return True


def versions_told(output: GenerationOutputSpec) -> list[int] | None:
    """The first and the last version of the weights, if the generator tells."""
    told = output.get("weight_versions")
    if told is None:
        return None
    start, end = as_list(told)[0]
    return [int(start), int(end)]


def generated_part(output: GenerationOutputSpec, input_ids: Any) -> slice:
    """Which part of the output was generated.

    Raises:
        UnsoundOutputError: its lengths contradict each other, or the prompt is not what was asked.
    """
    asked = input_ids.shape[1]
    output_ids, total = output["output_ids"], int(as_list(output["unpadded_sequence_lengths"])[0])
    has_rows = output_ids.ndim == 2 and output_ids.shape[0] == 1
    if not has_rows or not asked <= total <= output_ids.shape[1]:
        raise UnsoundOutputError(
            f"unpadded_sequence_lengths of {total} for output_ids of shape {list(output_ids.shape)} and a prompt of "
            f"{asked} tokens; it must be prompt and generation together"
        )
    if not _equal(output_ids[0, :asked], input_ids[0]):
        raise UnsoundOutputError(f"output_ids that do not begin with the {asked} tokens of the prompt")
    told = output.get("generation_lengths")
    if told is not None and int(as_list(told)[0]) != total - asked:
        raise UnsoundOutputError(
            f"generation_lengths of {int(as_list(told)[0])} where prompt and generation leave {total - asked}"
        )
    if "logprobs" in output and output["logprobs"].shape != output_ids.shape:
        shapes = f"{list(output['logprobs'].shape)} for output_ids of shape {list(output_ids.shape)}"
        raise UnsoundOutputError(f"logprobs of shape {shapes}; there must be one for every token")
    return slice(asked, total)


def _equal(one: Any, other: Any) -> bool:
    if one.dtype == other.dtype:
        return bool(one.equal(other))
    return bool((one == other).all())


def require_sound_log_probs(log_probs: Any) -> None:
    """Check log-probs in a few passes in C: there may be tens of thousands.

    Raises:
        UnsoundOutputError: one is NaN, infinite or positive.
    """
    if log_probs.numel() == 0:
        return
    least, most = log_probs.aminmax()  # both are NaN if anything is
    if float(least) > -math.inf and float(most) <= _MOST_LOG_PROB:
        return
    if bool(log_probs.isnan().any()):
        raise UnsoundOutputError(f"NaN log-probs for {len(log_probs)} tokens; look for overflow in its logits")
    if not bool(log_probs.isfinite().all()):
        raise UnsoundOutputError("infinite log-probs; a token that was sampled cannot have probability 0")
    raise UnsoundOutputError(f"log-probs up to {float(log_probs.max()):g}; a logarithm of a probability is at most 0")
