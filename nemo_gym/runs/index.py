"""Where every record of one or several files is, so that it can be read again when it is needed.

The records themselves are not kept: a record costs 48 bytes here, so a million of them are sorted and merged in some
hundred megabytes, however large they are. Each is handed once to whoever wants its content. The finished rollouts of a
run are found through it by agent, in task order: besides its place, only the numbers of a rollout are kept, and its
content passes through on its way to the agent that computes the metrics.
"""

import json
import math
import os
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic_core import from_json

from nemo_gym.errors import GymError
from nemo_gym.jsonl import Line, MalformedLineError, PlainLine, parse
from nemo_gym.keys import (
    OBSERVED_KEYS,
    RESPONSE_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    TIMING_KEY_NAME,
    USAGE_KEY_NAME,
)
from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.read import keys_in, plain_records, without_observations
from nemo_gym.runs.record import PREVIOUS_VERDICT_KEY, KeySet, Result, RolloutKey, agent_name_of, task_order
from nemo_gym.runs.spending import Percentiles
from nemo_gym.runs.store import RESUME_TO_REPAIR, FileChangedError
from nemo_gym.schemas.aggregate_metrics import AggregateMetricsRequest

Indices = NDArray[np.int64]
Take = Callable[[int, str | None, Result], object]
"""(number of the record, its agent, the record)"""
_NO_KEY: tuple[Any, Any] = (None, None)
_RECORDS_AT_A_TIME = 1 << 16
_MOST_OPEN_FILES = 64
_NOT_SENT = frozenset(
    {
        RESPONSE_KEY_NAME,
        RESPONSES_CREATE_PARAMS_KEY_NAME,
        TIMING_KEY_NAME,
        USAGE_KEY_NAME,
        PREVIOUS_VERDICT_KEY,
        *OBSERVED_KEYS,
    }
)
_SENT_LEVELS = AggregateMetricsRequest.MOST_LEVELS
_HEAD, _TAIL = b'{"verify_responses":[', b"]}"
_PIECE_BYTES = 1 << 16
_MOST_KEPT_BYTES = 32_000_000
"""Of what is sent for the metrics of a run: so much is kept from the first reading of the rollouts to that."""


class RecordGoneError(GymError):
    """A file was replaced or cut short while its records were being read."""


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
    """The end of a file whose writer was stopped in the middle of a line."""

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


class RecordIndex:
    """The records of some files, numbered from 0 in the order they were added."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.torn: list[TornTail] = []
        self.agents: list[str | None] = []
        """The agents that occur; None stands for records that name none."""
        self.agent_ids = array("i")
        self.tasks = array("q")
        self.rollouts = array("q")
        self.files = array("i")
        """For each record the place of its file among `paths`."""
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
        """Add everything in the files, handing each record to `take`.

        Raises:
            MalformedLineError: a line, other than a torn last one, is not a JSON object.
        """
        for number, path in enumerate(self.paths):
            try:
                self._read_file(number, path, take)
            except MalformedLineError as error:
                raise MalformedLineError(f"{error}. Correct or delete the line") from error

    def _read_file(self, file: int, path: Path, take: Take | None) -> None:
        def note_torn(line: Line) -> None:
            self.torn.append(TornTail(path, line.number, len(line.content)))

        for key, line, record in plain_records(path, "raise", may_lack_key=True, on_skipped=note_torn):
            agent = self.add(key, line, record, file)
            if take is not None:
                take(len(self.tasks) - 1, agent, record)

    def add(self, key: tuple[Any, Any] | None, line: PlainLine, record: Result, file: int = 0) -> str | None:
        """Note where a record of one of the files is, and return its agent."""
        agent = agent_name_of(record)
        line_number, _, _, content, offset = line
        task, rollout = key or _NO_KEY
        is_regular = type(task) is int and type(rollout) is int
        if is_regular:
            try:  # whether they fit is asked millions of times: it takes longer than to try
                self.tasks.append(task)
                self.rollouts.append(rollout)
            except OverflowError:
                is_regular = False
        if not is_regular:
            self._add_odd(task, rollout, record)
        agent_id = self._id_of_agent.get(agent)
        self.agent_ids.append(self._new_agent(agent) if agent_id is None else agent_id)
        self.files.append(file)
        self.lines.append(line_number)
        self.offsets.append(offset)
        self.lengths.append(len(content))
        return agent

    def _add_odd(self, task: Any, rollout: Any, record: Result) -> None:
        number = len(self.files)
        key = None if task is None or rollout is None else RolloutKey(task, rollout)
        self.odd[number] = _Odd(key, task_order(record))
        for column in (self.tasks, self.rollouts):
            column[number:] = array("q", (0,))

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

    def in_task_order(self) -> Indices:
        """The same, with those whose indices are not whole numbers where `task_order` puts them."""
        if not self.odd:
            return self.in_key_order()

        def order_of(number: int) -> tuple[Any, ...]:
            odd = self.odd.get(number)
            return (0, self.tasks[number], 0, self.rollouts[number]) if odd is None else odd.order

        return np.array(sorted(range(len(self)), key=order_of), np.int64)

    def keys(self, numbers: Indices) -> Keys:
        """The keys of some records."""
        odd: set[RolloutKey] = set()
        if self.odd:
            is_odd = np.isin(numbers, np.array(list(self.odd), np.int64))
            odd = {key for number in numbers[is_odd].tolist() if (key := self.odd[number].key) is not None}
            numbers = numbers[~is_odd]
        return Keys(_numbers(self.tasks)[numbers], _numbers(self.rollouts)[numbers], odd)

    def numbers_of(self, file: int, agent: str | None) -> Indices:
        """The records of one agent in one file."""
        files = np.frombuffer(self.files, np.intc) if self.files else np.empty(0, np.intc)
        start, end = np.searchsorted(files, (file, file + 1))
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
        return Piece(self.paths[self.files[number]], self.lines[number], self.offsets[number], self.lengths[number])

    def stretches(self, order: Indices, largest_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Where the records of `order` are, one after the other: (file, offset, length).

        Neighbours in `order` that are neighbours in a file become one stretch of about `largest_bytes` at most.
        """
        files, offsets, lengths = (np.frombuffer(self.files, np.intc), *map(_numbers, (self.offsets, self.lengths)))
        for start in range(0, len(order), _RECORDS_AT_A_TIME):
            portion = order[start : start + _RECORDS_AT_A_TIME]
            yield from _stretches(files[portion].astype(np.int64), offsets[portion], lengths[portion], largest_bytes)


class RecordReader(AbstractContextManager["RecordReader"]):
    """Reads records of an index again, with no more than a few of its files open at a time."""

    def __init__(self, index: RecordIndex) -> None:
        self._index = index
        self._open: OrderedDict[int, int] = OrderedDict()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def record(self, number: int) -> Result:
        """The record with that number; raises as `read`."""
        record: Result = parse(self.content(number))
        return record

    def content(self, number: int) -> bytes:
        """The bytes of the record with that number, as they are in the file; raises as `read`."""
        index = self._index
        return self.read(index.files[number], index.offsets[number], index.lengths[number])

    def read(self, file: int, offset: int, length: int) -> bytes:
        """So many bytes of a file.

        Raises:
            RecordGoneError: they are not there any more.
        """
        content = os.pread(self._descriptor(file), length, offset)
        while 0 < len(content) < length:
            more = os.pread(self._descriptor(file), length - len(content), offset + len(content))
            if not more:
                break
            content += more
        if len(content) != length:
            raise RecordGoneError(
                f"{self._index.paths[file]} became shorter while it was being read; wait until nobody writes to it"
            )
        return content

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
        else:
            if len(self._open) >= _MOST_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[file] = os.open(self._index.paths[file], os.O_RDONLY)
        return self._open[file]


def _numbers(values: "array[int]") -> Indices:
    """A view of an array; it must not grow while the view is in use."""
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)


def _stretches(
    files: Indices, offsets: Indices, lengths: Indices, largest_bytes: int
) -> Iterator[tuple[int, int, int]]:
    begins = np.ones(len(offsets), bool)
    begins[1:] = (files[1:] != files[:-1]) | (offsets[1:] != offsets[:-1] + lengths[:-1] + 1)
    run_starts = np.flatnonzero(begins)
    block = (offsets - offsets[run_starts][np.cumsum(begins) - 1]) // largest_bytes
    begins[1:] |= block[1:] != block[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(offsets)) - 1
    sizes = offsets[last] + lengths[last] - offsets[first]
    yield from zip(files[first].tolist(), offsets[first].tolist(), sizes.tolist(), strict=True)


def stripped(result: Mapping[str, Any]) -> Result:
    """A result without its bulk: of the response only the token usage is kept."""
    record = {key: value for key, value in result.items() if key not in _NOT_SENT}
    response = result.get(RESPONSE_KEY_NAME)
    usage = response.get("usage") if isinstance(response, dict) else None
    if usage:
        record[RESPONSE_KEY_NAME] = {"usage": usage}
    return record


def sendable(record: Mapping[str, Any]) -> bytes:
    """A record as JSON that every parser takes.

    Half a character, which models do produce, becomes a question mark, and what is nested too deeply becomes null.
    """
    try:
        content = orjson.dumps(record)
    except orjson.JSONEncodeError:
        content = b""
    if content and (content.count(b"[") + content.count(b"{") <= _SENT_LEVELS or _can_be_parsed(content)):
        return content
    return json.dumps(_cut(record, _SENT_LEVELS), ensure_ascii=False).encode(errors="replace")


def _can_be_parsed(content: bytes) -> bool:
    """Whether pydantic takes it as a part of a request: it gives up at 200 levels."""
    try:
        from_json(b"[[" + content + b"]]")
    except ValueError:
        return False
    return True


def _cut(value: Any, levels: int) -> Any:
    """A value with null for what is nested more deeply, and for numbers that are none."""
    if isinstance(value, dict | list) and not levels:
        return None
    if isinstance(value, dict):
        return {key: _cut(inner, levels - 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner, levels - 1) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Room:
    """How much may still be kept in memory, by all who share it."""

    bytes_left: int = _MOST_KEPT_BYTES


class StoredRollouts(Collection[Result]):
    """The finished rollouts of one agent, stripped, in task order; each iteration reads the file."""

    def __init__(self, path: Path, room: Room | None = None) -> None:
        """`room` is for what is to be sent of them; without it, and once it is used up, that is read again."""
        self._index = RecordIndex([path])
        self._order: array[int] | None = None
        self._records_bytes = 0
        self._room = room or Room(0)
        self._kept = bytearray()
        self._kept_to = array("q", (0,))
        self.table = RolloutTable()
        """The numbers of all of them."""
        self.percentiles = Percentiles()

    def add(self, key: tuple[Any, Any], line: PlainLine, result: Result) -> None:
        """Take in the result that stands on `line`."""
        record = stripped(result)
        content = sendable(record)
        self._index.add(key, line, result)
        self._order = None
        self._records_bytes += len(content)
        self._room.bytes_left -= len(content)
        if self._room.bytes_left >= 0:
            self._kept += content
            self._kept_to.append(len(self._kept))
        self.table.add(record)
        self.percentiles.add(result)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, record: object) -> bool:
        return any(other == record for other in self)

    def __iter__(self) -> Iterator[Result]:
        with RecordReader(self._index) as reader:
            for number in self._in_order():
                yield stripped(reader.record(number))

    def _in_order(self) -> "array[int]":
        if self._order is None:
            self._order = array("q", self._index.in_task_order().tobytes())
        return self._order

    def _contents(self) -> Iterator[bytes | bytearray]:
        """What is sent of each; what was kept for that is given up."""
        kept, ends = self._kept, self._kept_to
        self._kept, self._kept_to = bytearray(), array("q")
        if len(ends) <= len(self):
            yield from map(sendable, self)
            return
        for number in self._in_order():
            yield kept[ends[number] : ends[number + 1]]

    @property
    def body_bytes(self) -> int:
        """The length of `body`."""
        return len(_HEAD) + self._records_bytes + max(0, len(self) - 1) + len(_TAIL)

    async def body(self) -> AsyncIterator[bytes]:
        """The request for metrics as JSON, piece by piece."""
        piece = bytearray(_HEAD)
        for number, content in enumerate(self._contents()):
            if number:
                piece += b","
            piece += content
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        yield bytes(piece + _TAIL)


def stored_by_agent(paths: RolloutPaths, finished: int) -> dict[str, StoredRollouts]:
    """The finished rollouts of each agent; a key that is there twice counts once.

    `finished` is how many belong to rows of the run: when the file holds more, the others are left out.

    Raises:
        FileChangedError: the file holds fewer.
    """
    groups, found = _read(paths.rollouts, None)
    if found > finished:
        groups, found = _read(paths.rollouts, keys_in(paths.materialized_inputs))
    if found < finished:
        raise FileChangedError(
            f"{paths.rollouts} holds {found} of the {finished} finished rollouts of this run: another program has "
            f"written to it. {RESUME_TO_REPAIR}"
        )
    return groups


def _read(path: Path, wanted: KeySet | None) -> tuple[dict[str, StoredRollouts], int]:
    """The rollouts that are wanted, of every agent, and how many there are, also of nobody."""
    groups: dict[str, StoredRollouts] = {}
    seen, room = KeySet(), Room()
    for key, line, result in plain_records(path, "skip", read=without_observations):
        agent = agent_name_of(result)
        assert key is not None
        if (wanted is not None and key not in wanted) or not seen.add(key) or agent is None:
            continue
        if agent not in groups:
            groups[agent] = StoredRollouts(path, room)
        groups[agent].add(key, line, result)
    return groups, len(seen)
