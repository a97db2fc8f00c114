"""Who may start next: rows in input order, as many at once as the caps allow, and never many in memory.

Rows are read only when there is room for them. An agent at its own cap does not hold up the rows of
others behind it: its rows are set aside, but only so many, and then reading waits. Rollouts that wait
for their retry count among them: when everything fails, new rows wait too.
"""

import logging
import resource
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from nemo_gym.http.session import ensure_connection_capacity
from nemo_gym.keys import ATTEMPT_INDEX_KEY_NAME
from nemo_gym.open_files import connections_that_fit
from nemo_gym.rollouts.config import DEFAULT_CONCURRENCY, Concurrency, SharedRolloutCollectionConfig
from nemo_gym.rollouts.record import Row, agent_name_of

logger = logging.getLogger(__name__)

MAX_SET_ASIDE = 1_024
"""Rows in memory that are not in flight."""
MAX_CONNECTIONS = 65_535
"""Connections asked for when the number of rollouts in flight is not limited."""


class Trial:
    """One attempt at a rollout, from the moment its row is read."""

    __slots__ = ("agent", "number", "row", "started_at_s", "started_s")

    def __init__(self, row: Row, agent: str, number: int = 1) -> None:
        self.row = row
        self.agent = agent
        self.number = number
        """Counted from 1 within this run."""
        self.started_s = 0.0
        """On the event loop's clock."""
        self.started_at_s = 0.0
        """Seconds since the epoch."""

    def next(self) -> "Trial":
        """The attempt after this one; its row says how many failed before, over all runs."""
        failed_before = self.row.get(ATTEMPT_INDEX_KEY_NAME) or 0
        return Trial({**self.row, ATTEMPT_INDEX_KEY_NAME: failed_before + 1}, self.agent, self.number + 1)


class WaitingRows:
    """The rows that are not in flight, read from their source as room allows."""

    def __init__(self, rows: Iterable[Row], concurrency: Concurrency, max_set_aside: int = MAX_SET_ASIDE) -> None:
        self._rows: Iterator[Row] | None = iter(rows)
        self._concurrency = concurrency
        self._max_set_aside = max_set_aside
        self._has_agent_caps = bool(concurrency.per_agent) or concurrency.each_other is not None
        self._running: Counter[str] = Counter()
        self._aside: dict[str, deque[Trial]] = {}
        self._aside_count = 0
        self._startable: dict[str, None] = {}
        """Agents that have rows set aside and room for one; a dict because it keeps their order."""
        self.paused = 0
        """Rollouts that wait for their retry; they are not in here."""
        self.error: Exception | None = None
        """What went wrong with the source of rows, which then counts as exhausted."""

    @property
    def running_by_agent(self) -> Mapping[str, int]:
        """Rollouts in flight of the agents that have caps of their own."""
        return self._running

    def set_concurrency(self, concurrency: Concurrency) -> None:
        """Go on with other caps, for the same agents; what is in flight beyond them is left to end."""
        self._concurrency = concurrency
        self._startable = {agent: None for agent in self._aside if self._has_room(agent)}

    def take(self) -> Trial | None:
        """The next to start, which from now on takes up room; None when nothing can start now."""
        trial = self._take_set_aside() if self._startable else self._read()
        if trial is not None and self._has_agent_caps:
            self._running[trial.agent] += 1
        return trial

    def give_back_room(self, agent: str) -> None:
        """One rollout of `agent` is no longer in flight."""
        if self._has_agent_caps:
            self._running[agent] -= 1
            if agent in self._aside and self._has_room(agent):
                self._startable[agent] = None

    def add_retry(self, trial: Trial) -> None:
        """A rollout whose pause is over: it goes before rows not yet started."""
        self.paused -= 1
        self._set_aside(trial)
        if self._has_room(trial.agent):
            self._startable[trial.agent] = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to start, now or after a pause."""
        return self._rows is None and not self._aside_count and not self.paused

    def close(self) -> None:
        """Forget all rows."""
        close = getattr(self._rows, "close", None)
        self._rows = None
        self._aside.clear()
        self._startable.clear()
        self._aside_count = self.paused = 0
        if close is not None:
            close()

    def _read(self) -> Trial | None:
        while self._rows is not None and self._aside_count + self.paused < self._max_set_aside:
            try:
                row = next(self._rows, None)
            except Exception as error:  # noqa: BLE001 - whoever iterates is told once what is in flight has ended
                self.error, row = error, None
            if row is None:
                self._rows = None
                break
            trial = Trial(row, agent_name_of(row) or "")
            if self._has_room(trial.agent):
                return trial
            self._set_aside(trial)
        return None

    def _set_aside(self, trial: Trial) -> None:
        self._aside.setdefault(trial.agent, deque()).append(trial)
        self._aside_count += 1

    def _take_set_aside(self) -> Trial:
        agent = next(iter(self._startable))
        rows = self._aside[agent]
        trial = rows.popleft()
        self._aside_count -= 1
        if not rows:
            del self._aside[agent]
        cap = self._concurrency.cap_of(agent)
        if not rows or (cap is not None and self._running[agent] + 1 >= cap):
            del self._startable[agent]
        return trial

    def _has_room(self, agent: str) -> bool:
        if not self._has_agent_caps:
            return True
        cap = self._concurrency.cap_of(agent)
        return cap is None or self._running[agent] < cap


def connections_needed(concurrency: Concurrency, owed_by_agent: Mapping[str, int]) -> int:
    """How many connections the rollouts in flight may take up at once."""
    needed = sum(min(concurrency.cap_of(agent) or owed, owed) for agent, owed in owed_by_agent.items())
    return min(needed, concurrency.total or MAX_CONNECTIONS)


def prepare_connections(config: SharedRolloutCollectionConfig, owed_by_agent: Mapping[str, int]) -> Concurrency:
    """Say how many rollouts will be in flight at most, and let the HTTP client have as many connections.

    Returns the caps in force: what was asked for, or as many in all as the limit on open files leaves room for.
    """
    logger.info("%s", describe(config))
    concurrency = config.concurrency
    needed, fitting = connections_needed(concurrency, owed_by_agent), connections_that_fit()
    if fitting is not None and needed > fitting:
        logger.warning("%s", _too_many_for_open_files(needed, fitting))
        concurrency, needed = replace(concurrency, total=fitting), fitting
    ensure_connection_capacity(needed)
    return concurrency


def _too_many_for_open_files(needed: int, fitting: int) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + soft - fitting
    how = f"`ulimit -n {wanted}`"
    if hard != resource.RLIM_INFINITY and wanted > hard:
        how = f"{how} where the hard limit (`ulimit -Hn`, here {hard}) allows it; root raises that one"
    return (
        f"{needed} rollouts in parallel need one connection each, and this process may have only {soft} files open: "
        f"{fitting} fit, so no more are sent at once. For all of them raise the limit with {how}"
    )


def describe(config: SharedRolloutCollectionConfig) -> str:
    """The caps of a run in words."""
    if config.num_samples_in_parallel is None:
        return (
            f"At most {DEFAULT_CONCURRENCY} rollouts in parallel, the default; "
            "+num_samples_in_parallel=<number> changes it, 0 lifts it"
        )
    concurrency = config.concurrency
    if concurrency.total is not None:
        return f"At most {concurrency.total} rollouts in parallel"
    if not concurrency.per_agent and concurrency.each_other is None:
        return "Any number of rollouts in parallel"
    caps = {**concurrency.per_agent, "each other agent": concurrency.each_other}
    return "Rollouts in parallel, at most: " + ", ".join(
        f"{agent} {cap or 'any number'}" for agent, cap in caps.items()
    )
