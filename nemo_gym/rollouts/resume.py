"""What a run still owes: its rows, less those finished, those that must not be retried and those tried too often.

The files are read one line at a time. What is kept is the keys of finished rollouts, a few bytes each,
and one count per failed one; once the plan is made, one byte per row.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
)
from nemo_gym.rollouts.repair import sound_records

logger = logging.getLogger(__name__)


@dataclass(slots=True)
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
    given_up_keys: Sequence[RolloutKey] = ()
    """Rollouts that are not finished and not to be tried again."""
    attempts: Mapping[RolloutKey, Attempts] = field(default_factory=dict)
    """What failed before."""
    retry_exhausted: bool = False
    owed_lines: bytearray | None = None
    """For each line of the file whether it is owed; None when all are."""

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


def read_gate(paths: RolloutPaths, cap: int, *, retry_exhausted: bool = False, repair: bool = True) -> Gate:
    """Read rollouts and failures, repairing them where a line is damaged, unless told to leave them alone."""
    done = KeySet()
    for key, _, _ in sound_records(paths.rollouts, paths.rollouts_corrupt, repair=repair):
        done.add(key)
    return Gate(done, read_attempts(paths, repair=repair), cap, retry_exhausted)


def read_attempts(paths: RolloutPaths, *, repair: bool = True) -> dict[RolloutKey, Attempts]:
    """The failed attempts of every rollout in the sidecar; lines without indices are nobody's."""
    attempts: dict[RolloutKey, Attempts] = {}
    for key, _, failure in sound_records(paths.failures, paths.failures_corrupt, may_lack_key=True, repair=repair):
        of_key = attempts.setdefault(key, Attempts())
        of_key.made += 1
        of_key.counted += failure.get(COUNTS_AS_ATTEMPT_KEY) is not False
        of_key.is_terminal |= bool(failure.get(NG_TERMINAL_KEY))
    return attempts


def plan_resumed(paths: RolloutPaths, gate: Gate, *, repair: bool = True) -> Plan:
    """What the run still owes."""
    rollouts: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    owed: Counter[str] = Counter()
    owed_lines = bytearray()
    given_up: list[RolloutKey] = []
    done = 0
    for key, _, row in sound_records(paths.materialized_inputs, paths.materialized_inputs_corrupt, repair=repair):
        agent = agent_name_of(row) or ""
        rollouts[agent] += 1
        tasks[agent] += key.rollout_index == 0
        is_done = key in gate.done
        is_given_up = not is_done and gate.is_given_up(key)
        is_owed = not (is_done or is_given_up)
        done += is_done
        if is_given_up:
            given_up.append(key)
        owed[agent] += is_owed
        owed_lines.append(is_owed)
    _report(gate, total=len(owed_lines), owed=owed.total())
    _report_strangers(paths, len(gate.done) - done)
    return Plan(
        path=paths.materialized_inputs,
        cap=gate.cap,
        expected={agent: Expected(tasks=tasks[agent], rollouts=count) for agent, count in rollouts.items()},
        owed_by_agent=owed,
        done=done,
        given_up_keys=given_up,
        attempts=gate.attempts,
        retry_exhausted=gate.retry_exhausted,
        owed_lines=owed_lines,
    )


def load_from_cache(paths: RolloutPaths, cap: int, *, retry_exhausted: bool = False) -> Cached:
    """The same with everything in memory: rows to run, and the finished ones beside their results."""
    with without_garbage_collection():
        done = KeySet()
        finished: dict[RolloutKey, tuple[bytes, Result]] = {}
        for key, line, result in sound_records(paths.rollouts, paths.rollouts_corrupt):
            if done.add(key):
                finished[key] = (line, result)
            else:
                logger.warning("%s holds %s more than once; only the first counts", paths.rollouts, key)
        materialized = sound_records(paths.materialized_inputs, paths.materialized_inputs_corrupt)
        rows = {key: row for key, _, row in materialized}
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


def _report_strangers(paths: RolloutPaths, count: int) -> None:
    if count:
        logger.warning(
            "%s holds %d rollouts that belong to no row of this run; they stay there and are left out",
            paths.rollouts,
            count,
        )
