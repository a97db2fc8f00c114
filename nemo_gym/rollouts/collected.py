"""A run held in memory, for Python callers: what is still to be sent, and every result so far."""

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

from nemo_gym.keys import ATTEMPT_INDEX_KEY_NAME
from nemo_gym.rollouts.config import Concurrency
from nemo_gym.rollouts.failures import RetryPauses, failure_of
from nemo_gym.rollouts.record import Outcome, Result, Row, agent_name_of, failure_record, task_order
from nemo_gym.rollouts.resume import Cached
from nemo_gym.rollouts.store import RolloutStore


class Collected:
    """Rows go out in rounds: those whose call failed are part of the next one, until they have been tried enough."""

    def __init__(self, cached: Cached, store: RolloutStore, cap: int, pauses: RetryPauses | None = None) -> None:
        self.pending: list[Row] = cached.rows_to_run
        """Rows of the next round."""
        self._store = store
        self._cap = cap
        self._pauses = pauses or RetryPauses()
        self._round = 0
        self._began = datetime.now(UTC)
        self._finished: list[tuple[Row, Result]] = list(zip(cached.done_rows, cached.done_results, strict=True))
        self._others: list[tuple[Row, Result]] = []

    def next_round(self) -> list[Row]:
        """The rows to send now."""
        rows, self.pending = self.pending, []
        self._round += 1
        self._began = datetime.now(UTC)
        return rows

    async def take(self, awaitable: Awaitable[tuple[Row, Result]]) -> None:
        """Wait for one rollout and store it; a failed call is stored as a failure."""
        try:
            row, result = await awaitable
        except Exception as error:
            failed: Row | None = getattr(error, "row", None)
            if failed is None:
                raise
            failure = failure_of(error, agent_name_of(failed) or "")
            row, result = failed, failure_record(failed, failure, self._began, datetime.now(UTC))
            if self._round < self._cap:
                self.pending.append({**row, ATTEMPT_INDEX_KEY_NAME: (row.get(ATTEMPT_INDEX_KEY_NAME) or 0) + 1})
                self._store.append(row, result)
                return
        outcome = self._store.append(row, result)
        (self._finished if outcome is Outcome.SUCCESS else self._others).append((row, result))

    async def pause(self) -> None:
        """Wait before the next round, if there is one."""
        if self.pending:
            await asyncio.sleep(self._pauses.after(self._round))

    def persisted(self) -> tuple[list[Row], list[Result]]:
        """Rows and results that are in the rollouts file, in task order."""
        ordered = sorted(self._finished, key=lambda pair: task_order(pair[0]))
        return [row for row, _ in ordered], [result for _, result in ordered]

    def in_task_order(self) -> list[Result]:
        """Every result, also failed and discarded ones."""
        return sorted((result for _, result in [*self._finished, *self._others]), key=task_order)


def semaphore_for(concurrency: Concurrency) -> tuple[Any, dict[str, asyncio.Semaphore]]:
    """What limits all rollouts together (None: nothing does), and what limits those of single agents."""
    total = None if concurrency.total is None else asyncio.Semaphore(concurrency.total)
    return total, {agent: asyncio.Semaphore(cap) for agent, cap in concurrency.per_agent.items() if cap is not None}
