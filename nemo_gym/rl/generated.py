"""What a generator returned, checked, and put together when it was interrupted.

Training on a guess is worse than not training: lengths that contradict each other, a prompt that came back changed, and
log-probs that no sampled token can have are errors.
"""

import logging
import math
from typing import Any

from nemo_gym.rl.failures import RolloutDataFailure
from nemo_gym.rl.interfaces import GenerationOutputSpec, Message, Tokenizer
from nemo_gym.rl.tensors import as_list, logprob_tensor, loss_mask_of, part_of, require_torch

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
