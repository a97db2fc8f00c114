"""A run held in memory, for Python callers: what is still to be sent, and every result so far.

It obeys the same options as the run of the command: attempts, timeouts, caps per agent, rules for stopping.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from nemo_gym.errors import GymError
from nemo_gym.http.server_client import ServerClient
from nemo_gym.keys import ATTEMPT_INDEX_KEY_NAME
from nemo_gym.rollouts.attempt import Attempt, verdict_on
from nemo_gym.rollouts.config import Concurrency, RolloutCollectionConfig
from nemo_gym.rollouts.failures import RetryPauses, failure_of, invalid_answer, rollout_timed_out
from nemo_gym.rollouts.limits import prepare_connections
from nemo_gym.rollouts.record import Outcome, Result, RolloutKey, Row, agent_name_of, key_or_none, task_order
from nemo_gym.rollouts.resume import Attempts, Cached
from nemo_gym.rollouts.stop_rules import Stop, StopKind, StopRules
from nemo_gym.rollouts.store import RolloutStore

logger = logging.getLogger(__name__)

Send = Callable[[list[Row], asyncio.Semaphore | None], Iterable[Awaitable[tuple[Row, Result]]]]
"""Sends rows under a semaphore; gives one awaitable for each of them."""


class RolloutTimeoutError(GymError, TimeoutError):
    """A rollout took longer than `rollout_timeout_s`."""


@dataclass
class RunLimits:
    """What holds for the calls of one run: `with limits.in_force():`."""

    concurrency: Concurrency
    rollout_timeout_s: float | None
    client: ServerClient | None = None
    """Of the run's servers, when it is known already."""
    started_at_s: dict[int, float] = field(default_factory=dict)
    """When the call for a row began, by the row's identity."""
    _slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the calls that are made inside find these limits."""
        before = _IN_FORCE.set(self)
        try:
            yield
        finally:
            _IN_FORCE.reset(before)

    @asynccontextmanager
    async def around(self, row: Row) -> AsyncIterator[None]:
        """One call: it waits for its agent to have room, and then has so much time.

        Raises:
            RolloutTimeoutError: the time is over.
        """
        agent = agent_name_of(row) or ""
        cap = self.concurrency.cap_of(agent)
        if cap is None:
            async with self._timed(row, agent):
                yield
        else:
            async with self._slots.setdefault(agent, asyncio.Semaphore(cap)), self._timed(row, agent):
                yield

    @asynccontextmanager
    async def _timed(self, row: Row, agent: str) -> AsyncIterator[None]:
        self.started_at_s[id(row)] = time.time()
        timeout = asyncio.timeout(self.rollout_timeout_s)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired() or self.rollout_timeout_s is None:
                raise
            raise RolloutTimeoutError(rollout_timed_out(self.rollout_timeout_s, agent).message) from error


_IN_FORCE: ContextVar[RunLimits | None] = ContextVar("limits in force", default=None)


def limits_in_force() -> RunLimits | None:
    """Those of the run under way; None for calls that belong to no such run."""
    return _IN_FORCE.get()


class Collected:
    """Rows go out in rounds: those whose call failed are part of the next one, until they have been tried enough."""

    def __init__(
        self,
        cached: Cached,
        store: RolloutStore,
        config: RolloutCollectionConfig,
        limits: RunLimits,
        failed_before: Mapping[RolloutKey, Attempts],
        pauses: RetryPauses,
    ) -> None:
        self.pending: list[Row] = cached.rows_to_run
        """Rows of the next round."""
        self.stopped: Stop | None = None
        """Why no more rounds are to follow, if so."""
        self._store = store
        self._config = config
        self._cap = config.attempt_cap
        self._limits = limits
        self._failed_before = {} if config.retry_exhausted else failed_before
        self._pauses = pauses
        self._rules = StopRules(config.fail_fast, config.max_failure_fraction)
        self._round = 0
        self._round_began_s = time.time()
        self._finished: list[tuple[Row, Result]] = list(zip(cached.done_rows, cached.done_results, strict=True))
        self._others: list[tuple[Row, Result]] = []
        self._to_retry: list[tuple[Row, Result]] = []

    async def send_all(self, send: Send) -> None:
        """Send the rows, round after round, until all have ended or there is a reason to stop."""
        total, timeout_s = self._limits.concurrency.total, self._config.run_timeout_s
        if self.pending:
            owed_by_agent = Counter(agent_name_of(row) or "" for row in self.pending)
            total = prepare_connections(self._config, owed_by_agent).total
        semaphore = None if total is None else asyncio.Semaphore(total)
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                while self.pending and self.stopped is None:
                    await self._send_round(send, semaphore)
        except TimeoutError:
            if not deadline.expired():
                raise
            self.stopped = Stop(StopKind.RUN_TIMEOUT, f"run_timeout_s={timeout_s:g} is over")
        if self.stopped is not None:
            logger.warning("Stopping: %s", self.stopped.message)

    async def _send_round(self, send: Send, semaphore: asyncio.Semaphore | None) -> None:
        rows, self.pending = self.pending, []
        self._to_retry.clear()
        self._limits.started_at_s.clear()
        self._round += 1
        self._round_began_s = time.time()
        for awaitable in send(rows, semaphore):
            await self._take(awaitable)
            if self.stopped is not None:
                return
        if self.pending:
            await asyncio.sleep(self._pauses.after(self._round))

    async def _take(self, awaitable: Awaitable[tuple[Row, Result]]) -> None:
        """Wait for one rollout and store it; a failed call is stored as a failure."""
        attempt = await self._attempt(awaitable)
        row, record = attempt.row, attempt.record()
        outcome = self._store.append(row, record)
        stop = self._rules.after(verdict_on(attempt, agent_name_of(row) or ""))
        self.stopped = self.stopped or stop
        if not attempt.is_final:
            self.pending.append({**row, ATTEMPT_INDEX_KEY_NAME: (row.get(ATTEMPT_INDEX_KEY_NAME) or 0) + 1})
            self._to_retry.append((row, record))
        else:
            (self._finished if outcome is Outcome.SUCCESS else self._others).append((row, record))

    async def _attempt(self, awaitable: Awaitable[tuple[Row, Result]]) -> Attempt:
        try:
            row, result = await awaitable
            agent = agent_name_of(row) or ""
            failure = None if isinstance(result, dict) else invalid_answer(result, agent)
        except Exception as error:
            failed: Row | None = getattr(error, "row", None)
            if failed is None:
                raise
            row, result = failed, {}
            failure = failure_of(error, agent_name_of(row) or "")
        started_at_s = self._limits.started_at_s.pop(id(row), self._round_began_s)
        is_final = failure is None or self._round >= self._attempts_left(row)
        return Attempt(row, None if failure else result, failure, started_at_s, time.time(), is_final)

    def _attempts_left(self, row: Row) -> int:
        key = key_or_none(row)
        earlier = None if key is None else self._failed_before.get(key)
        return self._cap if earlier is None else self._cap - earlier.counted

    def persisted(self) -> tuple[list[Row], list[Result]]:
        """Rows and results that are in the rollouts file, in task order."""
        ordered = sorted(self._finished, key=lambda pair: task_order(pair[0]))
        return [row for row, _ in ordered], [result for _, result in ordered]

    def in_task_order(self) -> list[Result]:
        """Every result, also failed and discarded ones."""
        ended = [*self._finished, *self._others, *self._to_retry]
        return sorted((result for _, result in ended), key=task_order)
