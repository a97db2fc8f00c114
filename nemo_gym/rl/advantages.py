"""Group-relative advantages: how much better a completion is than its siblings."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from nemo_gym.rl.interfaces import PromptGroupRecord

EPSILON = 1e-6


def group_advantages(
    group: PromptGroupRecord | Sequence[float], *, normalize: bool = True, leave_one_out: bool = False
) -> list[float]:
    """One advantage per completion: its reward less the mean of the group's.

    With `normalize` they are divided by the (sample) standard deviation. With `leave_one_out` the mean is that of
    the other completions. Equal rewards, and a group of one, give zeros.

    Raises:
        ValueError: a reward is not a finite number.
    """
    rewards = _rewards_of(group)
    bad = [reward for reward in rewards if not math.isfinite(reward)]
    if bad:
        raise ValueError(f"rewards {bad} are not finite; a failed rollout has no reward and belongs in no group")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    advantages = [reward - mean for reward in rewards]
    if leave_one_out:
        advantages = [advantage * len(rewards) / (len(rewards) - 1) for advantage in advantages]
    if normalize:
        deviation = statistics.stdev(rewards)
        advantages = [advantage / (deviation + EPSILON) for advantage in advantages]
    return advantages


def has_signal(group: PromptGroupRecord | Sequence[float]) -> bool:
    """Whether the rewards of a group differ: if they do not, there is nothing to learn from it."""
    rewards = _rewards_of(group)
    return bool(rewards) and min(rewards) != max(rewards)


def with_signal(groups: Iterable[PromptGroupRecord]) -> Iterator[PromptGroupRecord]:
    """The groups whose rewards differ."""
    return filter(has_signal, groups)


def _rewards_of(group: PromptGroupRecord | Sequence[float]) -> list[float]:
    if isinstance(group, PromptGroupRecord):
        return [completion.reward for completion in group.completions]
    return [float(reward) for reward in group]
