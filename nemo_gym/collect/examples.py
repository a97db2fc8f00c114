"""Rollouts for a trainer: a plain iterator of awaitables, in the order in which rollouts finish.

    for rollout in run_examples(rows, post, semaphore):
        row, result = await rollout

The first request for an item starts the work. Rows become tasks in input order as the semaphore frees
up; without one they all start at once. An awaitable stands for the next rollout to finish, not for a
certain row: awaiting them out of order, giving one up after a timeout and asking for another, or
leaving some of them unawaited is all fine. What is still running when the consumer is cancelled, or
drops the iterator and all awaitables, is cancelled.

Programs may override `RolloutCollectionHelper.run_examples`. A run then sends its rows through theirs
(`OverriddenExamples`), which takes lists and gives rollouts in any order.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

from nemo_gym.collect.failures import NotSentError, rollout_name, rollout_timed_out
from nemo_gym.errors import GymError
from nemo_gym.runs.options import Concurrency
from nemo_gym.runs.record import Result, Row, agent_name_of, key_or_none

logger = logging.getLogger(__name__)

RowAndResult: TypeAlias = tuple[Row, Result]
Guard: TypeAlias = AbstractAsyncContextManager[Any]
_STARTS_AT_ONCE = 128
_ANY_NUMBER = 65_535


class Observer(Protocol):
    """Is told how the rollouts come along."""

    def finished(self, row: Row, result: Result | None) -> None:
        """Take note that a rollout ended, with a result or, when that is None, with an error."""

    def close(self) -> None:
        """Take note that no more rollouts will end."""


def run_examples(
    rows: Iterable[Row],
    post: Callable[[Row], Awaitable[Result]],
    semaphore: Guard | None = None,
    observer: Observer | None = None,
) -> Iterator[Coroutine[Any, Any, RowAndResult]]:
    """Send each row with `post`, under `semaphore`, and give the rollouts as they finish.

    `row` is the very object passed in. An awaitable whose rollout failed raises what `post` raised;
    the exception's `row` says which row it was. Iterate inside a running event loop, of any thread.
    """
    return _Examples(_Work(iter(rows), post, semaphore, observer))


class _Finished(NamedTuple):
    row: Row
    result: Result | None
    error: BaseException | None


class _Work:
    """Rows on their way to results. It does not know the iterator, whose end of life ends the work."""

    def __init__(
        self,
        rows: Iterator[Row],
        post: Callable[[Row], Awaitable[Result]],
        guard: Guard | None,
        observer: Observer | None,
    ) -> None:
        self._rows: Iterator[Row] | None = rows
        self._post = post
        self._slots = guard if isinstance(guard, asyncio.Semaphore) else None
        self._guard = nullcontext() if guard is None or self._slots is not None else guard
        self._observer = observer
        self._read_ahead: deque[Row] = deque()
        self._read = 0
        self._promised = 0
        self._tasks: set[asyncio.Task[Result]] = set()
        self._finished: asyncio.Queue[_Finished] = asyncio.Queue()
        self._feeder: asyncio.Task[None] | None = None
        self._consumer: asyncio.Task[Any] | None = None
        self._rows_error: Exception | None = None
        self._is_stopped = False
        self.is_over = False
        self.loop: asyncio.AbstractEventLoop | None = None

    def promise(self) -> bool:
        """Return whether there is one more rollout to wait for; raise what reading the rows raised."""
        if self.loop is None:
            self._begin()
        if self._promised >= self._read and not self._read_one():
            if self._rows_error is not None:
                raise self._rows_error
            return False
        self._promised += 1
        return True

    async def next_finished(self) -> RowAndResult:
        """Return the next finished (row, result); raise what the rollout raised."""
        try:
            row, result, error = await self._finished.get()
        except (asyncio.CancelledError, GeneratorExit):
            self._promised -= 1  # this wait was given up, not the rollout: somebody else may ask for it
            raise
        if error is not None:
            raise error
        assert result is not None
        return row, result

    def stop(self) -> None:
        """Cancel what is in flight and start nothing more; whoever still waits is cancelled, too."""
        self._is_stopped, self._rows = True, None
        if self._feeder is not None:
            self._feeder.cancel()
        for task in self._tasks:
            task.cancel()
        while self._read_ahead:
            self._finished.put_nowait(_Finished(self._read_ahead.popleft(), None, asyncio.CancelledError()))
        self._end_if_done()

    def _begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._feeder = self.loop.create_task(self._feed())
        self._consumer = asyncio.current_task()
        if self._consumer is not None:
            self._consumer.add_done_callback(self._on_consumer_done)

    def _read_one(self) -> bool:
        if self._rows is None:
            return False
        try:
            row = next(self._rows)
        except StopIteration:
            self._rows = None
            return False
        except Exception as error:  # noqa: BLE001 - the consumer gets it in place of the next awaitable
            self._rows, self._rows_error = None, error
            return False
        self._read += 1
        self._read_ahead.append(row)
        return True

    async def _feed(self) -> None:
        started = 0
        while self._read_ahead or self._read_one():
            if self._slots is not None:
                await self._slots.acquire()
            elif started % _STARTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            self._start(self._read_ahead.popleft())
            started += 1
        self._end_if_done()

    def _start(self, row: Row) -> None:
        assert self.loop is not None
        task = self.loop.create_task(self._run(row))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._on_done(row, done))

    async def _run(self, row: Row) -> Result:
        async with self._guard:
            return await self._post(row)

    def _on_done(self, row: Row, task: asyncio.Task[Result]) -> None:
        self._tasks.discard(task)
        if self._slots is not None:
            self._slots.release()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if isinstance(error, asyncio.CancelledError) and not self._is_stopped:
            error = GymError("the call to the agent was cancelled from within")  # the consumer was not cancelled
        if error is not None:
            with contextlib.suppress(AttributeError):
                error.row = row  # type: ignore[attr-defined]
        result = None if error is not None else task.result()
        self._finished.put_nowait(_Finished(row, result, error))
        if self._observer is not None:
            self._observer.finished(row, result)
        self._end_if_done()

    def _on_consumer_done(self, consumer: asyncio.Task[Any]) -> None:
        if consumer.cancelled():
            self.stop()

    def _end_if_done(self) -> None:
        if self.is_over or self._rows is not None or self._read_ahead or self._tasks:
            return
        self.is_over = True
        if self._consumer is not None:
            self._consumer.remove_done_callback(self._on_consumer_done)
        if self._observer is not None:
            self._observer.close()


class _Examples(Iterator["_NextRollout"]):
    """The iterator. The awaitables hold on to it: with the last of them the unfinished work goes."""

    def __init__(self, work: _Work) -> None:
        self.work = work

    def __next__(self) -> "_NextRollout":
        if not self.work.promise():
            raise StopIteration
        return _NextRollout(self)

    async def next_finished(self) -> RowAndResult:
        """Return the next finished (row, result); the wait keeps the iterator, and so the work, alive."""
        return await self.work.next_finished()

    def __del__(self) -> None:
        work = self.work
        if work.loop is not None and not work.is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed and has taken everything with it
                work.loop.call_soon_threadsafe(work.stop)


class _NextRollout(Coroutine[Any, Any, RowAndResult]):
    """The rollout that finishes next: a coroutine for `await`, `gather` and `create_task` that may go unawaited."""

    def __init__(self, examples: _Examples) -> None:
        self._examples = examples
        self._coroutine: Coroutine[Any, Any, RowAndResult] | None = None

    def __await__(self) -> Generator[Any, Any, RowAndResult]:
        return self._begun().__await__()

    def send(self, value: Any, /) -> Any:
        """Run until the next wait; raise `StopIteration` with (row, result), or what the rollout raised."""
        return self._begun().send(value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None, /) -> Any:
        """Raise an exception where the coroutine waits."""
        return self._begun().throw(kind if value is None else value)

    def close(self) -> None:
        """Give this wait up; the rollout goes on, and its result goes to whoever asks next."""
        if self._coroutine is not None:
            self._coroutine.close()

    def _begun(self) -> Coroutine[Any, Any, RowAndResult]:
        if self._coroutine is None:
            self._coroutine = self._examples.next_finished()
        return self._coroutine


class RolloutTimeoutError(GymError, TimeoutError):
    """A rollout took longer than `rollout_timeout_s`."""


class RunSlots(asyncio.Semaphore):
    """The semaphore that a run hands to an overridden `run_examples`; ours, if that calls it, obeys the run then."""

    def __init__(self, concurrency: Concurrency, rollout_timeout_s: float | None) -> None:
        super().__init__(concurrency.total or _ANY_NUMBER)
        self.concurrency = concurrency
        """The caps that hold now."""
        self.in_flight_by_agent: Counter[str] = Counter()
        """Rollouts that have begun and not ended."""
        self._timeout_s = rollout_timeout_s
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self.is_stopped: Callable[[], bool] = lambda: False

    def set_concurrency(self, concurrency: Concurrency) -> None:
        """Go on with other caps for agents; what is in flight beyond them is left to end."""
        self.concurrency = concurrency
        for agent in self._waiting:
            self._wake(agent)

    @asynccontextmanager
    async def _room(self, agent: str) -> AsyncIterator[None]:
        """Entered when the agent's cap allows, in order of arrival."""
        line = self._waiting.setdefault(agent, deque())
        if line or not self._has_room(agent):
            turn = asyncio.get_running_loop().create_future()
            line.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(agent)
                else:
                    line.remove(turn)
                raise
        else:
            self.in_flight_by_agent[agent] += 1
        try:
            yield
        finally:
            self._leave(agent)

    def _has_room(self, agent: str) -> bool:
        cap = self.concurrency.cap_of(agent)
        return cap is None or self.in_flight_by_agent[agent] < cap

    def _leave(self, agent: str) -> None:
        self.in_flight_by_agent[agent] -= 1
        self._wake(agent)

    def _wake(self, agent: str) -> None:
        line = self._waiting[agent]
        while line and self._has_room(agent):
            self.in_flight_by_agent[agent] += 1
            line.popleft().set_result(None)

    async def limited(self, post: Callable[[Row], Awaitable[Result]], row: Row) -> Result:
        """Post a row once its agent has room; it then has so much time, and none when the run is being stopped."""
        agent = agent_name_of(row) or ""
        async with self._room(agent):
            if self.is_stopped():
                raise NotSentError
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    return await post(row)
            except TimeoutError as error:
                if self._timeout_s is None or not deadline.expired():
                    raise
                raise RolloutTimeoutError(rollout_timed_out(self._timeout_s, agent).message) from error


class OverriddenExamples:
    """Sends rows one by one through a `run_examples` that takes lists: the first is all rows, the next are retries."""

    def __init__(self, send: Callable[[list[Row]], Iterable[Awaitable[RowAndResult]]], rows: Iterable[Row]) -> None:
        self._send = send
        self._to_send = list(rows)
        loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {id(row): loop.create_future() for row in self._to_send}
        self._sending: asyncio.Task[None] | None = None

    async def post(self, row: Row) -> Any:
        """Return the result for `row`; raise what its rollout raised, or `NotSentError` when there is neither."""
        loop = asyncio.get_running_loop()
        if id(row) not in self._answers:
            self._answers[id(row)] = loop.create_future()
            self._to_send.append(row)
        if self._sending is None or self._sending.done():
            self._sending = loop.create_task(self._send_all())
        try:
            answer = await self._answers[id(row)]
        finally:
            del self._answers[id(row)]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def close(self) -> None:
        """Cancel what is under way."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send_all(self) -> None:
        """One list at a time: what is to be tried again meanwhile makes up the next."""
        unsent = NotSentError()
        while self._to_send and unsent.__cause__ is None:
            rows, self._to_send = [row for row in self._to_send if id(row) in self._answers], []
            waiting: dict[Any, asyncio.Future[Any]] = {key_or_none(row): self._answers[id(row)] for row in rows}
            waiting |= {id(row): self._answers[id(row)] for row in rows}
            try:
                for awaitable in self._send(rows):
                    await _settle(awaitable, waiting)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - what the run ends with
                unsent.__cause__ = error
            for answer in waiting.values():
                if not answer.done():
                    answer.set_result(unsent)


async def _settle(awaitable: Awaitable[RowAndResult], waiting: dict[Any, asyncio.Future[Any]]) -> None:
    row: Row | None
    answer: Any
    try:
        row, answer = await awaitable
    except Exception as error:
        row, answer = getattr(error, "row", None), error
        if row is None:
            raise
    future = waiting.get(id(row)) or waiting.get(key_or_none(row))  # the latter when the row is a copy
    if future is None or future.done():
        logger.warning("%s: a result that nobody asked for, or asked for once only, is left out", rollout_name(row))
    else:
        future.set_result(answer)
