"""Groups for a training loop: as they finish, with a bound on how many are on their way.

async for group in prompt_groups(manager, samples, max_in_flight=16): ...
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol

from nemo_gym.rl.advantages import has_signal
from nemo_gym.rl.calls import cancel_and_drain
from nemo_gym.rl.failures import RolloutFailure
from nemo_gym.rl.interfaces import DatumSpec, PromptGroupRecord

logger = logging.getLogger(__name__)


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
    to learn from them. Up to `max_failures` groups that fail are left out and logged; with the next failure, as
    with any error that is no `RolloutFailure`, iteration ends in that error. When iteration ends, however it does,
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
            except RolloutFailure as error:
                failures += 1
                if failures > max_failures:
                    raise
                logger.warning("a group is left out (failure %d of %d allowed): %s", failures, max_failures, error)
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
