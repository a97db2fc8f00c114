"""Whose turn it is to have a processor: counted, not timed."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_gym.http.pace_books import share_caps
from nemo_gym.workers import cores
from nemo_gym.workers.cores import WORKS_FOR, Cores, own_share


class Work:
    """Pieces of work that end when they are let go, one after the other."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.most = 0
        self._under_way = 0
        self._lock = threading.Lock()
        self._ends = threading.Semaphore(0)

    def __call__(self, name: str) -> str:
        with self._lock:
            self.begun.append(name)
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        self._ends.acquire()
        with self._lock:
            self._under_way -= 1
        return name

    async def let_go(self, number: int = 1) -> None:
        """End some, one by one, each after the next has begun."""
        for _ in range(number):
            before = len(self.begun)
            self._ends.release()
            for _ in range(200):
                if len(self.begun) > before:
                    break
                await asyncio.sleep(0.005)

    def let_all_go(self) -> None:
        self._ends.release(10_000)


@pytest.fixture
def threads() -> Iterator[list[ThreadPoolExecutor]]:
    pools = [ThreadPoolExecutor(64) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.shutdown()


def ask(
    of: Cores, threads: ThreadPoolExecutor, work: Work, server: str, session: str, most: int = 64
) -> "asyncio.Task[str]":
    """Want a piece of work for a session of a server."""

    async def run() -> str:
        WORKS_FOR.set((server, session))
        return await of.run(threads, most, lambda: work(f"{server}/{session}"))

    return asyncio.create_task(run())


def test_a_thousand_of_one_keep_another_environment_or_session_waiting_for_one(
    threads: list[ThreadPoolExecutor],
) -> None:
    async def use() -> list[str]:
        shared, work = Cores(2), Work()
        greedy = [ask(shared, threads[0], work, "math", "greedy") for _ in range(1_000)]
        await asyncio.sleep(0.05)
        others = [ask(shared, threads[0], work, "math", "modest") for _ in range(3)]
        others += [ask(shared, threads[1], work, "code", "any") for _ in range(3)]
        await asyncio.sleep(0.05)
        await work.let_go(10)
        begun = work.begun.copy()
        work.let_all_go()
        await asyncio.gather(*greedy, *others)
        assert work.most == 2  # both pools together
        return begun

    begun = asyncio.run(use())
    assert begun[:2] == ["math/greedy"] * 2
    assert Counter(begun[2:8])["code/any"] == 3  # half of the processors, as long as it wants them
    assert Counter(begun[2:12])["math/modest"] >= 2  # and of the other half, half


def test_a_pool_keeps_to_its_own_cap_and_leaves_the_rest_to_others(threads: list[ThreadPoolExecutor]) -> None:
    async def use() -> list[str]:
        shared, work = Cores(3), Work()
        tasks = [ask(shared, threads[0], work, "few", "s", most=1) for _ in range(4)]
        tasks += [ask(shared, threads[1], work, "many", "s") for _ in range(4)]
        await asyncio.sleep(0.05)
        begun = work.begun.copy()
        work.let_all_go()
        await asyncio.gather(*tasks)
        return begun

    assert sorted(asyncio.run(use())) == ["few/s", "many/s", "many/s"]


def test_who_is_cancelled_while_he_waits_is_never_begun_and_costs_nobody_a_processor(
    threads: list[ThreadPoolExecutor],
) -> None:
    async def use() -> Work:
        shared, work = Cores(1), Work()
        tasks = [ask(shared, threads[0], work, "a", str(number)) for number in range(100)]
        await asyncio.sleep(0.05)
        for task in tasks[1:99]:
            task.cancel()
        work.let_all_go()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 98
        assert await ask(shared, threads[0], work, "a", "after") == "a/after"
        return work

    work = asyncio.run(use())
    assert work.begun == ["a/0", "a/99", "a/after"]
    assert work.most == 1


def test_work_that_fails_or_cannot_be_begun_gives_its_processor_back(threads: list[ThreadPoolExecutor]) -> None:
    closed = ThreadPoolExecutor(1)
    closed.shutdown()

    def fail() -> None:
        raise KeyError("x")

    async def use() -> None:
        shared = Cores(1)
        for _ in range(3):
            with pytest.raises(KeyError):
                await shared.run(threads[0], 1, fail)
            with pytest.raises(RuntimeError, match="after shutdown"):
                await shared.run(closed, 1, fail)
        assert await shared.run(threads[0], 1, lambda: 7) == 7

    asyncio.run(asyncio.wait_for(use(), 30))


def test_replicas_and_workers_divide_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    assert own_share() == 8
    monkeypatch.setenv("NEMO_GYM_NUM_REPLICAS", "3")
    assert own_share() == 3
    monkeypatch.setenv("NEMO_GYM_NUM_REPLICAS", "32")
    assert own_share() == 1
    monkeypatch.delenv("NEMO_GYM_NUM_REPLICAS")
    config = tmp_path / "config.yaml"
    monkeypatch.setenv("NEMO_GYM_CONFIG_FILE", str(config))
    share_caps(config, 4)  # a launcher that adds hosts
    assert own_share() == 2
    monkeypatch.delenv("NEMO_GYM_CONFIG_FILE")
    monkeypatch.setattr(cores, "usable_cores", lambda: 1)
    assert own_share() == 2


def test_less_goes_at_a_time_when_replicas_are_added(
    threads: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> tuple[list[int], int]:
        monkeypatch.setattr(cores, "_SHARE_HOLDS_S", 0.0)
        share, work, most = 8, Work(), []
        shared = Cores(8, share=lambda: share)
        for share in (8, 2):  # noqa: B007 - read by the lambda
            work = Work()
            tasks = [ask(shared, threads[0], work, "capped", "s", most=4) for _ in range(6)]
            await asyncio.sleep(0.05)
            most.append(work.most)
            tasks += [ask(shared, threads[1], work, "other", "s") for _ in range(12)]
            await asyncio.sleep(0.05)
            in_all = work.most
            work.let_all_go()
            await asyncio.gather(*tasks)
        return most, in_all

    assert asyncio.run(use()) == ([4, 1], 2)  # the cap of a pool shrinks as the share does
