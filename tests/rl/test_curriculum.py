"""Full batches of groups that teach something, and prompts by how often they are solved."""

import asyncio
from collections import Counter
from itertools import count, islice
from typing import Any

import pytest

from nemo_gym.rl.curriculum import BatchCollector, CurriculumSampler, OutOfSamplesError, drop_zero_variance
from nemo_gym.rl.interfaces import Completion, PromptGroupRecord


def sample(index: int) -> Any:
    return {"idx": index, "message_log": [], "extra_env_info": None}


def group(prompt: int, *rewards: float) -> PromptGroupRecord:
    return PromptGroupRecord(prompt, [], None, {}, [Completion([], None, False, reward) for reward in rewards], {})


class Manager:
    """Every third group teaches nothing; the larger the index, the longer it takes."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.begun: list[int] = []
        self.most = 0
        self.cancelled = 0
        self._now = 0
        self._failing = failing

    async def run_rollout(self, input_sample: Any) -> PromptGroupRecord:
        index = input_sample["idx"]
        self.begun.append(index)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            for _ in range(index):
                await asyncio.sleep(0)
            if index in self._failing:
                raise KeyError(index)
            return group(index, 1.0, 1.0 if index % 3 == 0 else 0.0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._now -= 1


def prompts(groups: list[PromptGroupRecord]) -> list[int]:
    return [each.prompt_idx for each in groups]


def test_a_batch_is_full_of_good_groups_and_the_rest_is_kept() -> None:
    manager = Manager()

    async def main() -> tuple[list[int], list[int], int]:
        async with BatchCollector(manager, map(sample, count()), max_in_flight=100) as collector:
            first = await collector.collect_batch(4, oversample=2, filter=drop_zero_variance)
            begun = len(manager.begun)
            second = await collector.collect_batch(4, filter=drop_zero_variance)
            assert begun >= 8
            assert collector.filtered >= 2
            return prompts(first), prompts(second), collector.left_over

    first, second, _ = asyncio.run(main())

    assert len(first) == len(second) == 4
    assert all(index % 3 for index in first + second)
    assert not set(first) & set(second)
    assert max(Counter(manager.begun).values()) == 1
    assert set(manager.begun) >= set(first) | set(second)


def test_what_was_good_and_not_needed_comes_first_in_the_next_batch() -> None:
    manager = Manager()

    class Together(Manager):
        async def run_rollout(self, input_sample: Any) -> PromptGroupRecord:
            manager.begun.append(input_sample["idx"])
            return group(input_sample["idx"], 0.0, 1.0)

    async def main() -> tuple[int, int]:
        async with BatchCollector(Together(), map(sample, count()), max_in_flight=10) as collector:
            await collector.collect_batch(2, oversample=3)
            begun = len(manager.begun)
            await collector.collect_batch(4)
            return begun, len(manager.begun)

    assert asyncio.run(main()) == (6, 6)


def test_no_more_than_allowed_are_made_at_once_and_leaving_cancels_them() -> None:
    manager = Manager()

    async def main() -> None:
        async with BatchCollector(manager, map(sample, count(50)), max_in_flight=3) as collector:
            await collector.collect_batch(1, oversample=9)

    asyncio.run(main())
    assert manager.most == 3
    assert manager.cancelled >= 1


def test_when_the_samples_are_used_up_what_there_is_comes_with_the_error() -> None:
    async def main() -> None:
        async with BatchCollector(Manager(), [sample(1), sample(3)], max_in_flight=3) as collector:
            await collector.collect_batch(2, filter=drop_zero_variance)

    with pytest.raises(OutOfSamplesError, match="1 of 2 groups passed the filter") as caught:
        asyncio.run(main())
    assert prompts(list(caught.value.groups)) == [1]


def test_failures_are_left_out_as_far_as_allowed(caplog: pytest.LogCaptureFixture) -> None:
    async def main(allowed: int) -> list[int]:
        samples = [sample(index) for index in range(6)]
        async with BatchCollector(Manager((1, 2)), samples, max_in_flight=3, max_failures=allowed) as collector:
            return prompts(await collector.collect_batch(4))

    assert asyncio.run(main(2)) == [0, 3, 4, 5]
    assert "KeyError: 1" in caplog.text
    with pytest.raises(KeyError):
        asyncio.run(main(1))


@pytest.mark.parametrize("options", [{"n_groups": 0}, {"n_groups": 1, "oversample": 0.5}])
def test_batches_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    collector = BatchCollector(Manager(), [], max_in_flight=1)
    with pytest.raises(ValueError, match="both must be at least 1"):
        asyncio.run(collector.collect_batch(**options))
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        BatchCollector(Manager(), [], max_in_flight=0)


def test_prompts_move_between_pools_as_results_come() -> None:
    sampler = CurriculumSampler([sample(index) for index in range(5)])

    sampler.update(group(0, 0, 0))
    sampler.update(group(1, 1, 1))
    sampler.update(group(2, 0, 1))
    sampler.update(group(99, 1))

    assert sampler.pools() == {"new": [3, 4], "hard": [0], "easy": [1], "learning": [2]}
    assert [sampler.solve_rate(index) for index in range(4)] == [0.0, 1.0, 0.5, None]
    sampler.update(group(0, 1, 1))
    sampler.update(group(1, 1, 1))
    assert sampler.solve_rate(0) == 0.5
    assert sampler.pools() == {"new": [3, 4], "hard": [], "easy": [1], "learning": [0, 2]}


def test_most_samples_are_those_that_can_be_learned_from_and_none_is_forgotten() -> None:
    sampler = CurriculumSampler([sample(index) for index in range(30)], seed=5)
    for index in range(30):
        sampler.update(group(index, *([0.0, 0.0], [0.0, 1.0], [1.0, 1.0])[index // 10]))

    drawn = Counter(each["idx"] // 10 for each in islice(sampler, 5_000))

    assert drawn[1] > 3_500
    assert drawn[0] > drawn[2] > 50


def test_pools_without_weight_are_used_when_nothing_else_is_left() -> None:
    sampler = CurriculumSampler([sample(0)], weights=(0, 1, 0, 0))
    assert next(iter(sampler))["idx"] == 0


def test_a_collector_tells_its_sampler_what_came() -> None:
    sampler = CurriculumSampler([sample(index) for index in range(4)], seed=1)

    async def main() -> None:
        async with BatchCollector(Manager(), sampler, max_in_flight=2) as collector:
            await collector.collect_batch(8)

    asyncio.run(main())
    assert sampler.pools()["new"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": (1, 1)}, "there must be one for each of new, learning, hard, easy"),
        ({"hard_below": 0.9, "easy_above": 0.1}, "make no sense"),
        ({"decay": 1.0}, "make no sense"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CurriculumSampler([sample(0)], **options)
    with pytest.raises(ValueError, match="no samples"):
        CurriculumSampler([])
    with pytest.raises(ValueError, match="the same idx"):
        CurriculumSampler([sample(0), sample(0)])
