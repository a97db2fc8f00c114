"""Input file → materialized rows: the second pass, which numbers, repeats and seeds the rows.

Rows come out one at a time and as the bytes of their line in the materialized file; no list of them
is ever held. Repeats of a row differ in one number, so a row is serialized once, not once per repeat.
"""

from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import parse, to_line
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.rollouts.compact import without_garbage_collection
from nemo_gym.rollouts.config import RolloutCollectionConfig
from nemo_gym.rollouts.record import Row, agent_name_of
from nemo_gym.rollouts.row_rules import RowRules, announce, with_seed
from nemo_gym.rollouts.scan import InputScan, line_hash, scan_input, size_and_time
from nemo_gym.row_files import iter_row_lines

_DIGEST_BYTES = 16
_MANY = 2**32
_AT_ONCE = 256
_ROLLOUT_INDEX_BYTES = f',"{ROLLOUT_INDEX_KEY_NAME}":'.encode()


class Repeats(NamedTuple):
    """Consecutive rollouts of one task as lines of the materialized file, and what is worth knowing unparsed."""

    agent: str
    first_rollout_index: int
    lines: list[bytes]


class InputRows:
    """The materialized rows of one input file under one config; each iteration reads the file again."""

    def __init__(self, config: RolloutCollectionConfig) -> None:
        self._config = config
        self.rules = RowRules.of(config)

    @cached_property
    def scan(self) -> InputScan:
        """The first pass, made once; raises when any row is unusable."""
        announce(self._config)
        return scan_input(self.rules)

    def check(self) -> None:
        """Make the first pass now, not when the rows are asked for."""
        _ = self.scan

    def __iter__(self) -> Iterator[Repeats]:
        """Every row, in file order with its repeats adjacent."""
        scan = self.scan
        if size_and_time(self.rules.path) != scan.size_and_time:
            raise ConfigError(f"{self.rules.path} changed while it was being read; start again when it is complete")
        return _materialize(self.rules, scan)


def preprocess(config: RolloutCollectionConfig) -> list[Row]:
    """All materialized rows as a list, for callers that want them in memory."""
    with without_garbage_collection():
        return [parse(line) for repeats in InputRows(config) for line in repeats.lines]


def materialized(rows: Iterable[Row]) -> Iterator[Repeats]:
    """Rows that were made elsewhere, as they are written to the materialized file."""
    for row in rows:
        yield Repeats(agent_name_of(row) or "", row.get(ROLLOUT_INDEX_KEY_NAME, 0), [to_line(row)])


def _materialize(rules: RowRules, scan: InputScan) -> Iterator[Repeats]:
    numbers = _Numbers(scan)
    unused: list[str] = []
    for position, line in enumerate(iter_row_lines(rules.path)):
        if position >= scan.rows:
            return
        row: Row = parse(line.content)
        agent = rules.complete(row, unused)
        repeats = rules.repeats_of(agent) or 0
        row[TASK_INDEX_KEY_NAME], first = numbers.claim(row, line.content, repeats)
        if rules.shard is not None and not rules.shard.has_task(row[TASK_INDEX_KEY_NAME]):
            continue
        for start in range(first, first + repeats, _AT_ONCE):
            indices = range(start, min(start + _AT_ONCE, first + repeats))
            yield Repeats(agent, start, _lines(row, indices, add_seed=rules.add_seed))


def _lines(row: Row, indices: Iterable[int], *, add_seed: bool) -> list[bytes]:
    if not add_seed and ROLLOUT_INDEX_KEY_NAME not in row:
        head = to_line(row)[:-2] + _ROLLOUT_INDEX_BYTES
        return [head + b"%d}\n" % index for index in indices]
    params = row[RESPONSES_CREATE_PARAMS_KEY_NAME]
    lines = []
    for index in indices:
        seeded = with_seed(params, index) if add_seed else params
        lines.append(to_line({**row, RESPONSES_CREATE_PARAMS_KEY_NAME: seeded, ROLLOUT_INDEX_KEY_NAME: index}))
    return lines


class _Numbers:
    """Hands out task indices and counts the rollouts of tasks that occur on several lines."""

    def __init__(self, scan: InputScan) -> None:
        self._scan = scan
        self._supplied: Container[int] = scan.supplied if len(scan.supplied) else ()
        self._next_index = 0
        self._emitted: dict[Any, int] = {}
        """Rollouts so far of a supplied index that occurs more than once."""
        self._of_line: dict[bytes, int] = {}
        """Task index and rollouts so far of a repeated line, in one number: there may be very many."""

    def claim(self, row: Row, content: bytes, repeats: int) -> tuple[Any, int]:
        """The row's task index and the first of its rollout indices."""
        if TASK_INDEX_KEY_NAME not in row:
            if line_hash(content) in self._scan.repeated_lines:
                return self._claim_repeated_line(content, repeats)
            return self._fresh_index(), 0
        index = row[TASK_INDEX_KEY_NAME]
        if index not in self._scan.supplied_twice:
            return index, 0
        first = self._emitted.get(index, 0)
        self._emitted[index] = first + repeats
        return index, first

    def _claim_repeated_line(self, content: bytes, repeats: int) -> tuple[int, int]:
        # The hash that found it repeated may be wrong; this one is not.
        digest = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        known = self._of_line.get(digest)
        index, first = (self._fresh_index(), 0) if known is None else divmod(known, _MANY)
        self._of_line[digest] = index * _MANY + first + repeats
        return index, first

    def _fresh_index(self) -> int:
        index = self._next_index
        while index in self._supplied:
            index += 1
        self._next_index = index + 1
        return index
