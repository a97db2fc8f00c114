"""The numbers of many rollouts, kept as columns instead of records, in key order when they are read.

A record is read once and may be thrown away: a run of a million rollouts costs a few dozen bytes per rollout here.
Records that carry the same numeric fields share one `Layout`, which knows where each field belongs in the statistics
and in `rollout_infos`. Records that could not be used in full are counted, with why, and which ones.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from nemo_gym.keys import OWN_KEY_PREFIX, RESPONSE_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME

NOT_AN_OBJECT = "record is not an object"
INDICES_UNUSABLE = "_ng_task_index or _ng_rollout_index is missing or not an integer"
DUPLICATE_KEY = "rollout key occurred before; the first record was kept"
REWARD_NOT_A_NUMBER = "reward is not a number"
RESPONSE_NOT_AN_OBJECT = "response is not an object"
USAGE_NOT_AN_OBJECT = "response.usage is not an object"
BAD_RECORDS_KEY = "bad_records"
BAD_RECORDS_BY_REASON_KEY = "bad_records_by_reason"
REWARD = "reward"
ROLLOUT_ID = "rollout_id"
"""The name `rollout_infos` gives to a rollout's key; a field of that name gives way."""
_INDEX_KEYS = frozenset((TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME))
_INDEX_BOUND = 2**63
_EXACT_FLOAT = 2**53
_SHAPES_REMEMBERED = 10_000
_SETTLED_AT_A_TIME = 50_000
Shape = tuple[Any, ...]
"""Field names and then value types of a record, the type of its usage, and the same of the usage's fields."""
_INFOS_AT_A_TIME = 4096


class BadRecords:
    """Counts every bad record and names the first `named` of each reason, so that memory stays bounded."""

    def __init__(self, named: int = 20) -> None:
        self.count = 0
        self._named = named
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}

    def note(self, name: str, *reasons: str) -> None:
        """Count one record, called `name` (`task:rollout` when it has a key), under each of `reasons`."""
        self.count += 1
        for reason in reasons:
            self._counts[reason] = self._counts.get(reason, 0) + 1
            names = self._names.setdefault(reason, [])
            if len(names) < self._named:
                names.append(name)

    def copy(self) -> "BadRecords":
        """An independent copy."""
        twin = BadRecords(self._named)
        twin.count, twin._counts = self.count, dict(self._counts)
        twin._names = {reason: list(names) for reason, names in self._names.items()}
        return twin

    def summary(self) -> dict[str, Any]:
        """Entries for `agent_metrics`; empty when every record was good.

        `bad_records` is the number of records; `bad_records_by_reason` maps each reason to its `count` and to the
        names of the first `records`. A record with two faults is listed under both.
        """
        if not self.count:
            return {}
        by_reason = {
            reason: {"count": count, "records": list(self._names[reason])} for reason, count in self._counts.items()
        }
        return {BAD_RECORDS_KEY: self.count, BAD_RECORDS_BY_REASON_KEY: by_reason}


class Layout(NamedTuple):
    """Which numbers are stored for the records of one shape, and what they mean.

    A position is a value's place among those stored for one record: the record's own, then those of its usage.
    """

    size: int
    statistics: tuple[tuple[str, int], ...]
    """Names and positions of the fields that count as metrics."""
    info_names: tuple[str, ...]
    info_positions: tuple[int, ...]
    integers: tuple[int, ...]
    """Positions of whole numbers."""
    only_integers: bool
    """Whether every field of `statistics` holds whole numbers (bools included)."""


class RolloutTable:
    """Reads records one by one and keeps their numbers.

    A record's numbers are its top-level bools, ints and floats and those directly inside `response.usage`. What cannot
    be used is left out and named in `bad`; nothing raises.
    """

    def __init__(self) -> None:
        self.bad = BadRecords()
        self.layouts: list[Layout] = []
        self.layout_ids = array("q")
        self.tasks = array("q")
        self.rollouts = array("q")
        self.exact: dict[int, int] = {}
        """Integers too large for a float, by their place in the values."""
        self._values = array("d")
        self._recent: list[float] = []
        self._readers: dict[Shape, _Reader] = {}
        self._id_of_layout: dict[Layout, int] = {}
        self._seen = 0

    def __len__(self) -> int:
        return len(self.tasks)

    def add(self, record: object) -> bool:
        """Read one record; false when it has no place in any number and was only named in `bad`."""
        self._seen += 1
        if not isinstance(record, dict):
            self.bad.note(f"record {self._seen}", NOT_AN_OBJECT)
            return False
        task, rollout = record.get(TASK_INDEX_KEY_NAME), record.get(ROLLOUT_INDEX_KEY_NAME)
        if not (is_index(task) and is_index(rollout)):
            self.bad.note(f"record {self._seen}", INDICES_UNUSABLE)
            return False
        response = record.get(RESPONSE_KEY_NAME)
        given_usage = response.get("usage") if isinstance(response, dict) else None
        usage = given_usage if isinstance(given_usage, dict) else {}
        shape = (*record, *map(type, record.values()), type(given_usage), *usage, *map(type, usage.values()))
        reader = self._readers.get(shape) or self._learn(shape, len(record))
        if reader.complaints:
            self.bad.note(f"{task}:{rollout}", *reader.complaints)
        self.tasks.append(task)
        self.rollouts.append(rollout)
        self.layout_ids.append(reader.layout_id)
        self._recent += reader.of_record(record)
        self._recent += reader.of_usage(usage)
        if len(self._recent) >= _SETTLED_AT_A_TIME:
            self._settle()
        return True

    def values(self) -> NDArray[np.float64]:
        """Every stored number, record after record."""
        self._settle()
        return np.array(self._values, np.float64)

    def _settle(self) -> None:
        """Move recent numbers to the compact store."""
        try:
            numbers = np.array(self._recent, np.float64)
        except OverflowError:
            numbers = np.array([_nearest_float(number) for number in self._recent], np.float64)
        if not np.all(np.abs(numbers) <= _EXACT_FLOAT):
            for place, number in enumerate(self._recent, len(self._values)):
                if isinstance(number, int) and not -_EXACT_FLOAT <= number <= _EXACT_FLOAT:
                    self.exact[place] = number
        self._values.frombytes(numbers.tobytes())
        self._recent.clear()

    def _learn(self, shape: Shape, record_size: int) -> "_Reader":
        if len(self._readers) >= _SHAPES_REMEMBERED:
            self._readers.clear()
        record_kinds = _paired(shape[: 2 * record_size])
        usage_kinds = _numeric(_paired(shape[2 * record_size + 1 :]))
        complaints = _complaints(record_kinds, shape[2 * record_size])
        record_kinds = _numeric(record_kinds)
        layout = _layout_of(record_kinds, usage_kinds)
        layout_id = self._id_of_layout.setdefault(layout, len(self.layouts))
        if layout_id == len(self.layouts):
            self.layouts.append(layout)
        reader = _Reader(layout_id, _taker(record_kinds), _taker(usage_kinds), complaints)
        self._readers[shape] = reader
        return reader


class _Reader(NamedTuple):
    """How to take the numbers from a record of one shape, and what is wrong with it."""

    layout_id: int
    of_record: Callable[[dict[str, Any]], tuple[float, ...]]
    of_usage: Callable[[dict[str, Any]], tuple[float, ...]]
    complaints: tuple[str, ...]


def is_index(value: object) -> TypeGuard[int]:
    """Whether `value` can be a task or rollout index: an integer of 64 bits."""
    return type(value) is int and -_INDEX_BOUND <= value < _INDEX_BOUND


def _complaints(kinds: dict[str, type], usage_kind: type) -> tuple[str, ...]:
    complaints = []
    if not issubclass(kinds.get(RESPONSE_KEY_NAME, dict), dict):
        complaints.append(RESPONSE_NOT_AN_OBJECT)
    if not issubclass(usage_kind, (dict, type(None))):
        complaints.append(USAGE_NOT_AN_OBJECT)
    if not issubclass(kinds.get(REWARD, float), (int, float)):
        complaints.append(REWARD_NOT_A_NUMBER)
    return tuple(complaints)


def _nearest_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("nan")


def _paired(names_and_kinds: tuple[Any, ...]) -> dict[str, type]:
    """Fields and their types; a key that is no text cannot come from JSON and is ignored."""
    half = len(names_and_kinds) // 2
    pairs = zip(names_and_kinds[:half], names_and_kinds[half:], strict=True)
    return {name: kind for name, kind in pairs if isinstance(name, str)}


def _numeric(kinds: dict[str, type]) -> dict[str, type]:
    return {name: kind for name, kind in kinds.items() if issubclass(kind, (int, float)) and name not in _INDEX_KEYS}


def _taker(names: Iterable[str]) -> Callable[[dict[str, Any]], tuple[float, ...]]:
    """A function that takes the values of `names` from a dict, as a tuple."""
    wanted = tuple(names)
    if len(wanted) > 1:
        return itemgetter(*wanted)
    return lambda fields: tuple(fields[name] for name in wanted)


def _layout_of(record_kinds: dict[str, type], usage_kinds: dict[str, type]) -> Layout:
    """Where a name is both a result's and its usage's, statistics show the usage's and infos the result's.

    The other of the two is shown as `result.<name>` and `usage.<name>`. A `reward` is always the result's.
    """
    result_fields = {name: position for position, name in enumerate(record_kinds)}
    usage_fields = {name: position for position, name in enumerate(usage_kinds, len(record_kinds))}
    if REWARD in usage_fields:
        usage_fields[f"usage.{REWARD}"] = usage_fields.pop(REWARD)
    statistics, infos = result_fields | usage_fields, usage_fields | result_fields
    if REWARD in result_fields:
        infos = {REWARD: result_fields[REWARD]} | infos
    for name in [name for name in result_fields if name in usage_fields]:
        statistics.setdefault(f"result.{name}", result_fields[name])
        infos.setdefault(f"usage.{name}", usage_fields[name])
    infos.pop(ROLLOUT_ID, None)
    metrics = {name: position for name, position in statistics.items() if not name.startswith(OWN_KEY_PREFIX)}
    kinds = [*record_kinds.values(), *usage_kinds.values()]
    integers = tuple(position for position, kind in enumerate(kinds) if issubclass(kind, int))
    return Layout(
        size=len(kinds),
        statistics=tuple(metrics.items()),
        info_names=tuple(infos),
        info_positions=tuple(infos.values()),
        integers=integers,
        only_integers=set(metrics.values()) <= set(integers),
    )


class Column(NamedTuple):
    """One field's values: `ranks[i]` is the place in key order of the rollout that has `values[i]`."""

    name: str
    ranks: NDArray[np.int64]
    values: NDArray[np.float64]


class SortedRollouts:
    """A table's rollouts in ascending key order, one per key, as arrays of equal length."""

    def __init__(self, table: RolloutTable) -> None:
        self._table = table
        tasks, rollouts = np.array(table.tasks, np.int64), np.array(table.rollouts, np.int64)
        order = np.lexsort((rollouts, tasks))
        tasks, rollouts = tasks[order], rollouts[order]
        first = np.ones(len(order), bool)
        first[1:] = (tasks[1:] != tasks[:-1]) | (rollouts[1:] != rollouts[:-1])
        repeated = ~first
        self.bad = table.bad.copy()
        for task, rollout in zip(tasks[repeated].tolist(), rollouts[repeated].tolist(), strict=True):
            self.bad.note(f"{task}:{rollout}", DUPLICATE_KEY)
        self.tasks, self.rollouts = tasks[first], rollouts[first]
        self.rows: NDArray[np.int64] = order[first]
        """For each rollout the number of the accepted record it came from, counted from 0."""
        self.task_ids, self.starts, self.task_ordinals = runs(self.tasks)
        """The distinct tasks ascending, where each one's rollouts start, and each rollout's task as an ordinal."""
        layout_ids = np.array(table.layout_ids, np.int64)
        sizes = np.array([layout.size for layout in table.layouts], np.int64)
        self._values = table.values()
        self._layout_ids = layout_ids[self.rows]
        self._offsets = (np.cumsum(sizes[layout_ids]) - sizes[layout_ids])[self.rows]

    def __len__(self) -> int:
        return len(self.tasks)

    @cached_property
    def columns(self) -> list[Column]:
        """The fields that count as metrics, in order of first appearance, each with its values in key order."""
        pieces: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        by_layout = np.argsort(self._layout_ids, kind="stable")
        _, starts, _ = runs(self._layout_ids[by_layout])
        same_layout = np.split(by_layout, starts[1:]) if len(starts) else []
        for ranks in sorted(same_layout, key=lambda ranks: int(ranks[0])):
            offsets = self._offsets[ranks]
            for name, position in self._table.layouts[self._layout_ids[ranks[0]]].statistics:
                pieces.setdefault(name, []).append((ranks, self._values[offsets + position]))
        return [_joined(name, parts) for name, parts in pieces.items()]

    @cached_property
    def only_integers(self) -> bool:
        """Whether every field that counts as a metric holds a whole number in every rollout."""
        layouts = [self._table.layouts[layout_id] for layout_id in _distinct(self._layout_ids)]
        fields = {frozenset(name for name, _ in layout.statistics) for layout in layouts}
        return len(fields) <= 1 and all(layout.only_integers for layout in layouts)

    def iter_infos(self) -> Iterator[dict[str, Any]]:
        """The `rollout_infos` entry of every rollout, in key order."""
        for start in range(0, len(self), _INFOS_AT_A_TIME):
            yield from self._infos(start, min(start + _INFOS_AT_A_TIME, len(self)))

    def _infos(self, start: int, end: int) -> list[dict[str, Any]]:
        infos: list[Any] = [None] * (end - start)
        layout_ids = self._layout_ids[start:end]
        for layout_id in _distinct(layout_ids):
            places = np.flatnonzero(layout_ids == layout_id)
            layout, ranks = self._table.layouts[layout_id], places + start
            tasks, rollouts = self.tasks[ranks].tolist(), self.rollouts[ranks].tolist()
            rollout_ids = [f"{task}:{rollout}" for task, rollout in zip(tasks, rollouts, strict=True)]
            numbers = [self._stored(layout, position, ranks) for position in layout.info_positions]
            names = (ROLLOUT_ID, TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, *layout.info_names)
            rows = zip(rollout_ids, tasks, rollouts, *numbers, strict=True)
            for place, row in zip(places.tolist(), rows, strict=True):
                infos[place] = dict(zip(names, row))  # noqa: B905  (the check costs a tenth of the whole)
        return infos

    def _stored(self, layout: Layout, position: int, ranks: NDArray[np.int64]) -> list[float]:
        """The values at `position` as they were given: ints as ints, however large."""
        places = self._offsets[ranks] + position
        values = self._values[places]
        exact = self._table.exact
        numbers: list[float]
        if position not in layout.integers:
            numbers = values.tolist()
        elif not exact:
            numbers = values.astype(np.int64).tolist()
        else:
            pairs = zip(places.tolist(), values.tolist(), strict=True)
            numbers = [exact[place] if place in exact else int(value) for place, value in pairs]
        return numbers


def _distinct(ids: NDArray[np.int64]) -> list[int]:
    """The numbers of layouts among `ids`, sorted; np.unique would load numpy.ma, for 20 ms."""
    return np.flatnonzero(np.bincount(ids)).tolist()


def _joined(name: str, parts: list[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> Column:
    if len(parts) == 1:
        return Column(name, *parts[0])
    ranks = np.concatenate([part[0] for part in parts])
    order = np.argsort(ranks, kind="stable")
    return Column(name, ranks[order], np.concatenate([part[1] for part in parts])[order])


def runs(ordered: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Distinct values of an ascending array, where each run starts, and each element's run."""
    changes = np.ones(len(ordered), bool)
    changes[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(changes).astype(np.int64)
    return ordered[starts], starts, np.cumsum(changes, dtype=np.int64) - 1
