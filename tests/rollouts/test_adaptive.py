"""Caps that adapt: they follow what the model takes, whatever tells them, and say what they do."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from nemo_gym.collect.adaptive import FIRST_CAP, AdaptiveConcurrency, Controller, Load
from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.examples import RunSlots
from nemo_gym.collect.failures import RetryPauses
from nemo_gym.errors import ConfigError
from nemo_gym.executors.caps import Leader
from nemo_gym.runs.manifest import RunManifest
from nemo_gym.runs.options import Concurrency, RolloutCollectionConfig, describe
from nemo_gym.runs.options.steering import Bounds
from nemo_gym.runs.record import Failure, FailureClass, Row
from tests.rollouts.dispatch_fakes import now_s, row_of, run, settings

AUTO = {"_default": Bounds()}


class RateLimitError(Exception):
    """What the client of a model raises when there are too many."""


class Model:
    """Serves so many at once; more are turned away, or wait."""

    def __init__(self, capacity: Callable[[], int], seconds: float = 1.0, *, queues: bool = False) -> None:
        self._capacity, self._seconds, self._queues = capacity, seconds, queues
        self._chance = random.Random(0)
        self._line: deque[asyncio.Future[None]] = deque()
        self.busy = self.most_busy = self.served = self.refused = 0

    async def __call__(self, row: Row) -> Any:
        while self.busy >= self._capacity():
            if not self._queues:
                self.refused += 1
                raise RateLimitError("slow down")
            self._line.append(asyncio.get_running_loop().create_future())
            await self._line[-1]
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            await asyncio.sleep(self._seconds * self._chance.uniform(0.5, 1.5))
        finally:
            self.busy -= 1
            if self._line:
                self._line.popleft().set_result(None)
        self.served += 1
        return {"reward": 1.0}


def endless(*agents: str) -> Iterator[Row]:
    task = 0
    while True:
        for agent in agents or ("a",):
            yield row_of(task, agent)
        task += 1


def go(
    post: Callable[[Row], Awaitable[Any]],
    policy: AdaptiveConcurrency | None,
    seconds: float,
    *agents: str,
    fixed: int = 1024,
) -> Dispatch:
    """Send rows for so long, on a clock that jumps."""

    async def main() -> Dispatch:
        caps = Concurrency(total=None, each_other=fixed)
        options = settings(None, concurrency=caps, run_timeout_s=seconds, pauses=RetryPauses(), stalled_after_s=1e9)
        dispatch = Dispatch(
            endless(*agents), post, options, attempts_left=lambda row: 100, policies=[policy] if policy else []
        )
        async with dispatch as attempts:
            async for _ in attempts:
                pass
        return dispatch

    return run(main())


def served_with(cap: int | None, capacity: Callable[[], int], seconds: float, **how: Any) -> int:
    model = Model(capacity, **how)
    policy = None if cap else AdaptiveConcurrency(AUTO, ["a"])
    go(model, policy, seconds, fixed=cap or 1024)
    return model.served


def test_a_model_that_turns_calls_away_is_kept_busy_and_seldom_bothered() -> None:
    model, policy = Model(lambda: 50), AdaptiveConcurrency(AUTO, ["a"])

    go(model, policy, 150)

    assert model.served >= 0.85 * 50 * 150
    assert model.refused < 0.1 * model.served
    assert 30 <= policy.caps["a"] <= 60


def test_the_cap_follows_a_model_that_takes_less_and_later_more() -> None:
    seen: list[tuple[float, int]] = []
    policy = AdaptiveConcurrency(AUTO, ["a"])

    def capacity() -> int:
        seen.append((now_s() - 1_000, policy.caps.get("a", 0)))
        return 30 if now_s() < 1_100 else 8 if now_s() < 1_200 else 60

    go(Model(capacity), policy, 350)

    def between(start_s: float, end_s: float) -> float:
        caps = [cap for at_s, cap in seen if start_s < at_s < end_s]
        return sum(caps) / len(caps)

    assert 20 <= between(50, 100) <= 40
    assert 4 <= between(130, 200) <= 13
    assert 40 <= between(280, 350) <= 75


def test_where_a_model_lets_calls_wait_the_cap_stays_near_what_it_takes() -> None:
    policy = AdaptiveConcurrency(AUTO, ["a"])
    model = Model(lambda: 50, queues=True)

    go(model, policy, 200)

    assert model.served >= 0.9 * 50 * 200
    assert policy.caps["a"] <= 150


def test_a_badly_chosen_number_is_beaten_and_the_best_one_nearly_reached() -> None:
    def capacity() -> int:
        return 50 if now_s() < 1_060 else 20

    adaptive = served_with(None, capacity, 120, queues=True)
    fixed = {cap: served_with(cap, capacity, 120, queues=True) for cap in (8, 50)}

    assert adaptive > 2 * fixed[8]
    assert adaptive >= 0.9 * fixed[50]


def test_rollouts_that_only_become_longer_do_not_take_the_cap_down() -> None:
    policy = AdaptiveConcurrency({"_default": Bounds(1, 64)}, ["a"])

    chance = random.Random(0)

    async def answer(row: Row) -> Row:
        await asyncio.sleep((1.0 if now_s() < 1_100 else 5.0) * chance.uniform(0.5, 1.5))
        return {"reward": 1.0}

    go(answer, policy, 400)

    assert policy.caps["a"] >= 48


def test_each_agent_finds_its_own_and_fixed_ones_stay_as_they_are() -> None:
    models = {"a": Model(lambda: 40), "b": Model(lambda: 4), "c": Model(lambda: 1000)}
    policy = AdaptiveConcurrency({"a": Bounds(), "b": Bounds(2, 512)}, ["a", "b", "c"])

    async def post(row: Row) -> Any:
        return await models[row["agent_ref"]["name"]](row)

    go(post, policy, 300, "a", "b", "c", fixed=5)

    assert sorted(policy.caps) == ["a", "b"]
    assert policy.caps["a"] > 20
    assert policy.caps["b"] <= 8
    assert models["c"].most_busy == 5
    assert policy.notice() == f"auto: a {policy.caps['a']}, b {policy.caps['b']} in parallel"


def test_bounds_hold_and_what_became_of_the_cap_is_in_the_manifest_where_a_resumed_run_finds_it() -> None:
    manifest = RunManifest()
    policy = AdaptiveConcurrency({"_default": Bounds(4, 48)}, ["a"], manifest)
    model = Model(lambda: 1000)

    go(model, policy, 60)

    assert model.most_busy == 48
    assert manifest.adaptive is not None
    told = manifest.adaptive["a"]
    assert (told["bounds"], told["at_end"]) == ([4, 48], 48)
    assert [change["cap"] for change in told["changes"]] == [32, 48]
    assert told["changes"][1]["why"] == "throughput grows"

    told["is_known"] = True
    again = AdaptiveConcurrency({"_default": Bounds(4, 100)}, ["a"], manifest)
    go(Model(lambda: 1000), again, 1)
    assert manifest.adaptive["a"]["changes"][0] == {"at_s": 0.0, "cap": 48, "why": "as before"}


def test_a_person_who_sets_other_caps_has_the_last_word() -> None:
    policy = AdaptiveConcurrency(AUTO, ["a"])

    async def main() -> int:
        model = Model(lambda: 1000)
        options = settings(None, concurrency=Concurrency(total=None, each_other=1024), run_timeout_s=60)
        dispatch = Dispatch(endless(), model, options, policies=[policy])
        async with dispatch as attempts:
            asyncio.get_running_loop().call_later(
                1.2, lambda: dispatch.set_concurrency(Concurrency(total=3, each_other=1024))
            )
            async for _ in attempts:
                pass
        return dispatch.concurrency.total or 0

    assert run(main()) == 3
    assert policy.is_led


@pytest.mark.parametrize("failure_class", [FailureClass.CANCELLED, FailureClass.STRAGGLER])
def test_a_rollout_that_was_given_up_says_nothing_about_what_the_model_takes(failure_class: FailureClass) -> None:
    policy = AdaptiveConcurrency(AUTO, ["a"])

    async def main() -> Load:
        options = settings(None, concurrency=Concurrency(total=None, each_other=1024))
        dispatch = Dispatch([row_of(0), row_of(1)], Model(lambda: 10), options, policies=[policy])

        def give_up() -> None:
            dispatch.give_up(dispatch.attempts_in_flight[0], Failure(failure_class, "given up"))

        async with dispatch as attempts:
            asyncio.get_running_loop().call_later(0.2, give_up)
            assert len([attempt async for attempt in attempts]) == 2
        return policy.loads()["a"]

    load = run(main())
    assert (load.ended, load.overloads) == (1, 0)


def test_a_person_may_give_other_bounds_or_a_number_while_the_run_goes_on() -> None:
    manifest = RunManifest()
    policy, seen = AdaptiveConcurrency(AUTO, ["a"], manifest), list[int]()

    async def main() -> int:
        model = Model(lambda: 1000)
        options = settings(None, concurrency=Concurrency(total=None, each_other=1024), run_timeout_s=30)
        dispatch = Dispatch(endless(), model, options, policies=[policy])

        def give(caps: Any) -> None:
            seen.append(dispatch.in_flight)
            policy.change(config_with(caps), {"num_samples_in_parallel"})

        async with dispatch as attempts:
            asyncio.get_running_loop().call_later(5.2, give, "auto:2-8")
            asyncio.get_running_loop().call_later(15.2, give, 3)
            async for _ in attempts:
                pass
            seen.append(dispatch.concurrency.total or 0)
        return model.most_busy

    assert run(main()) > 64
    assert seen[1:] == [8, 3]
    assert manifest.adaptive is not None
    assert manifest.adaptive["a"]["at_end"] == 8


def test_calls_that_pause_in_model_servers_take_the_cap_down_only_while_more_are_turned_away() -> None:
    controller = Controller.starting(Bounds(), 0.0, 100)
    controller.step(0.5, Load(ended=50), 100)

    assert controller.step(1.0, Load(ended=100, turned_away=80, paused_s=40.0), 100)
    assert controller.cap == 64  # 40 % pause, and a few may
    assert not controller.step(1.5, Load(ended=150, turned_away=99, paused_s=60.0), 80)  # they still drain
    assert not controller.step(2.0, Load(ended=200, turned_away=99, paused_s=80.0), 64)
    assert not controller.step(2.5, Load(ended=232, turned_away=99, paused_s=99.0), 64)
    controller.step(3.0, Load(ended=264, turned_away=99, paused_s=120.0), 64)
    assert controller.cap >= 64  # what pauses now was turned away before


def test_one_decides_for_all_shards_and_a_shard_that_is_started_again_counts_once_more() -> None:
    leader = Leader(AUTO, ["a"], 0.0)
    assert leader.caps == {"a": FIRST_CAP}

    leader.note((0, 1), {"a": Load(ended=20)})
    leader.note((1, 1), {"a": Load(ended=20)})
    leader.step(1.0, {"a": FIRST_CAP})
    assert leader.caps == {"a": 2 * FIRST_CAP}

    leader.note((1, 2), {"a": Load(ended=0, overloads=90)})
    leader.step(2.0, {"a": 2 * FIRST_CAP})
    assert leader.caps == {"a": 57}
    assert leader.notice() == "auto: 57 in parallel"


def test_slots_of_an_overridden_run_can_change_while_others_wait() -> None:
    most = now = 0

    async def post(row: Row) -> Row:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(1)
        now -= 1
        return {}

    async def main() -> list[int]:
        slots = RunSlots(Concurrency(total=None, each_other=2), None)
        calls = [asyncio.create_task(slots.limited(post, row_of(task))) for task in range(20)]
        await asyncio.sleep(1.5)
        seen = [most, slots.in_flight_by_agent["a"]]
        slots.set_concurrency(Concurrency(total=None, each_other=8))
        calls[-1].cancel()
        await asyncio.sleep(0.1)
        seen.append(most)
        await asyncio.wait(calls)
        return [*seen, slots.in_flight_by_agent["a"]]

    assert run(main()) == [2, 2, 8, 0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("auto:100-10", "has its bounds upside down; write auto:10-100"),
        ("auto:0-10", "at least one rollout has to be in flight"),
        ({"a": "aut"}, "'aut' is neither a number, nor auto, nor bounds for it such as auto:16-1024"),
        ("-3", "'-3' is neither a number"),
    ],
)
def test_what_cannot_be_a_cap_is_refused_in_one_line(given: Any, says: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=says) as refused:
        config_with(given)
    assert str(refused.value).count(says) == 1


def config_with(caps: Any) -> RolloutCollectionConfig:
    given = {"input_jsonl_fpath": "in", "output_jsonl_fpath": "out.jsonl", "num_samples_in_parallel": caps}
    return RolloutCollectionConfig.model_validate(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("auto", "As many rollouts in parallel as pay off, between 1 and 1024 of each agent"),
        ("64", "At most 64 rollouts in parallel"),
        (
            {"a": "auto:2-32", "_default": "auto"},
            "Rollouts in parallel, at most: a as many as pay off, 2 to 32, each other agent as many as pay off, 1 to "
            "1024",
        ),
        (
            {"a": "auto", "b": 3},
            "Rollouts in parallel, at most: a as many as pay off, 1 to 1024, b 3, each other agent 256",
        ),
    ],
)
def test_caps_that_adapt_are_described_and_kept_as_they_were_given(given: Any, says: str) -> None:
    config = config_with(given)

    assert describe(config) == says
    assert config.model_dump()["num_samples_in_parallel"] == (64 if given == "64" else given)
