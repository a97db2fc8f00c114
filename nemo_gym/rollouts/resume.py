"""What a run still owes: its rows, less those finished, those that must not be retried and those tried too often.

The files are read one line at a time. What is kept is the keys of finished rollouts, a few bytes each,
and one count per failed one; once the plan is made, one byte per row.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.keys import ATTEMPT_INDEX_KEY_NAME
from nemo_gym.rollouts.compact import KeySet, without_garbage_collection
from nemo_gym.rollouts.manifest import Expected
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import (
    COUNTS_AS_ATTEMPT_KEY,
    NG_TERMINAL_KEY,
    Result,
    RolloutKey,
    Row,
    agent_name_of,
    has_key,
)
from nemo_gym.rollouts.repair import sound_records

logger = logging.getLogger(__name__)


@dataclass
class Attempts:
    """The failed attempts at one rollout."""

    made: int = 0
    counted: int = 0
    """Those that count towards the cap: failures of the infrastructure do not."""
    is_terminal: bool = False


@dataclass(frozen=True)
class Gate:
    """Which rollouts are still to be run, by what the files say about them."""

    done: KeySet
    attempts: Mapping[RolloutKey, Attempts]
    cap: int
    retry_exhausted: bool = False

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
    given_up: int = 0
    """Rollouts that are not finished and not to be tried again."""
    attempts: Mapping[RolloutKey, Attempts] = field(default_factory=dict)
    """What failed before."""
    retry_exhausted: bool = False
    owed_lines: bytearray | None = None
    """For each line of the file whether it is owed; None when all are."""

    @property
    def owed(self) -> int:
        """How many rollouts are to be run."""
        return sum(self.owed_by_agent.values())

    @property
    def total(self) -> int:
        """How many rollouts the whole run has."""
        return sum(expected.rollouts for expected in self.expected.values())

    def attempts_left(self, row: Row) -> int:
        """How often a rollout that is owed may be tried in this run."""
        earlier = self.attempts.get(RolloutKey.of(row))
        return self.cap if earlier is None or self.retry_exhausted else self.cap - earlier.counted

    def __iter__(self) -> Iterator[Row]:
        """The rows owed, in order; one that failed before carries its attempt index."""
        for position, line in enumerate(iter_lines(self.path)):
            if self.owed_lines is None or self.owed_lines[position]:
                yield _numbered(parse(line.content), self.attempts)


def plan_fresh(paths: RolloutPaths, expected: Mapping[str, Expected], cap: int) -> Plan:
    """All of the rows that were just written."""
    owed = {agent: of_agent.rollouts for agent, of_agent in expected.items()}
    return Plan(paths.materialized_inputs, cap, expected, owed)


def read_gate(paths: RolloutPaths, cap: int, *, retry_exhausted: bool = False) -> Gate:
    """Read rollouts and failures, repairing them where a line is damaged."""
    done = KeySet()
    for _, result in sound_records(paths.rollouts, paths.rollouts_corrupt, has_key):
        done.add(RolloutKey.of(result))
    return Gate(done, read_attempts(paths), cap, retry_exhausted)


def read_attempts(paths: RolloutPaths) -> dict[RolloutKey, Attempts]:
    """The failed attempts of every rollout in the sidecar; lines without indices are nobody's."""
    attempts: dict[RolloutKey, Attempts] = {}
    for _, record in sound_records(paths.failures, paths.failures_corrupt, lambda value: isinstance(value, dict)):
        if not has_key(record):
            continue
        of_key = attempts.setdefault(RolloutKey.of(record), Attempts())
        of_key.made += 1
        of_key.counted += record.get(COUNTS_AS_ATTEMPT_KEY) is not False
        of_key.is_terminal |= bool(record.get(NG_TERMINAL_KEY))
    return attempts


def plan_resumed(paths: RolloutPaths, gate: Gate) -> Plan:
    """What the run still owes."""
    expected: dict[str, Expected] = {}
    owed_by_agent: Counter[str] = Counter()
    owed_lines = bytearray()
    done = given_up = 0
    for _, row in sound_records(paths.materialized_inputs, paths.materialized_inputs_corrupt, has_key):
        key, agent = RolloutKey.of(row), agent_name_of(row) or ""
        of_agent = expected.setdefault(agent, Expected())
        of_agent.rollouts += 1
        of_agent.tasks += key.rollout_index == 0
        is_done = key in gate.done
        is_given_up = not is_done and gate.is_given_up(key)
        is_owed = not (is_done or is_given_up)
        done += is_done
        given_up += is_given_up
        owed_by_agent[agent] += is_owed
        owed_lines.append(is_owed)
    _report(gate, total=len(owed_lines), owed=sum(owed_lines))
    _report_strangers(paths, len(gate.done) - done)
    return Plan(
        path=paths.materialized_inputs,
        cap=gate.cap,
        expected=expected,
        owed_by_agent=owed_by_agent,
        done=done,
        given_up=given_up,
        attempts=gate.attempts,
        retry_exhausted=gate.retry_exhausted,
        owed_lines=owed_lines,
    )


def load_from_cache(paths: RolloutPaths, cap: int, *, retry_exhausted: bool = False) -> Cached:
    """The same with everything in memory: rows to run, and the finished ones beside their results."""
    with without_garbage_collection():
        return _load_from_cache(paths, cap, retry_exhausted)


def _load_from_cache(paths: RolloutPaths, cap: int, retry_exhausted: bool) -> Cached:
    done, results, lines = KeySet(), [], []
    for line, result in sound_records(paths.rollouts, paths.rollouts_corrupt, has_key):
        if done.add(RolloutKey.of(result)):
            results.append(result)
            lines.append([line])
        else:
            logger.warning("%s holds %s more than once; only the first counts", paths.rollouts, RolloutKey.of(result))
    gate = Gate(done, read_attempts(paths), cap, retry_exhausted)
    sound = sound_records(paths.materialized_inputs, paths.materialized_inputs_corrupt, has_key)
    rows = {RolloutKey.of(row): row for _, row in sound}
    to_run = [
        _numbered(row, gate.attempts) for key, row in rows.items() if key not in done and not gate.is_given_up(key)
    ]
    known = [RolloutKey.of(result) in rows for result in results]
    _report(gate, total=len(rows), owed=len(to_run))
    _report_strangers(paths, known.count(False))
    kept = [result for result, is_known in zip(results, known, strict=True) if is_known]
    return Cached(
        rows_to_run=to_run,
        done_rows=[rows[RolloutKey.of(result)] for result in kept],
        done_results=kept,
        done_result_lines=[line for line, is_known in zip(lines, known, strict=True) if is_known],
    )


def _numbered(row: Row, attempts: Mapping[RolloutKey, Attempts]) -> Row:
    earlier = attempts.get(RolloutKey.of(row)) if attempts else None
    if earlier is not None:
        row[ATTEMPT_INDEX_KEY_NAME] = earlier.made
    return row


def _report(gate: Gate, *, total: int, owed: int) -> None:
    attempts = gate.attempts.values()
    logger.info(
        "Resuming: %d rollouts in all, %d finished; %d failed attempts at %d rollouts, of which %d must not be tried "
        "again and %d were tried %d times or more; %d to run",
        total,
        len(gate.done),
        sum(of_key.made for of_key in attempts),
        len(attempts),
        sum(of_key.is_terminal for of_key in attempts),
        sum(of_key.counted >= gate.cap for of_key in attempts),
        gate.cap,
        owed,
    )


def _report_strangers(paths: RolloutPaths, count: int) -> None:
    if count:
        logger.warning(
            "%s holds %d rollouts that belong to no row of this run; they stay there and are left out",
            paths.rollouts,
            count,
        )
