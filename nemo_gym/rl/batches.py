"""PUBLIC: groups as a batch of arrays that a trainer can feed to its model, and how far its policy has moved since.

    batch = collate(groups, pad_to=4096)         # one row per completion
    batch = collate_packed(groups)               # all completions one after another, for attention without padding
    prompt_ids, response_ids, mask, logprobs = token_sequence(completion)    # lists, for trainers that batch themselves
    weights = importance_weights(new, batch["logprobs"], batch["loss_mask"], cap=2.0)

Arrays are tensors where torch is installed and `as_numpy` is not asked for. A loss belongs to the tokens that the
policy generated and to no others: `loss_mask` is 1 there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nemo_gym.errors import ConfigError
from nemo_gym.rl.buffer import BufferedGroup
from nemo_gym.rl.groups import group_advantages
from nemo_gym.rl.interfaces import Completion, MessageLog, PromptGroupRecord, as_list, require_torch, torch_is_there

Group: TypeAlias = PromptGroupRecord | BufferedGroup
Advantages: TypeAlias = Callable[[PromptGroupRecord], Sequence[float]]
UNKNOWN_VERSION = -1
_PAD_ID = 0


class TooLongError(ConfigError, ValueError):
    """A completion has more tokens than a row of the batch has room for."""


@dataclass
class _Sequence:
    """One completion, its messages put together."""

    ids: "np.ndarray[Any, np.dtype[np.int64]]"
    is_trained: "np.ndarray[Any, np.dtype[np.bool_]]"
    logprobs: "np.ndarray[Any, np.dtype[np.float32]]"
    token_versions: "np.ndarray[Any, np.dtype[np.int64]]"
    turn_ends: list[int]
    """Where the generations of its turns end, as positions after their last tokens."""
    completion: Completion
    advantage: float
    group: int
    rollout: int
    """Which completion of its group it is of."""
    prompt_idx: int
    versions: tuple[int, int]


def collate(
    groups: Sequence[Group],
    *,
    pad_to: int | None = None,
    pad_id: int = _PAD_ID,
    advantages: Advantages = group_advantages,
    as_numpy: bool = False,
) -> dict[str, Any]:
    """One row per completion, in the order of the groups, padded on the right to the longest, or to `pad_to`.

    A completion whose conversation was rewritten has a row per sample, with the same reward, advantage and
    `rollout_index`; a masked one has a loss mask of zeros.

    | key | shape | |
    |---|---|---|
    | `input_ids`, `attention_mask` | [B, L] | the tokens, and 1 where there are any |
    | `loss_mask`, `logprobs` | [B, L] | 1 for tokens the policy generated, and their log-probs; 0 elsewhere |
    | `turn_rewards` | [B, L] | the reward of a turn at its last generated token; 0 elsewhere |
    | `advantages`, `rewards` | [B] | |
    | `weight_versions` | [B, 2] | the oldest and the newest of its turns, else those of its group; -1: not known |
    | `token_versions` | [B, L] | those of the single tokens that the policy generated; -1 elsewhere |
    | `lengths`, `group_index`, `prompt_idx`, `truncated` | [B] | |
    | `rollout_index`, `sample_mask` | [B] | the completion within its group; 0 where it is masked, else 1 |
    | `truncation_reasons` | list of B | why a completion was cut off; None where it was not |

    Tokens that a `token_loss_mask` of their message leaves out have a log-prob and no loss.

    Raises:
        TooLongError: a completion does not fit into `pad_to`.
        ValueError: there are no groups, or a reward is no finite number.
    """
    sequences = _sequences(groups, advantages)
    longest = max(len(each.ids) for each in sequences)
    if pad_to is not None and longest > pad_to:
        long = next(each for each in sequences if len(each.ids) > pad_to)
        raise TooLongError(
            f"a completion of prompt {long.prompt_idx} has {len(long.ids)} tokens, and pad_to={pad_to} has no room for "
            "them; raise pad_to, or lower the manager's max_seq_len"
        )
    shape = len(sequences), longest if pad_to is None else pad_to
    batch: dict[str, Any] = {
        "input_ids": np.full(shape, pad_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "loss_mask": np.zeros(shape, np.float32),
        "logprobs": np.zeros(shape, np.float32),
        "turn_rewards": np.zeros(shape, np.float32),
        "token_versions": np.full(shape, UNKNOWN_VERSION, np.int64),
    }
    for row, each in enumerate(sequences):
        length = len(each.ids)
        batch["input_ids"][row, :length] = each.ids
        batch["attention_mask"][row, :length] = 1
        batch["loss_mask"][row, :length] = each.is_trained
        batch["logprobs"][row, :length] = each.logprobs
        batch["token_versions"][row, :length] = each.token_versions
        _add_turn_rewards(batch["turn_rewards"][row], each)
    return _finished({**batch, **_per_sequence(sequences)}, as_numpy=as_numpy)


def collate_packed(
    groups: Sequence[Group], *, advantages: Advantages = group_advantages, as_numpy: bool = False
) -> dict[str, Any]:
    """All completions one after another: what has the shape [B, L] in `collate` is [T] here.

    `cu_seqlens` [B + 1] says where each begins and the last one ends, `position_ids` [T] counts from 0 in each.
    """
    sequences = _sequences(groups, advantages)
    lengths = [len(each.ids) for each in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    turn_rewards = np.zeros(int(starts[-1]), np.float32)
    for each, (start, end) in zip(sequences, pairwise(starts.tolist()), strict=True):
        _add_turn_rewards(turn_rewards[start:end], each)
    batch = {
        "input_ids": np.concatenate([each.ids for each in sequences]),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]),
        "cu_seqlens": starts,
        "loss_mask": np.concatenate([each.is_trained for each in sequences]).astype(np.float32),
        "logprobs": np.concatenate([each.logprobs for each in sequences]),
        "turn_rewards": turn_rewards,
        "token_versions": np.concatenate([each.token_versions for each in sequences]),
    }
    return _finished({**batch, **_per_sequence(sequences)}, as_numpy=as_numpy)


class TokenSequence(NamedTuple):
    """A completion as other trainers take it: a prompt, and all that followed."""

    prompt_ids: list[int]
    """Everything before the first token that the policy generated."""
    response_ids: list[int]
    response_mask: list[int]
    """1 for tokens of the policy, 0 for those of the environment, and for those that are not to be trained on."""
    response_logprobs: list[float]
    """Of the policy's tokens; 0 elsewhere."""


def token_sequence(completion: Completion) -> TokenSequence:
    """The tokens of a completion in lists; tokens of the environment after the policy's last ones are left out."""
    log = completion.message_log
    turns = [place for place, message in enumerate(log) if message["role"] == "assistant"]
    first, end = (turns[0], turns[-1] + 1) if turns else (len(log), len(log))
    response_ids, mask, logprobs = list[int](), list[int](), list[float]()
    for message in log[first:end]:
        ids = as_list(message["token_ids"])
        is_generated, trained = message["role"] == "assistant", message.get("token_loss_mask")
        response_ids += ids
        mask += [int(is_generated)] * len(ids) if trained is None else map(int, as_list(trained))
        logprobs += as_list(message["generation_logprobs"]) if "generation_logprobs" in message else [0.0] * len(ids)
    prompt_ids = [token for message in log[:first] for token in as_list(message["token_ids"])]
    return TokenSequence(prompt_ids, response_ids, mask, logprobs)


def importance_weights(new_logprobs: Any, old_logprobs: Any, loss_mask: Any, *, cap: float | None = None) -> Any:
    """How much likelier the policy is now to say each token than it was: the ratio, at most `cap`; 0 outside the mask.

    Arrays in, array out; tensors in, tensor out.
    """
    difference = new_logprobs - old_logprobs
    ratio = difference.exp() if hasattr(difference, "exp") else np.exp(difference)
    if cap is not None:
        ratio = ratio.clip(max=cap)
    return ratio * (loss_mask != 0)


def mismatch_metrics(
    new_logprobs: Any, old_logprobs: Any, loss_mask: Any, *, cap: float | None = None
) -> dict[str, float]:
    """How far the log-probs of a trainer are from those the tokens were sampled with, over the tokens of the mask.

    `effective_sample_size` is the fraction of the tokens that weights this uneven are worth; `clipped_fraction` that of
    the ratios beyond `cap`.
    """
    mask = _array(loss_mask) != 0
    difference = (_array(new_logprobs) - _array(old_logprobs))[mask].astype(np.float64)
    if not difference.size:
        return {}
    ratio = np.exp(difference)
    weights = ratio if cap is None else np.minimum(ratio, cap)
    squares = float(np.square(weights).sum())
    return {
        "mismatch/logprob_abs_mean": float(np.abs(difference).mean()),
        "mismatch/logprob_abs_max": float(np.abs(difference).max()),
        "mismatch/kl": float((ratio - 1 - difference).mean()),
        "mismatch/ratio_mean": float(ratio.mean()),
        "mismatch/ratio_max": float(ratio.max()),
        "mismatch/effective_sample_size": float(weights.sum()) ** 2 / (squares * weights.size) if squares else 0.0,
        "mismatch/clipped_fraction": 0.0 if cap is None else float((ratio > cap).mean()),
    }


@dataclass(frozen=True)
class StalenessPolicy:
    """Which groups are still worth training on: those begun at most `max_age` versions of the weights ago."""

    max_age: int

    def admits(self, group: BufferedGroup, weight_version: int) -> bool:
        """Whether a group is young enough for weights of that version."""
        return group.age(weight_version) <= self.max_age

    def ages(self, groups: Sequence[BufferedGroup], weight_version: int) -> dict[str, float]:
        """For a tracker: how old the groups of a batch are."""
        ages = [group.age(weight_version) for group in groups]
        return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))} if ages else {}


def _sequences(groups: Sequence[Group], advantages: Advantages) -> list[_Sequence]:
    if not groups:
        raise ValueError("there are no groups to make a batch of")
    sequences = []
    for index, group in enumerate(groups):
        if isinstance(group, BufferedGroup):
            record, versions = group.record, (group.start_weight_version, group.end_weight_version)
        else:
            record, versions = group, (UNKNOWN_VERSION, UNKNOWN_VERSION)
        for rollout, (completion, advantage) in enumerate(zip(record.completions, advantages(record), strict=True)):
            place = (index, rollout, record.prompt_idx)
            sequences += [_sequence(log, completion, float(advantage), place, versions) for log in completion.samples]
    return sequences


def _sequence(
    log: MessageLog, completion: Completion, advantage: float, place: tuple[int, int, int], versions: tuple[int, int]
) -> _Sequence:
    ids, is_trained, logprobs, token_versions, ends = [], [], [], [], []
    length = 0
    for message in log:
        tokens = _array(message["token_ids"]).astype(np.int64)
        given = message.get("generation_logprobs")
        length += len(tokens)
        ids.append(tokens)
        mask = message.get("token_loss_mask")
        is_generated = message["role"] == "assistant"
        if mask is None or completion.mask_reason is not None:
            is_trained.append(np.full(len(tokens), is_generated and completion.mask_reason is None))
        else:
            is_trained.append(_array(mask).astype(np.bool_))
        token_versions.append(_token_versions(message, len(tokens), versions[0] if is_generated else None))
        logprobs.append(np.zeros(len(tokens), np.float32) if given is None else _array(given).astype(np.float32))
        if is_generated:
            ends.append(length)
    return _Sequence(
        np.concatenate(ids),
        np.concatenate(is_trained),
        np.concatenate(logprobs),
        np.concatenate(token_versions),
        ends,
        completion,
        advantage,
        *place,
        completion.weight_versions or versions,
    )


def _token_versions(
    message: Mapping[str, Any], tokens: int, of_group: int | None
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """With which weights each token of a message was generated; where these changed unnoticed, the older ones."""
    if of_group is None:
        return np.full(tokens, UNKNOWN_VERSION, np.int64)
    start = next((it for it in message.get("weight_versions") or () if it is not None), of_group)
    segments = message.get("weight_segments") or [[start, tokens]]
    return np.repeat([version for version, _ in segments], [count for _, count in segments]).astype(np.int64)


def _add_turn_rewards(row: "np.ndarray[Any, np.dtype[np.float32]]", sequence: _Sequence) -> None:
    """Where there are rewards for turns they count; otherwise the whole reward belongs to the last turn."""
    ends = sequence.turn_ends
    if sequence.completion.mask_reason is not None:
        return
    rewards = sequence.completion.turn_rewards or [0.0] * (len(ends) - 1) + [sequence.completion.reward]
    for end, reward in zip(ends, rewards, strict=False):
        if end:
            row[end - 1] += reward


def _per_sequence(sequences: Sequence[_Sequence]) -> dict[str, Any]:
    completions = [each.completion for each in sequences]
    return {
        "lengths": np.array([len(each.ids) for each in sequences], np.int64),
        "group_index": np.array([each.group for each in sequences], np.int64),
        "rollout_index": np.array([each.rollout for each in sequences], np.int64),
        "sample_mask": np.array([each.mask_reason is None for each in completions], np.float32),
        "prompt_idx": np.array([each.prompt_idx for each in sequences], np.int64),
        "rewards": np.array([each.reward for each in completions], np.float32),
        "advantages": np.array([each.advantage for each in sequences], np.float32),
        "truncated": np.array([each.truncated for each in completions], np.bool_),
        "truncation_reasons": [each.truncation_reason for each in completions],
        "weight_versions": np.array([each.versions for each in sequences], np.int64),
    }


def _finished(batch: dict[str, Any], *, as_numpy: bool) -> dict[str, Any]:
    if as_numpy or not torch_is_there():
        return batch
    torch = require_torch("a batch of tensors")
    return {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in batch.items()}


def _array(values: Any) -> Any:
    if hasattr(values, "detach"):
        return values.detach().cpu().numpy()
    return np.asarray(values if hasattr(values, "dtype") else as_list(values))
