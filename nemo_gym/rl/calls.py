"""Calling others without caring what they are, and never waiting for what nobody needs any more.

A method may belong to a plain object (it then runs in a thread, as it may block), be a coroutine function, or
belong to the handle of a Ray actor.

Threads for calls that may block are kept for the next call. Unlike those of `concurrent.futures` there is no bound
on them and the interpreter ends without them: a call that never returns keeps neither other calls nor the program
waiting.
"""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from nemo_gym.http.generation_gate import GenerationGate

_IDLE_FOR_S = 30.0
T = TypeVar("T")


class DaemonThreads:
    """Runs jobs at once, each in a thread of its own; a thread with nothing to do ends after a while."""

    def __init__(self, idle_for_s: float = _IDLE_FOR_S) -> None:
        self._idle_for_s = idle_for_s
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._free = 0
        """Threads that wait, less jobs that wait."""
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise."""
        with self._lock:
            self._free -= 1
            is_short = self._free < 0
            if is_short:
                self._free += 1
        self._jobs.put(job)
        if is_short:
            threading.Thread(target=self._work, name="nemo-gym-rl-call", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_for_s)
            except Empty:
                with self._lock:
                    if self._free <= 0:  # a job that counts on this thread is about to be put
                        continue
                    self._free -= 1
                    return
            job()
            with self._lock:
                self._free += 1


_THREADS = DaemonThreads()


async def call(method: Any, *arguments: Any, **options: Any) -> Any:
    """Call `method`, wherever it runs, and wait for its answer without blocking the event loop."""
    remote = getattr(method, "remote", None)
    if remote is not None:
        answer = remote(*arguments, **options)
    elif inspect.iscoroutinefunction(method):
        answer = method(*arguments, **options)
    else:
        answer = await in_thread(lambda: method(*arguments, **options))
    if not inspect.isawaitable(answer):
        return answer
    try:
        return await answer
    except asyncio.CancelledError:
        _stop_in_actor(answer)
        raise


def _stop_in_actor(answer: Any) -> None:
    """Tell an actor to stop working on what nobody waits for any more; Ray is not imported to find out."""
    ray = sys.modules.get("ray")
    if ray is not None and isinstance(answer, ray.ObjectRef):
        ray.cancel(answer)


def in_background(function: Callable[[], Any]) -> None:
    """Run `function` in a thread; what it returns or raises is of no interest."""

    def run() -> None:
        with contextlib.suppress(Exception):
            function()

    _THREADS.submit(run)


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread; one that never returns keeps nobody waiting but its caller."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def tell(setter: Callable[[Any], None], value: Any) -> None:
        if not answer.done():
            setter(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (answer.set_result, context.run(function))
        except StopIteration as error:
            outcome = (answer.set_exception, RuntimeError(f"{error!r} was raised"))  # a future refuses the original
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            outcome = (answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, *outcome)

    _THREADS.submit(run)
    return await answer


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one fails, the others are cancelled and have ended before its error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_and_drain(tasks)
    failed = next((task for task in tasks if task in done and _has_failed(task)), None)
    return [task.result() for task in ([failed] if failed is not None else tasks)]


async def cancel_and_drain(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has ended; what it raises by then is of no interest."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def deadline(
    seconds: float | None, expired: Callable[[], Exception], gate: GenerationGate | None = None
) -> AsyncIterator[None]:
    """Raise what `expired` makes when the block takes longer; a `TimeoutError` of the block itself passes through.

    The time stands still while `gate` is shut.
    """
    limit = asyncio.timeout(seconds)
    watching = gate if seconds is not None else None
    try:
        async with limit:
            if watching is not None:
                watching.watch(limit)
            yield
    except TimeoutError as error:
        if limit.expired():
            raise expired() from error
        raise
    finally:
        if watching is not None:
            watching.forget(limit)


def within(seconds: float | None, work: Coroutine[Any, Any, T], expired: Callable[[], Exception]) -> Awaitable[T]:
    """`work`, with a deadline if there is one; without one it costs nothing."""
    return work if seconds is None else _within(seconds, work, expired)


async def _within(seconds: float, work: Coroutine[Any, Any, T], expired: Callable[[], Exception]) -> T:
    async with deadline(seconds, expired):
        return await work


def _has_failed(task: asyncio.Future[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
