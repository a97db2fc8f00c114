"""PUBLIC: full batches of groups that teach something, and prompts chosen by how often they are solved.

    sampler = CurriculumSampler(samples, seed=0)
    async with BatchCollector(manager, sampler, max_in_flight=64) as collector:
        groups = await collector.collect_batch(32, oversample=1.5, filter=drop_zero_variance)

More groups are begun than are needed, since some will teach nothing; the batch is there as soon as enough good ones
are. Whatever is still being made, or was good and is not needed yet, is kept for the next batch.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeAlias

from nemo_gym.errors import GymError
from nemo_gym.rl.calls import cancel_and_drain
from nemo_gym.rl.groups import RunsRollouts, has_signal
from nemo_gym.rl.interfaces import DatumSpec, PromptGroupRecord

logger = logging.getLogger(__name__)

GroupFilter: TypeAlias = Callable[[PromptGroupRecord], bool]
_SOLVED = 0.5


def drop_zero_variance(group: PromptGroupRecord) -> bool:
    """Whether a group is worth training on: not when all of its rewards are equal."""
    return has_signal(group)


def keep_all(group: PromptGroupRecord) -> bool:
    """Whatever comes is good."""
    return True


class OutOfSamplesError(GymError):
    """There are no more samples, and not enough good groups; `groups` has those that there are."""

    groups: Sequence[PromptGroupRecord] = ()


def _out_of_samples(wanted: int, groups: Sequence[PromptGroupRecord]) -> OutOfSamplesError:
    error = OutOfSamplesError(
        f"the samples are used up and {len(groups)} of {wanted} groups passed the filter; give more samples, or ask "
        "for fewer groups"
    )
    error.groups = groups
    return error


class BatchCollector:
    """Makes batches of groups; keeps what is left over from one for the next."""

    def __init__(
        self, manager: RunsRollouts, samples: Iterable[DatumSpec], *, max_in_flight: int, max_failures: int = 0
    ) -> None:
        """At most `max_in_flight` groups are made at once; up to `max_failures` that fail are left out and logged."""
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; at least 1 group must be in flight")
        self._manager = manager
        self._samples = samples
        self._waiting = iter(samples)
        self._max_in_flight = max_in_flight
        self._failures_left = max_failures
        self._running: list[asyncio.Task[PromptGroupRecord]] = []
        self._kept: deque[PromptGroupRecord] = deque()
        self.filtered = 0
        """Groups that did not pass a filter."""

    async def __aenter__(self) -> "BatchCollector":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancel_and_drain(self._running)
        self._running.clear()

    @property
    def left_over(self) -> int:
        """Groups that are kept for the next batch, finished ones and those on their way."""
        return len(self._kept) + len(self._running)

    async def collect_batch(
        self, n_groups: int, *, oversample: float = 1.0, filter: GroupFilter = keep_all
    ) -> list[PromptGroupRecord]:
        """So many groups that pass the filter, in the order in which they finished.

        Up to `n_groups * oversample` groups are on their way at once, those counted that are good already.

        Raises:
            OutOfSamplesError: the samples are used up.
            Exception: more groups failed than are allowed; whatever the last one raised.
        """
        if n_groups < 1 or not math.isfinite(oversample) or oversample < 1:
            raise ValueError(f"n_groups={n_groups}, oversample={oversample:g}: both must be at least 1")
        good = self._good_ones_kept(n_groups, filter)
        while len(good) < n_groups:
            self._begin(math.ceil(n_groups * oversample) - len(good))
            if not self._running:
                raise _out_of_samples(n_groups, good)
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in self._running if task.done()]
            self._running = [task for task in self._running if task not in done]
            for task in done:
                self._take(task, good, n_groups, filter)
        return good

    def _good_ones_kept(self, n_groups: int, is_good: GroupFilter) -> list[PromptGroupRecord]:
        good: list[PromptGroupRecord] = []
        for _ in range(len(self._kept)):
            group = self._kept.popleft()
            if len(good) >= n_groups:
                self._kept.append(group)
            elif is_good(group):
                good.append(group)
            else:
                self.filtered += 1
        return good

    def _begin(self, wanted: int) -> None:
        while len(self._running) < min(wanted, self._max_in_flight):
            sample = next(self._waiting, None)
            if sample is None:
                return
            self._running.append(asyncio.ensure_future(self._manager.run_rollout(sample)))

    def _take(
        self, task: asyncio.Task[PromptGroupRecord], good: list[PromptGroupRecord], n_groups: int, is_good: GroupFilter
    ) -> None:
        try:
            group = task.result()
        except Exception as error:
            if self._failures_left <= 0:
                raise
            self._failures_left -= 1
            logger.warning(
                "a group is left out (%d more may be): %s: %s", self._failures_left, type(error).__name__, error
            )
            return
        if isinstance(self._samples, CurriculumSampler):
            self._samples.update(group)
        if len(good) >= n_groups:
            self._kept.append(group)
        elif is_good(group):
            good.append(group)
        else:
            self.filtered += 1


class CurriculumSampler:
    """Endless samples: mostly those that are solved now and then, some of the others, so that none is forgotten.

    Prompts belong to one of four pools by their solve rate: `new` (never tried), `hard` (at most `hard_below`), `easy`
    (at least `easy_above`) and `learning` (between). Each sample is drawn from a pool by its weight, and then any
    prompt of that pool. The solve rate is a running mean in which an earlier result counts `decay` times a later one.
    Results are told with `update`; a `BatchCollector` does that as they come.
    """

    POOLS = ("new", "learning", "hard", "easy")

    def __init__(
        self,
        samples: Sequence[DatumSpec],
        *,
        weights: Sequence[float] = (1.0, 1.0, 0.2, 0.05),
        hard_below: float = 0.1,
        easy_above: float = 0.9,
        decay: float = 0.5,
        solved_from: float = _SOLVED,
        seed: int = 0,
    ) -> None:
        """`weights` are those of the pools in the order of `POOLS`; a reward of `solved_from` or more is a solution."""
        if not samples:
            raise ValueError("there are no samples to choose from")
        if len(weights) != len(self.POOLS) or min(weights) < 0 or not sum(weights):
            raise ValueError(f"weights are {list(weights)}; there must be one for each of {', '.join(self.POOLS)}")
        if not 0 <= hard_below < easy_above <= 1 or not 0 <= decay < 1:
            raise ValueError(f"hard_below={hard_below:g}, easy_above={easy_above:g}, decay={decay:g} make no sense")
        self._samples = {sample["idx"]: sample for sample in samples}
        if len(self._samples) < len(samples):
            raise ValueError("several samples have the same idx; results could not be told apart")
        self._weights = dict(zip(self.POOLS, weights, strict=True))
        self._hard_below, self._easy_above = hard_below, easy_above
        self._decay, self._solved_from = decay, solved_from
        self._solve_rates: dict[int, float] = {}
        self._members: dict[str, list[int]] = {name: [] for name in self.POOLS}
        self._members["new"] = list(self._samples)
        self._places = {index: ("new", place) for place, index in enumerate(self._samples)}
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[DatumSpec]:
        while True:
            yield self._draw()

    def _draw(self) -> DatumSpec:
        filled = [name for name in self.POOLS if self._members[name]]
        weights = [self._weights[name] for name in filled]
        pool = self._random.choices(filled, weights if sum(weights) else None)[0]
        return self._samples[self._random.choice(self._members[pool])]

    def pools(self) -> dict[str, list[int]]:
        """The prompts of each pool now, by their `idx`."""
        return {name: sorted(members) for name, members in self._members.items()}

    def solve_rate(self, idx: int) -> float | None:
        """How often a prompt is solved; None when it was never tried."""
        return self._solve_rates.get(idx)

    def update(self, group: PromptGroupRecord) -> None:
        """A group was made: its rewards say how often its prompt is solved now."""
        index = group.prompt_idx
        rewards = [completion.reward for completion in group.completions if completion.mask_reason is None]
        if index not in self._samples or not rewards:
            return
        solved = sum(reward >= self._solved_from for reward in rewards)
        rate, before = solved / len(rewards), self._solve_rates.get(index)
        rate = rate if before is None else self._decay * before + (1 - self._decay) * rate
        self._solve_rates[index] = rate
        self._move(index, self._pool_of(rate))

    def _pool_of(self, solve_rate: float) -> str:
        if solve_rate <= self._hard_below:
            return "hard"
        return "easy" if solve_rate >= self._easy_above else "learning"

    def _move(self, index: int, pool: str) -> None:
        """Put a prompt into a pool; the last one of its old pool takes its place there."""
        old, place = self._places[index]
        members = self._members[old]
        last = members.pop()
        if last != index:
            members[place] = last
            self._places[last] = (old, place)
        self._places[index] = (pool, len(self._members[pool]))
        self._members[pool].append(index)
