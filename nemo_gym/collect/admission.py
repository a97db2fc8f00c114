"""Which rows may be sent, and when: as many at once as the caps allow, and as there are connections for.

Rows are read from their source as room for them appears; those of an agent at its cap are set aside, but only so many.
How many connections that takes is known before the first is sent, and limits that are lower are named then.

Rows that the agents would refuse are found before the first of them is sent: one of each shape is put before them.
Agents, and the environments behind them, hold it against the types that they read anyway. Those that do not know the
question, as servers written elsewhere may not, are not asked twice: their rows are sent as they are.
"""

import asyncio
import logging
import resource
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from nemo_gym.collect.failures import PendingAttempt
from nemo_gym.config.trees import walk
from nemo_gym.data.row_shapes import Objections, RowShapes, Shape
from nemo_gym.http.client import ServerClient
from nemo_gym.http.session import ensure_connection_capacity
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME, ROLLOUT_INDEX_KEY_NAME
from nemo_gym.runs.input_check import InputRowsError
from nemo_gym.runs.options import Concurrency, SharedRolloutCollectionConfig, describe
from nemo_gym.runs.record import Row, agent_name_of
from nemo_gym.runtime import MOST_OPEN_FILES, connections_that_fit
from nemo_gym.schemas.run_requests import ROW_CHECK_PATH, CheckedRows, RowFault, RowsToCheck

logger = logging.getLogger(__name__)

MAX_SET_ASIDE = 1_024
"""Rows in memory that are not in flight."""
MAX_CONNECTIONS = 65_535
"""Connections asked for when the number of rollouts in flight is not limited."""
_FILES_PER_ROLLOUT = 2
"""Of the process that hosts the servers: a connection from the collector, and one to the model endpoint."""
_CAP_KEYS = frozenset(
    {
        "global_aiohttp_connector_limit",
        "global_aiohttp_connector_limit_per_host",
        "max_concurrent_requests",
        "num_concurrent_requests",
        "judge_endpoint_max_concurrency",
    }
)
"""Settings of servers that let calls wait."""
_TIMEOUT_S = 15.0
_AT_ONCE = 20
_REMEDY = "Correct or remove them, or pass +keep_offending_rows=true to send them all the same."


class WaitingRows:
    """The rows that are not in flight, read from their source as room allows."""

    def __init__(self, rows: Iterable[Row], concurrency: Concurrency, max_set_aside: int = MAX_SET_ASIDE) -> None:
        self._rows: Iterator[Row] | None = iter(rows)
        self._concurrency = concurrency
        self._max_set_aside = max_set_aside
        self._has_agent_caps = _has_agent_caps(concurrency)
        self._running: Counter[str] = Counter()
        self._aside: dict[str, deque[PendingAttempt]] = {}
        self._aside_count = 0
        self._startable: dict[str, None] = {}
        """Agents that have rows set aside and room for one; a dict because it keeps their order."""
        self.paused = 0
        """Rollouts that wait for their retry; they are not in here."""
        self.error: BaseException | None = None
        """What went wrong with the source of rows, which then counts as exhausted, or with sending them."""

    @property
    def running_by_agent(self) -> Mapping[str, int]:
        """Rollouts in flight of the agents that have caps of their own."""
        return self._running

    def set_concurrency(self, concurrency: Concurrency, in_flight: Iterable[str] = ()) -> None:
        """Go on with other caps; what is in flight beyond them, by agent, is left to end."""
        self._concurrency = concurrency
        had_agent_caps, self._has_agent_caps = self._has_agent_caps, _has_agent_caps(concurrency)
        if not had_agent_caps:
            self._running = Counter(in_flight if self._has_agent_caps else ())
        self._startable = {agent: None for agent in self._aside if self._has_room(agent)}

    def take(self) -> PendingAttempt | None:
        """The next to start, which from now on takes up room; None when nothing can start now."""
        pending = self._take_set_aside() if self._startable else self._read()
        if pending is not None and self._has_agent_caps:
            self._running[pending.agent] += 1
        return pending

    def give_back_room(self, agent: str) -> None:
        """One rollout of `agent` is no longer in flight."""
        if self._has_agent_caps:
            self._running[agent] -= 1
            if agent in self._aside and self._has_room(agent):
                self._startable[agent] = None

    def put_first(self, rows: Iterable[Row]) -> None:
        """Have these rows read before those that are left."""
        former = self._rows

        def all_rows() -> Iterator[Row]:
            yield from rows
            if former is not None:
                yield from former

        self._rows = all_rows()

    def add_retry(self, pending: PendingAttempt) -> None:
        """A rollout whose pause is over: it goes before rows not yet started."""
        self.paused -= 1
        self._set_aside(pending)
        if self._has_room(pending.agent):
            self._startable[pending.agent] = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to start, now or after a pause."""
        return self._rows is None and not self._aside_count and not self.paused

    def close(self) -> None:
        """Forget all rows that wait; nothing can be taken any more."""
        close = getattr(self._rows, "close", None)
        self._rows = None
        self._aside.clear()
        self._startable.clear()
        self._aside_count = self.paused = 0
        if close is not None:
            close()

    def _read(self) -> PendingAttempt | None:
        while self._rows is not None and self._aside_count + self.paused < self._max_set_aside:
            try:
                row = next(self._rows, None)
            except Exception as error:  # noqa: BLE001 - whoever iterates is told once what is in flight has ended
                self.error, row = error, None
            if row is None:
                self._rows = None
                break
            pending = PendingAttempt(row, agent_name_of(row) or "")
            if self._has_room(pending.agent):
                return pending
            self._set_aside(pending)
        return None

    def _set_aside(self, pending: PendingAttempt) -> None:
        self._aside.setdefault(pending.agent, deque()).append(pending)
        self._aside_count += 1

    def _take_set_aside(self) -> PendingAttempt:
        agent = next(iter(self._startable))
        rows = self._aside[agent]
        pending = rows.popleft()
        self._aside_count -= 1
        if not rows:
            del self._aside[agent]
        cap = self._concurrency.cap_of(agent)
        if not rows or (cap is not None and self._running[agent] + 1 >= cap):
            del self._startable[agent]
        return pending

    def _has_room(self, agent: str) -> bool:
        if not self._has_agent_caps:
            return True
        cap = self._concurrency.cap_of(agent)
        return cap is None or self._running[agent] < cap


def _has_agent_caps(concurrency: Concurrency) -> bool:
    return bool(concurrency.per_agent) or concurrency.each_other is not None


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


def warn_of_lower_caps(servers: Mapping[Any, Any], concurrency: Concurrency, owed_by_agent: Mapping[str, int]) -> None:
    """Name what keeps the servers of a run, whose config is given, from working on as much at once as was asked for."""
    needed = connections_needed(concurrency, owed_by_agent)
    caps = [f"{path}={cap}" for path, cap in _caps(servers) if 0 < cap < needed]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MOST_OPEN_FILES, hard)
    if _FILES_PER_ROLLOUT * needed > files:
        caps.append(f"the {files} files that a server on this machine may have open, about two for each rollout")
    if caps:
        logger.warning(
            "Up to %d rollouts in parallel, but the servers have lower limits: %s. What exceeds them waits; "
            "raise them and start the servers again if that is not meant",
            needed,
            "; ".join(caps),
        )


def _caps(servers: Mapping[Any, Any]) -> Iterator[tuple[str, int]]:
    for place in walk(servers):
        if place.keys[-1] in _CAP_KEYS and isinstance(place.value, int):
            yield place.path, place.value


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


def shapes_of(rows: Iterable[Row]) -> RowShapes:
    """The shapes of materialized rows, numbered by task from 1; rows that a program made may lack parameters."""
    shapes = RowShapes()
    firsts = (row for row in rows if not row.get(ROLLOUT_INDEX_KEY_NAME))
    for number, row in enumerate(firsts, 1):
        if isinstance(row.get(RESPONSES_CREATE_PARAMS_KEY_NAME), dict):
            shapes.note(agent_name_of(row) or "", row, number)
    return shapes


async def refuse_unfit_rows(client: ServerClient, shapes: RowShapes, where: str, *, keep: bool) -> None:
    """Ask every agent about the shapes of its rows; `where` says what their numbers count, as in `in.jsonl, line`.

    With `keep`, rows are sent all the same, after a warning.

    Raises:
        InputRowsError: rollouts of some rows are bound to fail; the first are named.
    """
    found = Objections()
    for agent, of_agent in shapes.by_agent().items():
        for start in range(0, len(of_agent), _AT_ONCE):
            batch = of_agent[start : start + _AT_ONCE]
            faults = await _ask(client, agent, batch)
            if faults is None:
                break
            found.add(where, batch, faults)
    found.settle(InputRowsError, _REMEDY, keep=keep)


async def _ask(client: ServerClient, agent: str, batch: Sequence[Shape]) -> list[list[RowFault]] | None:
    """What an agent says about the first row of each shape; None when it does not say."""
    body: dict[str, Any] = RowsToCheck(rows=[shape.row for shape in batch]).model_dump()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await client.post(server_name=agent, url_path=ROW_CHECK_PATH, json=body)
            content = await answer.read()
        checked = CheckedRows.model_validate_json(content) if answer.status == HTTPStatus.OK else None
    except Exception as error:  # noqa: BLE001 - whether it is well shows when rows are sent
        logger.debug("rows are not checked by %r: %r", agent, error)
        return None
    return checked.faults if checked is not None and len(checked.faults) == len(batch) else None
