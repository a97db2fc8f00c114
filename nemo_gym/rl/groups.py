"""Groups for a training loop: as they finish, with a bound on how many are on their way, and their advantages.

    async for group in prompt_groups(manager, samples, max_in_flight=16): ...

The advantage of a completion is how much better it is than its siblings.
"""

import asyncio
import logging
import math
import statistics
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Protocol

from nemo_gym.rl.calls import cancel_and_drain
from nemo_gym.rl.failures import RolloutFailure
from nemo_gym.rl.interfaces import DatumSpec, PromptGroupRecord

logger = logging.getLogger(__name__)

EPSILON = 1e-6


def group_advantages(
    group: PromptGroupRecord | Sequence[float], *, normalize: bool = True, leave_one_out: bool = False
) -> list[float]:
    """One advantage per completion: its reward less the mean of the group's.

    With `normalize` they are divided by the (sample) standard deviation. With `leave_one_out` the mean is that of
    the other completions. Equal rewards, and a group of one, give zeros. Masked completions do not count and get 0.

    Raises:
        ValueError: a reward is not a finite number.
    """
    if isinstance(group, PromptGroupRecord) and any(it.mask_reason is not None for it in group.completions):
        rest = iter(group_advantages(_rewards_of(group), normalize=normalize, leave_one_out=leave_one_out))
        return [next(rest) if completion.mask_reason is None else 0.0 for completion in group.completions]
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
        return [completion.reward for completion in group.completions if completion.mask_reason is None]
    return [float(reward) for reward in group]


class RunsRollouts(Protocol):
    """Whatever makes a group of a prompt; a `RolloutManager` does."""

    async def run_rollout(self, input_sample: DatumSpec) -> PromptGroupRecord:
        """All completions of a prompt."""


async def prompt_groups(
    manager: RunsRollouts,
    samples: Iterable[DatumSpec],
    max_in_flight: int,
    *,
    in_order: bool = False,
    drop_zero_variance: bool = False,
    max_failures: int = 0,
) -> AsyncIterator[PromptGroupRecord]:
    """The group of every sample, as they finish or in the order of the samples.

    At most `max_in_flight` groups are begun and not yet taken, finished ones included: samples are read as
    groups are taken. With `drop_zero_variance`, groups whose rewards are all equal are left out: there is nothing
    to learn from them. Up to `max_failures` groups that fail, be it by an error of the environment, are left out
    and logged; with the next failure iteration ends in that error. When iteration ends, however it does,
    nothing is left running.

    Raises:
        ValueError: `max_in_flight` is less than 1.
    """
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight is {max_in_flight}; at least 1 group must be in flight")
    waiting = iter(samples)
    running: list[asyncio.Task[PromptGroupRecord]] = []
    failures = 0
    try:
        while _fill(running, manager, waiting, max_in_flight):
            task = await _next_done(running, in_order=in_order)
            running.remove(task)
            try:
                record = task.result()
            except Exception as error:
                failures += 1
                if failures > max_failures:
                    raise
                words = str(error) if isinstance(error, RolloutFailure) else f"{type(error).__name__}: {error}"
                logger.warning("a group is left out (failure %d of %d allowed): %s", failures, max_failures, words)
            else:
                if has_signal(record) or not drop_zero_variance:
                    yield record
    finally:
        await cancel_and_drain(running)


def _fill(
    running: list[asyncio.Task[PromptGroupRecord]],
    manager: RunsRollouts,
    waiting: Iterator[DatumSpec],
    max_in_flight: int,
) -> bool:
    """Start groups while there is room; whether any is on its way."""
    while len(running) < max_in_flight:
        sample = next(waiting, None)
        if sample is None:
            break
        running.append(asyncio.ensure_future(manager.run_rollout(sample)))
    return bool(running)


async def _next_done(
    running: list[asyncio.Task[PromptGroupRecord]], *, in_order: bool
) -> asyncio.Task[PromptGroupRecord]:
    if in_order:
        await asyncio.wait({running[0]})
        return running[0]
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    return next(task for task in running if task in done)
