"""What a run still owes: its rows, less those finished, those that must not be retried and those tried too often.

That it is the same run, and that its rows are complete, is settled before (`reconcile`). The files are read one line at
a time. What is kept is the keys of finished rollouts, a few bytes each, and one count per failed one; once the plan is
made, one byte per row.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from nemo_gym.errors import GymError
from nemo_gym.jsonl import iter_plain_lines, parse
from nemo_gym.keys import ATTEMPT_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import Expected
from nemo_gym.runs.read import Damaged, keys_in, records
from nemo_gym.runs.record import (
    COUNTS_AS_ATTEMPT_KEY,
    NG_TERMINAL_KEY,
    KeySet,
    Result,
    RolloutKey,
    Row,
    agent_name_of,
    has_usable_reward,
    key_or_none,
    without_garbage_collection,
)
from nemo_gym.runs.repeats import NotNeeded, RepeatRule
from nemo_gym.runs.spending import Meter

logger = logging.getLogger(__name__)


_INDEX_AT_END = re.compile(rb',"%b":(0|[1-9][0-9]{0,17})\}$' % ROLLOUT_INDEX_KEY_NAME.encode())
"""All in which the repeats of a task differ, as they are written."""
_LONGEST_INDEX = len(ROLLOUT_INDEX_KEY_NAME) + 23
_row_of = itemgetter(1)


class RowsChangedError(GymError):
    """Somebody else has written to the rows of a run while it was at work."""


@dataclass(slots=True)
class Attempts:
    """The failed attempts at one rollout."""

    made: int = 0
    counted: int = 0
    """Those that count towards the cap: failures of the infrastructure do not."""
    is_terminal: bool = False


@dataclass(frozen=True)
class Gate:
    """What the files say of each rollout: finished, failed so often, or given up."""

    done: KeySet
    attempts: Mapping[RolloutKey, Attempts]
    cap: int
    retry_exhausted: bool = False
    meter: Meter | None = None
    """What they say was used, where that was asked for."""
    rule: RepeatRule | None = None
    """Which tasks are decided, where that stops their repeats."""

    def is_not_needed(self, key: RolloutKey) -> bool:
        """Whether its task is decided."""
        return self.rule is not None and key.task_index in self.rule.decided

    def is_given_up(self, key: RolloutKey) -> bool:
        """Whether it failed terminally, or too often."""
        attempts = self.attempts.get(key)
        if attempts is None or self.retry_exhausted:
            return False
        return attempts.is_terminal or attempts.counted >= self.cap


class Cached(NamedTuple):
    """An earlier run in memory, in the order `_load_from_cache` promises."""

    rows_to_run: list[Row]
    done_rows: list[Row]
    done_results: list[Result]
    done_result_lines: list[list[bytes]]


@dataclass(frozen=True)
class Plan:
    """The rows to send, read from the materialized file as they are asked for."""

    path: Path
    cap: int
    """How often a rollout may be tried."""
    expected: Mapping[str, Expected]
    """By agent, over the whole run."""
    owed_by_agent: Mapping[str, int]
    done: int = 0
    """Rollouts finished before."""
    given_up_keys: Sequence[RolloutKey] = ()
    """Rollouts that are not finished and not to be tried again."""
    attempts: Mapping[RolloutKey, Attempts] = field(default_factory=dict)
    """What failed before."""
    retry_exhausted: bool = False
    owed_lines: bytearray | None = None
    """For each line of the file whether it is owed; None when all are."""
    rows: Sequence[Row] | None = None
    """The rows owed, where they are in memory already and need not be read."""
    no_longer_asked: int = 0
    """Rollouts in the file that belong to no row of the run."""
    has_strangers: bool = False
    """Whether there are such, or failures of such."""
    meter: Meter | None = None
    """What earlier runs have used, where that was asked for."""
    rule: RepeatRule | None = None
    """Which tasks are decided, where that stops their repeats; knows all finished rollouts."""
    not_needed: NotNeeded = field(default_factory=dict)
    """Rollouts of tasks that were decided before, which are not owed."""

    @property
    def given_up(self) -> int:
        """How many rollouts are not finished and not to be tried again."""
        return len(self.given_up_keys)

    @property
    def owed(self) -> int:
        """How many rollouts are to be run."""
        return sum(self.owed_by_agent.values())

    @property
    def total(self) -> int:
        """How many rollouts the whole run has."""
        return sum(expected.rollouts for expected in self.expected.values())

    @property
    def left_out(self) -> int:
        """How many rollouts are not owed because their tasks were decided before."""
        return sum(len(repeats) for tasks in self.not_needed.values() for repeats in tasks.values())

    def attempts_left(self, row: Row) -> int:
        """How often a rollout that is owed may be tried in this run."""
        key = key_or_none(row)
        earlier = None if key is None else self.attempts.get(key)
        return self.cap if earlier is None or self.retry_exhausted else self.cap - earlier.counted

    def __iter__(self) -> Iterator[Row]:
        """The rows owed, in order; one that failed before carries its attempt index.

        Raises:
            RowsChangedError: the file is no longer the one that the plan was made of.
        """
        return map(_row_of, self.places())

    def places(self) -> Iterator[tuple[int, Row]]:
        """The same, each with the place where `reading` finds it again."""
        if self.rows is not None:
            yield from enumerate(self.rows)
            return
        read, total = 0, self.total
        start = b""
        alike: Row = {}
        for number, _, _, content, offset in iter_plain_lines(self.path):
            read += 1
            if read > total:
                break
            if self.owed_lines is not None and not self.owed_lines[read - 1]:
                continue
            index = _INDEX_AT_END.search(content, max(0, len(content) - _LONGEST_INDEX))
            if start and index is not None and index.start() == len(start) and content.startswith(start):
                row = {**alike, ROLLOUT_INDEX_KEY_NAME: int(index[1])}
            else:
                row = self._row(content, "line", number)
                is_known = index is not None and next(reversed(row), None) == ROLLOUT_INDEX_KEY_NAME
                start, alike = (content[: index.start()], {**row}) if index and is_known else (b"", {})
            yield offset, _numbered(row, self.attempts) if self.attempts else row
        if read != total:
            raise self._changed(f"it does not have {total} rows any more")

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], Row]]:
        """Gives the row at a place; raises what iterating does."""
        if self.rows is not None:
            yield self.rows.__getitem__
            return
        with self.path.open("rb") as file:

            def row_at(place: int) -> Row:
                file.seek(place)
                row = self._row(file.readline().strip(), "what stands at byte", place)
                return _numbered(row, self.attempts) if self.attempts else row

            yield row_at

    def _row(self, content: bytes, what: str, place: int) -> Row:
        try:
            row: Row = parse(content)
        except ValueError as error:
            raise self._changed(f"{what} {place} is not JSON any more") from error
        return row

    def _changed(self, how: str) -> RowsChangedError:
        return RowsChangedError(
            f"{self.path} was changed while the run was reading it: {how}. Go on with +resume_from_cache=true, which "
            "makes its rows again"
        )


def plan_fresh(paths: RolloutPaths, expected: Mapping[str, Expected], cap: int, rule: RepeatRule | None = None) -> Plan:
    """A plan that owes every row that was just written."""
    owed = {agent: of_agent.rollouts for agent, of_agent in expected.items()}
    return Plan(paths.materialized_inputs, cap, expected, owed, rule=rule)


def read_gate(
    paths: RolloutPaths,
    cap: int,
    *,
    retry_exhausted: bool = False,
    damaged: Damaged = "repair",
    meter: Meter | None = None,
    rule: RepeatRule | None = None,
) -> Gate:
    """Read rollouts and failures; damaged lines are taken out of them, unless `damaged` says otherwise.

    `meter` counts what they used, and `rule` is told of every rollout.
    """
    done = KeySet()
    unscored = 0
    for key, _, result in records(paths.rollouts, damaged):
        is_new = done.add(key)
        unscored += not has_usable_reward(result)
        if meter is not None and is_new:
            meter.add(result, key.task_index, agent_name_of(result) or "")
        if rule is not None and is_new:
            rule.add(key.task_index, result)
    _report_unscored(paths, unscored)
    return Gate(done, read_attempts(paths, damaged, meter), cap, retry_exhausted, meter, rule)


def read_attempts(
    paths: RolloutPaths, damaged: Damaged = "repair", meter: Meter | None = None
) -> dict[RolloutKey, Attempts]:
    """The failed attempts of every rollout in the sidecar; lines without indices are nobody's."""
    attempts: dict[RolloutKey, Attempts] = {}
    for key, _, failure in records(paths.failures, damaged, may_lack_key=True):
        if meter is not None:
            meter.add(failure, key and key.task_index, agent_name_of(failure) or "", success=False)
        if key is None:
            continue
        of_key = attempts.setdefault(key, Attempts())
        of_key.made += 1
        of_key.counted += failure.get(COUNTS_AS_ATTEMPT_KEY) is not False
        of_key.is_terminal |= bool(failure.get(NG_TERMINAL_KEY))
    return attempts


def plan_resumed(
    paths: RolloutPaths, gate: Gate, damaged: Damaged = "repair", asked: Mapping[str, Expected] | None = None
) -> Plan:
    """What the run still owes; `asked` is what its manifest says that it has in all."""
    rollouts: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    owed: Counter[str] = Counter()
    owed_lines = bytearray()
    given_up: list[RolloutKey] = []
    not_needed: NotNeeded = {}
    done = tried = 0
    for key, _, row in records(paths.materialized_inputs, damaged):
        agent = agent_name_of(row) or ""
        rollouts[agent] += 1
        tasks[agent] += key.rollout_index == 0
        is_done = key in gate.done
        is_given_up = not is_done and gate.is_given_up(key)
        is_owed = not (is_done or is_given_up)
        if is_owed and gate.is_not_needed(key):
            is_owed = False
            not_needed.setdefault(agent, {}).setdefault(key.task_index, []).append(key.rollout_index)
        done += is_done
        tried += key in gate.attempts
        if is_given_up:
            given_up.append(key)
        owed[agent] += is_owed
        owed_lines.append(is_owed)
    _report(gate, total=len(owed_lines), owed=owed.total())
    _report_strangers(paths, len(gate.done) - done)
    expected = {agent: Expected(tasks=tasks[agent], rollouts=count) for agent, count in rollouts.items()}
    if asked is not None and rollouts == {agent: of_agent.rollouts for agent, of_agent in asked.items()}:
        expected = dict(asked)  # it knows the tasks, too, whose first rollout was not asked for
    return Plan(
        path=paths.materialized_inputs,
        cap=gate.cap,
        expected=expected,
        owed_by_agent=owed,
        done=done,
        given_up_keys=given_up,
        attempts=gate.attempts,
        retry_exhausted=gate.retry_exhausted,
        owed_lines=owed_lines,
        no_longer_asked=len(gate.done) - done,
        has_strangers=len(gate.done) > done or len(gate.attempts) > tried,
        meter=gate.meter,
        rule=gate.rule,
        not_needed=not_needed,
    )


def plan_in_memory(cached: Cached, paths: RolloutPaths, gate: Gate, expected: Mapping[str, Expected] | None) -> Plan:
    """What a run owes whose rows were loaded before; `expected` is None when it is not known what it has in all."""
    to_run, not_needed = _needed(cached.rows_to_run, gate)
    known = [*cached.rows_to_run, *cached.done_rows]
    keys = set(map(key_or_none, known))
    rollouts = Counter(agent_name_of(row) or "" for row in known)
    given_up = [key for key in gate.attempts if expected and key not in keys and gate.is_given_up(key)]
    if given_up:
        asked = keys_in(paths.materialized_inputs)
        given_up = [key for key in given_up if key in asked]
    return Plan(
        path=paths.materialized_inputs,
        cap=gate.cap,
        expected=expected or {agent: Expected(tasks=0, rollouts=count) for agent, count in rollouts.items()},
        owed_by_agent=Counter(agent_name_of(row) or "" for row in to_run),
        done=len(cached.done_results),
        given_up_keys=given_up,
        attempts=gate.attempts,
        retry_exhausted=gate.retry_exhausted,
        rows=to_run,
        rule=gate.rule,
        not_needed=not_needed,
        meter=gate.meter,
    )


def _needed(rows: list[Row], gate: Gate) -> tuple[list[Row], NotNeeded]:
    """The rows whose tasks are not decided, and which rollouts the others are."""
    needed: list[Row] = []
    not_needed: NotNeeded = {}
    for row in rows:
        key = key_or_none(row)
        if key is None or not gate.is_not_needed(key):
            needed.append(row)
        else:
            tasks = not_needed.setdefault(agent_name_of(row) or "", {})
            tasks.setdefault(key.task_index, []).append(key.rollout_index)
    return needed, not_needed


def load_from_cache(paths: RolloutPaths, cap: int, *, retry_exhausted: bool = False) -> Cached:
    """The rows still to be run, and the finished ones beside their results, as lists in memory."""
    with without_garbage_collection():
        done = KeySet()
        unscored = 0
        finished: dict[RolloutKey, tuple[bytes, Result]] = {}
        for key, line, result in records(paths.rollouts, "repair"):
            if done.add(key):
                finished[key] = (line.content, result)
                unscored += not has_usable_reward(result)
            else:
                logger.warning("%s holds %s more than once; only the first counts", paths.rollouts, key)
        rows = {key: row for key, _, row in records(paths.materialized_inputs, "repair")}
    _report_unscored(paths, unscored)
    gate = Gate(done, read_attempts(paths), cap, retry_exhausted)
    to_run = [key for key in rows if key not in finished and not gate.is_given_up(key)]
    known = [key for key in finished if key in rows]
    _report(gate, total=len(rows), owed=len(to_run))
    _report_strangers(paths, len(finished) - len(known))
    return Cached(
        rows_to_run=[_numbered(rows[key], gate.attempts) for key in to_run],
        done_rows=[rows[key] for key in known],
        done_results=[finished[key][1] for key in known],
        done_result_lines=[[finished[key][0]] for key in known],
    )


def _numbered(row: Row, attempts: Mapping[RolloutKey, Attempts]) -> Row:
    earlier = attempts.get(RolloutKey.of(row)) if attempts else None
    if earlier is not None:
        row[ATTEMPT_INDEX_KEY_NAME] = earlier.made
    return row


def _report(gate: Gate, *, total: int, owed: int) -> None:
    attempts = gate.attempts.values()
    failures = ""
    if attempts:
        failures = (
            f"; {sum(of_key.made for of_key in attempts)} failed attempts at {len(attempts)} rollouts, of which "
            f"{sum(of_key.is_terminal for of_key in attempts)} must not be tried again and "
            f"{sum(of_key.counted >= gate.cap for of_key in attempts)} were tried {gate.cap} times or more"
        )
    logger.info("Resuming: %d rollouts in all, %d finished%s; %d to run", total, len(gate.done), failures, owed)


def _report_unscored(paths: RolloutPaths, count: int) -> None:
    """Rewards like these were once taken for results; now they are failures."""
    if count:
        logger.warning(
            "%s holds %d rollouts whose reward is no finite number: they stay, and have no part in the score; to have "
            "them made again, take their lines out before resuming",
            paths.rollouts,
            count,
        )


def _report_strangers(paths: RolloutPaths, count: int) -> None:
    if count:
        logger.warning(
            "%s holds %d rollouts that belong to no row of this run; they stay there and are left out",
            paths.rollouts,
            count,
        )
