"""Where every record of every shard is, read in one pass.

The records themselves are not kept: a record costs 48 bytes here, so a million of them are sorted and
merged in some hundred megabytes, however large they are. Each is handed once to whoever wants its content.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.jsonl import MalformedLineError, json_type, malformation, parse
from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.columns import is_index
from nemo_gym.rollouts.record import Result, RolloutKey, agent_name_of, key_or_none, task_order

logger = logging.getLogger(__name__)

Indices = NDArray[np.int64]
Take = Callable[[int, str | None, Result], object]
"""(number of the record, its agent, the record)"""

_BUFFER_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_RECORDS_AT_A_TIME = 1 << 16


class Piece(NamedTuple):
    """Where one record is."""

    path: Path
    line: int
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}"


class Keys(NamedTuple):
    """Keys of records: whole numbers in parallel arrays, and all others as they are."""

    tasks: Indices
    rollouts: Indices
    odd: set[RolloutKey]


@dataclass(frozen=True)
class TornTail:
    """The end of a shard whose writer was stopped in the middle of a line."""

    path: Path
    line: int
    length: int

    def __str__(self) -> str:
        return f"{self.path} ends in the middle of line {self.line}; its {self.length:,} bytes are left out"


@dataclass(frozen=True)
class _Odd:
    """A record whose indices are not two whole numbers."""

    key: RolloutKey | None
    order: tuple[Any, ...]


class ShardIndex:
    """The records of several shards, numbered from 0 in the order they were read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.torn: list[TornTail] = []
        self.agents: list[str | None] = []
        """The agents that occur; None stands for records that name none."""
        self.agent_ids = array("i")
        self.tasks = array("q")
        self.rollouts = array("q")
        self.shards = array("i")
        self.offsets = array("q")
        self.lengths = array("q")
        self.lines = array("q")
        self.odd: dict[int, _Odd] = {}
        """Records whose indices are not whole numbers; the arrays hold zeros for them."""
        self._id_of_agent: dict[str | None, int] = {}

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def without_key(self) -> int:
        """How many records do not say which rollout they are."""
        return sum(odd.key is None for odd in self.odd.values())

    def read(self, take: Take | None = None) -> None:
        """Read every shard, handing each record to `take`.

        Raises:
            MalformedLineError: a line, other than a torn last one, is not a JSON object.
        """
        for number, path in enumerate(self.paths):
            with path.open("rb", buffering=_BUFFER_BYTES) as file:
                self._read_shard(number, file, take)

    def _read_shard(self, shard: int, file: BinaryIO, take: Take | None) -> None:
        end = 0
        for line, raw in enumerate(file, 1):
            start, end = end, end + len(raw)
            content = raw.strip()
            if start == 0:
                content = content.removeprefix(_BYTE_ORDER_MARK)
            if not content:
                continue
            record = self._parsed(shard, line, raw, content)
            if record is None:
                return
            agent = agent_name_of(record)
            agent_id = self._id_of_agent.get(agent)
            self._note_key(record)
            self.agent_ids.append(self._new_agent(agent) if agent_id is None else agent_id)
            self.shards.append(shard)
            self.lines.append(line)
            self.offsets.append(start if raw.startswith(content) else start + raw.index(content))
            self.lengths.append(len(content))
            if take is not None:
                take(len(self.tasks) - 1, agent, record)

    def _parsed(self, shard: int, line: int, raw: bytes, content: bytes) -> Result | None:
        """The record; None for what is left of a line whose writer was stopped."""
        path = self.paths[shard]
        try:
            record = parse(content)
        except ValueError as error:
            if raw.endswith(b"\n"):
                raise MalformedLineError(
                    f"{path}, line {line}: {malformation(content, error)}. Correct or delete the line"
                ) from error
            self.torn.append(TornTail(path, line, len(content)))
            return None
        if not isinstance(record, dict):
            raise MalformedLineError(f"{path}, line {line}: expected a JSON object, found {json_type(record)}")
        return record

    def _note_key(self, record: Result) -> None:
        task, rollout = record.get(TASK_INDEX_KEY_NAME), record.get(ROLLOUT_INDEX_KEY_NAME)
        if is_index(task) and is_index(rollout):
            self.tasks.append(task)
            self.rollouts.append(rollout)
            return
        key = key_or_none(record)
        self.odd[len(self.tasks)] = _Odd(key if key is None or None not in key else None, task_order(record))
        self.tasks.append(0)
        self.rollouts.append(0)

    def _new_agent(self, agent: str | None) -> int:
        self.agents.append(agent)
        self._id_of_agent[agent] = len(self.agents) - 1
        return self._id_of_agent[agent]

    def in_key_order(self) -> Indices:
        """The numbers of all records by task, then rollout; those of one key in the order they were read.

        Records whose indices are not whole numbers come last.
        """
        order = np.lexsort((_numbers(self.rollouts), _numbers(self.tasks))).astype(np.int64, copy=False)
        if not self.odd:
            return order
        is_odd = np.zeros(len(self), bool)
        is_odd[list(self.odd)] = True
        odd = sorted(self.odd, key=lambda number: (self.odd[number].order, number))
        return np.concatenate([order[~is_odd[order]], np.array(odd, np.int64)])

    def keys(self, numbers: Indices) -> Keys:
        """The keys of some records."""
        odd: set[RolloutKey] = set()
        if self.odd:
            is_odd = np.isin(numbers, np.array(list(self.odd), np.int64))
            odd = {key for number in numbers[is_odd].tolist() if (key := self.odd[number].key) is not None}
            numbers = numbers[~is_odd]
        return Keys(_numbers(self.tasks)[numbers], _numbers(self.rollouts)[numbers], odd)

    def numbers_of(self, shard: int, agent: str | None) -> Indices:
        """The records of one agent in one shard."""
        shards = np.frombuffer(self.shards, np.intc) if self.shards else np.empty(0, np.intc)
        start, end = np.searchsorted(shards, (shard, shard + 1))
        agent_ids = np.array(self.agent_ids[start:end], np.intc)
        return np.flatnonzero(agent_ids == self._id_of_agent[agent]) + int(start)

    def repeated(self, order: Indices) -> list[list[int]]:
        """The records of every key that occurs more than once, in the order they were read."""
        regular = order[: len(order) - len(self.odd)]
        tasks, rollouts = _numbers(self.tasks)[regular], _numbers(self.rollouts)[regular]
        same_as_next = np.flatnonzero((tasks[1:] == tasks[:-1]) & (rollouts[1:] == rollouts[:-1]))
        groups: list[list[int]] = []
        previous = -2
        for place in same_as_next.tolist():
            if place != previous + 1:
                groups.append([int(regular[place])])
            groups[-1].append(int(regular[place + 1]))
            previous = place
        return groups + self._repeated_odd()

    def _repeated_odd(self) -> list[list[int]]:
        by_key: dict[RolloutKey, list[int]] = {}
        for number, odd in self.odd.items():
            if odd.key is not None:
                by_key.setdefault(odd.key, []).append(number)
        return [numbers for numbers in by_key.values() if len(numbers) > 1]

    def key_of(self, number: int) -> RolloutKey | None:
        """Which rollout a record is; None when it does not say."""
        odd = self.odd.get(number)
        return RolloutKey(self.tasks[number], self.rollouts[number]) if odd is None else odd.key

    def agent_of(self, number: int) -> str | None:
        """The agent of a record."""
        return self.agents[self.agent_ids[number]]

    def piece(self, number: int) -> Piece:
        """Where a record is."""
        return Piece(self.paths[self.shards[number]], self.lines[number], self.offsets[number], self.lengths[number])

    def stretches(self, order: Indices, largest_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Where the records of `order` are, one after the other: (shard, offset, length).

        Neighbours in `order` that are neighbours in a file become one stretch of about `largest_bytes` at most.
        """
        shards, offsets, lengths = (np.frombuffer(self.shards, np.intc), *map(_numbers, (self.offsets, self.lengths)))
        for start in range(0, len(order), _RECORDS_AT_A_TIME):
            portion = order[start : start + _RECORDS_AT_A_TIME]
            yield from _stretches(shards[portion].astype(np.int64), offsets[portion], lengths[portion], largest_bytes)


def _numbers(values: "array[int]") -> Indices:
    """A view of an array; it must not grow while the view is in use."""
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)


def _stretches(
    shards: Indices, offsets: Indices, lengths: Indices, largest_bytes: int
) -> Iterator[tuple[int, int, int]]:
    begins = np.ones(len(offsets), bool)
    begins[1:] = (shards[1:] != shards[:-1]) | (offsets[1:] != offsets[:-1] + lengths[:-1] + 1)
    run_starts = np.flatnonzero(begins)
    block = (offsets - offsets[run_starts][np.cumsum(begins) - 1]) // largest_bytes
    begins[1:] |= block[1:] != block[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(offsets)) - 1
    sizes = offsets[last] + lengths[last] - offsets[first]
    yield from zip(shards[first].tolist(), offsets[first].tolist(), sizes.tolist(), strict=True)
