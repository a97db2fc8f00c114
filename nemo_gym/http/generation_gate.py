"""A gate that every generation passes, so that a trainer can change the weights while nobody generates.

    answer = await gate.run(ask)             # waits while the gate is shut
    ...
    await gate.pause(abort)                  # the trainer: nobody begins, and who generates is stopped
    load(weights)
    gate.resume(version)

A generation that was stopped either ends by itself, with the tokens it has, because `abort` made its engine do so; or
it is cancelled, and `run` raises `GenerationInterrupted`. In both cases its caller goes on when the gate is open again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from nemo_gym.errors import GymError

PAUSE_PATH = "/weights/pause"
RESUME_PATH = "/weights/resume"
DEFAULT_GRACE_S = 10.0
"""For generations that were told to end: answering with what there is takes an engine a step, and a moment to send."""
_STOPS_WITHIN_S = 60.0
T = TypeVar("T")
Abort = Callable[[], Awaitable[Any]]
"""Has whoever generates end at once, with what there is."""


class GenerationInterrupted(GymError):  # noqa: N818
    """A generation was cancelled because the gate was shut; it may be asked for again."""


class GenerationGate:
    """Open or shut, and the version of the weights behind it. For one event loop at a time."""

    def __init__(self, version: int | None = None) -> None:
        self.version = version
        """None where nobody has told."""
        self.pauses = 0
        self.interrupted = 0
        """Generations that were cancelled by a pause."""
        self._shut: asyncio.Event | None = None
        """Set when the gate opens again; None while it is open."""
        self._idle: asyncio.Event | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._clocks: dict[asyncio.Timeout, float] = {}
        """Deadlines that stand still while the gate is shut, with the seconds left when it was shut."""

    @property
    def is_shut(self) -> bool:
        """Whether nobody may generate now."""
        return self._shut is not None

    @property
    def in_flight(self) -> int:
        """Generations under way."""
        return len(self._running)

    async def opened(self) -> None:
        """Return when the gate is open."""
        while self._shut is not None:
            await self._shut.wait()

    async def run(self, generate: Callable[[], Awaitable[T]]) -> T:
        """What `generate` returns, asked for when the gate is open.

        Raises:
            GenerationInterrupted: the gate was shut before it had returned.
        """
        await self.opened()
        task = asyncio.current_task()
        assert task is not None, "generations run in a task"
        cancelled_before = task.cancelling()
        self._running.add(task)
        try:
            return await generate()
        except asyncio.CancelledError:
            if task in self._cut and task.uncancel() <= cancelled_before:
                self.interrupted += 1
                raise GenerationInterrupted("the generation was stopped for a change of the weights") from None
            raise
        finally:
            self._running.discard(task)
            self._cut.discard(task)
            if self._idle is not None and not self._running:
                self._idle.set()

    def shut(self) -> None:
        """Let nobody begin; who generates goes on."""
        if self._shut is None:
            self._shut = asyncio.Event()
            self.pauses += 1
            for clock in self._clocks:
                self._stop(clock)

    async def pause(self, abort: Abort | None = None, grace_s: float = DEFAULT_GRACE_S) -> None:
        """Shut the gate, and return when nobody generates.

        With `abort`, generations have `grace_s` to end by themselves; then, or at once without it, they are cancelled.

        Raises:
            TimeoutError: some do not even end when they are cancelled; the gate stays shut.
        """
        self.shut()
        if abort is not None:
            await abort()
            await self._wait_until_idle(grace_s)
        for task in self._running - self._cut:
            self._cut.add(task)
            task.cancel()
        if not await self._wait_until_idle(_STOPS_WITHIN_S):
            raise TimeoutError(
                f"{self.in_flight} generations were told to end {_STOPS_WITHIN_S:g} s ago and still run; the weights "
                "must not change under them"
            )

    def resume(self, version: int | None = None) -> None:
        """Open the gate; the weights have this version now, or the one they had."""
        if version is not None:
            self.version = int(version)
        shut, self._shut = self._shut, None
        if shut is None:
            return
        shut.set()
        now_s = asyncio.get_running_loop().time()
        for clock, left_s in self._clocks.items():
            if not clock.expired():
                clock.reschedule(now_s + left_s)

    def watch(self, clock: asyncio.Timeout) -> None:
        """Have a deadline, already entered, stand still while the gate is shut."""
        self._clocks[clock] = 0.0
        if self.is_shut:
            self._stop(clock)

    def forget(self, clock: asyncio.Timeout) -> None:
        """A deadline has been left."""
        self._clocks.pop(clock, None)

    def _stop(self, clock: asyncio.Timeout) -> None:
        ends_s = clock.when()
        if ends_s is not None and not clock.expired():
            self._clocks[clock] = ends_s - asyncio.get_running_loop().time()
            clock.reschedule(None)

    async def _wait_until_idle(self, seconds: float) -> bool:
        if self._running:
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout(seconds):
                    await self._idle.wait()
            except TimeoutError:
                return False
            finally:
                self._idle = None
        return True
