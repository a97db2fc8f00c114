"""An event loop on a clock that jumps, and agents to dispatch rows to.

Where everybody waits for a timer, its time is now: pauses, timeouts and stalls of hours pass in no time.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from nemo_gym.collect.dispatch import Dispatch, DispatchSettings
from nemo_gym.collect.failures import Attempt, RetryPauses
from nemo_gym.runs.options import Concurrency
from nemo_gym.runs.record import Row

T = TypeVar("T")
NO_PAUSE = RetryPauses(first_s=0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Where there is nothing to do until a timer, its time is now."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits and no timer is set: this would hang for ever"
            self._loop.jump(timeout)
        return ready


def run(main: Awaitable[T]) -> T:
    async def body() -> T:
        return await main

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(body())


def now_s() -> float:
    return asyncio.get_running_loop().time()


def row_of(task: int, agent: str = "a") -> Row:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": agent}}


def rows_of(count: int, agent: str = "a") -> list[Row]:
    return [row_of(task, agent) for task in range(count)]


def settings(total: int | None = 4, **options: Any) -> DispatchSettings:
    return DispatchSettings(**{"concurrency": Concurrency(total=total), "pauses": NO_PAUSE, **options})


async def collect(dispatch: Dispatch) -> list[Attempt]:
    async with dispatch as attempts:
        return [attempt async for attempt in attempts]


def tasks_of(attempts: Iterable[Attempt]) -> list[int]:
    return [attempt.row["_ng_task_index"] for attempt in attempts]


class Agent:
    """Counts what it is sent; each call takes a second unless told otherwise."""

    def __init__(self, behave: Callable[[Row], Awaitable[Any]] | None = None, seconds: float = 1.0) -> None:
        self.started: list[Row] = []
        self.cancelled: list[Row] = []
        self.running = 0
        self.most_running = 0
        self._behave = behave
        self._seconds = seconds

    async def __call__(self, row: Row) -> Any:
        self.started.append(row)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._seconds)
            return {"reward": 1.0} if self._behave is None else await self._behave(row)
        except asyncio.CancelledError:
            self.cancelled.append(row)
            raise
        finally:
            self.running -= 1


async def refuse(row: Row) -> Any:
    raise ConnectionResetError("gone")


async def for_ever(row: Row) -> Any:
    await asyncio.Event().wait()
