import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_gym.rl.failures import GymTransportError, RolloutDataFailure
from nemo_gym.rl.groups import prompt_groups
from nemo_gym.rl.interfaces import Completion, DatumSpec, PromptGroupRecord


class Manager:
    """Finishes groups when told to, or fails them."""

    def __init__(self, failures: dict[int, Exception] | None = None, slow: tuple[int, ...] = ()) -> None:
        self.rewards: dict[int, tuple[float, ...]] = {}
        self.failures = failures or {}
        self.slow = slow
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled: list[int] = []

    async def run_rollout(self, input_sample: DatumSpec) -> PromptGroupRecord:
        number = input_sample["idx"]
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for _ in range(50 if number in self.slow else 1):
                await asyncio.sleep(0)
            if number in self.failures:
                raise self.failures[number]
            rewards = self.rewards.get(number, (0.0, 1.0))
            completions = [Completion([], None, False, reward) for reward in rewards]
            return PromptGroupRecord(number, [], None, {}, completions, {})
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.in_flight -= 1


def samples(count: int) -> Iterator[DatumSpec]:
    return ({"idx": number, "message_log": [], "extra_env_info": None} for number in range(count))


def collected(manager: Manager, count: int, **options: Any) -> list[int]:
    async def main() -> list[int]:
        return [group.prompt_idx async for group in prompt_groups(manager, samples(count), **options)]

    return asyncio.run(main())


def test_every_sample_gives_a_group_and_only_so_many_are_in_flight() -> None:
    manager = Manager()
    assert sorted(collected(manager, 20, max_in_flight=3)) == list(range(20))
    assert manager.most_in_flight == 3


def test_groups_come_as_they_finish_or_in_order() -> None:
    assert collected(Manager(slow=(0,)), 4, max_in_flight=2) == [1, 2, 3, 0]
    assert collected(Manager(slow=(0,)), 4, max_in_flight=2, in_order=True) == [0, 1, 2, 3]


def test_groups_with_equal_rewards_may_be_dropped() -> None:
    manager = Manager()
    manager.rewards = {1: (1.0, 1.0), 3: (0.0, 0.0, 0.0), 4: (0.5,)}
    assert collected(manager, 6, max_in_flight=2, in_order=True, drop_zero_variance=True) == [0, 2, 5]
    assert len(collected(manager, 6, max_in_flight=2)) == 6


def test_samples_are_read_only_as_groups_are_taken() -> None:
    read: list[int] = []

    def watched() -> Iterator[DatumSpec]:
        for sample in samples(100):
            read.append(sample["idx"])
            yield sample

    async def main() -> None:
        groups = prompt_groups(Manager(), watched(), max_in_flight=4)
        for _ in range(3):
            await anext(groups)
            await asyncio.sleep(0.01)
        await groups.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    assert len(read) == 4 + 2


def test_a_failure_ends_everything_unless_it_is_allowed() -> None:
    manager = Manager({1: RolloutDataFailure("bad prompt")}, slow=(0, 2))
    with pytest.raises(RolloutDataFailure, match="bad prompt"):
        collected(manager, 9, max_in_flight=3)
    assert sorted(manager.cancelled) == [0, 2]
    assert manager.in_flight == 0


def test_failures_up_to_the_allowed_number_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    failures: dict[int, Exception] = {1: RolloutDataFailure("one"), 4: GymTransportError("two")}
    assert sorted(collected(Manager(failures), 6, max_in_flight=2, max_failures=2)) == [0, 2, 3, 5]
    assert "failure 1 of 2 allowed" in caplog.text
    with pytest.raises(GymTransportError, match="two"):
        collected(Manager(failures), 6, max_in_flight=2, max_failures=1, in_order=True)


def test_errors_of_an_environment_count_as_failures_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    failures: dict[int, Exception] = {1: KeyError("bug"), 3: ValueError("another")}
    assert sorted(collected(Manager(failures), 6, max_in_flight=2, max_failures=2)) == [0, 2, 4, 5]
    assert "KeyError: 'bug'" in caplog.text
    with pytest.raises(KeyError):
        collected(Manager({1: KeyError("bug")}), 6, max_in_flight=2)


def test_leaving_early_cancels_what_is_in_flight() -> None:
    manager = Manager(slow=(1, 2))

    async def main() -> None:
        groups = prompt_groups(manager, samples(9), max_in_flight=3)
        assert (await anext(groups)).prompt_idx == 0
        await groups.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    assert sorted(manager.cancelled) == [1, 2]


def test_at_least_one_group_must_be_allowed() -> None:
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        collected(Manager(), 1, max_in_flight=0)
