"""The numbers of many rollouts, kept as columns instead of records.

A record is read once and may be thrown away: a run of a million rollouts costs a few dozen bytes per rollout here.
Records that carry the same numeric fields share one `Layout`, which knows where each field belongs in the statistics
and in `rollout_infos`.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.keys import RESPONSE_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.bad_records import (
    DUPLICATE_KEY,
    INDICES_UNUSABLE,
    NOT_AN_OBJECT,
    RESPONSE_NOT_AN_OBJECT,
    REWARD_NOT_A_NUMBER,
    USAGE_NOT_AN_OBJECT,
    BadRecords,
)

REWARD = "reward"
_INDEX_KEYS = frozenset((TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME))
_INDEX_BOUND = 2**63
_EXACT_FLOAT = 2**53
_NOTHING: dict[str, Any] = {}

Shape = tuple[str | type | None, ...]
"""Field names and value types of a record's numbers: the top-level ones, None, then those of its usage."""


class Field(NamedTuple):
    """One number of a record: its name and its place among the record's stored values."""

    name: str
    position: int


class Layout(NamedTuple):
    """What the stored values of every record of one shape mean."""

    size: int
    statistics: tuple[Field, ...]
    infos: tuple[Field, ...]
    integers: tuple[int, ...]
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
        self.exact: dict[int, int] = {}
        """Integers too large for a float, by their place in `values`."""
        self.values = array("d")
        self.offsets = array("q")
        self.layout_ids = array("q")
        self.tasks = array("q")
        self.rollouts = array("q")
        self._layout_id_of: dict[Shape, int] = {}
        self._seen = 0

    def __len__(self) -> int:
        return len(self.tasks)

    def add(self, record: object) -> bool:
        """Read one record; false when it has no place in any number and was only named in `bad`."""
        self._seen += 1
        if not isinstance(record, Mapping):
            self.bad.note(f"record {self._seen}", NOT_AN_OBJECT)
            return False
        task, rollout = record.get(TASK_INDEX_KEY_NAME), record.get(ROLLOUT_INDEX_KEY_NAME)
        if not (_is_index(task) and _is_index(rollout)):
            self.bad.note(f"record {self._seen}", INDICES_UNUSABLE)
            return False
        usage, complaints = _usage_of(record)
        if REWARD in record and not isinstance(record[REWARD], (int, float)):
            complaints.append(REWARD_NOT_A_NUMBER)
        if complaints:
            self.bad.note(f"{task}:{rollout}", *complaints)
        self.tasks.append(task)
        self.rollouts.append(rollout)
        self._store(record, usage)
        return True

    def sorted(self) -> "SortedRollouts":
        """The rollouts read so far in key order; of rollouts with one key, the one that came first."""
        return SortedRollouts(self)

    def _store(self, record: Mapping[str, Any], usage: Mapping[str, Any]) -> None:
        shape: list[str | type | None] = []
        numbers: list[float] = []
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in _INDEX_KEYS:
                shape += (name, type(value))
                numbers.append(value)
        shape.append(None)
        for name, value in usage.items():
            if isinstance(value, (int, float)) and name not in _INDEX_KEYS:
                shape += (name, type(value))
                numbers.append(value)
        layout_id = self._layout_id(tuple(shape))
        for position in self.layouts[layout_id].integers:
            if not -_EXACT_FLOAT <= numbers[position] <= _EXACT_FLOAT:
                self.exact[len(self.values) + position] = int(numbers[position])
                numbers[position] = _nearest_float(numbers[position])
        self.layout_ids.append(layout_id)
        self.offsets.append(len(self.values))
        self.values.extend(numbers)

    def _layout_id(self, shape: Shape) -> int:
        layout_id = self._layout_id_of.get(shape)
        if layout_id is None:
            layout_id = self._layout_id_of[shape] = len(self.layouts)
            self.layouts.append(_layout_of(shape))
        return layout_id


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
        self.task_ids, self.starts, self.task_ordinals = _runs(self.tasks)
        """The distinct tasks ascending, where each one's rollouts start, and each rollout's task as an ordinal."""
        self._layout_ids = np.array(table.layout_ids, np.int64)[self.rows]
        self._offsets = np.array(table.offsets, np.int64)[self.rows]

    def __len__(self) -> int:
        return len(self.tasks)

    def columns(self) -> list[Column]:
        """The fields that count as metrics, in order of first appearance, each with its values in key order."""
        values = np.array(self._table.values, np.float64)
        pieces: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        by_layout = np.argsort(self._layout_ids, kind="stable")
        _, starts, _ = _runs(self._layout_ids[by_layout])
        same_layout = np.split(by_layout, starts[1:]) if len(starts) else []
        for ranks in sorted(same_layout, key=lambda ranks: int(ranks[0])):
            offsets = self._offsets[ranks]
            for field in self._table.layouts[self._layout_ids[ranks[0]]].statistics:
                pieces.setdefault(field.name, []).append((ranks, values[offsets + field.position]))
        return [_joined(name, parts) for name, parts in pieces.items()]

    def only_integers(self) -> bool:
        """Whether every field that counts as a metric holds a whole number in every rollout."""
        layouts = [self._table.layouts[layout_id] for layout_id in np.unique(self._layout_ids).tolist()]
        fields = {frozenset(field.name for field in layout.statistics) for layout in layouts}
        return len(fields) <= 1 and all(layout.only_integers for layout in layouts)

    def infos(self, start: int, end: int) -> list[dict[str, Any]]:
        """The `rollout_infos` of the rollouts from place `start` up to `end`."""
        tasks, rollouts = self.tasks[start:end].tolist(), self.rollouts[start:end].tolist()
        places = zip(self._layout_ids[start:end].tolist(), self._offsets[start:end].tolist(), strict=True)
        return [
            {
                "rollout_id": f"{task}:{rollout}",
                TASK_INDEX_KEY_NAME: task,
                ROLLOUT_INDEX_KEY_NAME: rollout,
                **self._numbers(layout_id, offset),
            }
            for task, rollout, (layout_id, offset) in zip(tasks, rollouts, places, strict=True)
        ]

    def _numbers(self, layout_id: int, offset: int) -> dict[str, float]:
        layout = self._table.layouts[layout_id]
        numbers: list[float] = self._table.values[offset : offset + layout.size].tolist()
        for position in layout.integers:
            exact = self._table.exact.get(offset + position) if self._table.exact else None
            numbers[position] = int(numbers[position]) if exact is None else exact
        return {field.name: numbers[field.position] for field in layout.infos}


def _usage_of(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    response = record.get(RESPONSE_KEY_NAME, _NOTHING)
    if not isinstance(response, Mapping):
        return _NOTHING, [RESPONSE_NOT_AN_OBJECT]
    usage = response.get("usage")
    if isinstance(usage, Mapping):
        return usage, []
    return _NOTHING, [] if usage is None else [USAGE_NOT_AN_OBJECT]


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INDEX_BOUND <= value < _INDEX_BOUND


def _nearest_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("nan")


def _layout_of(shape: Shape) -> Layout:
    top, usage, kinds = _positions(shape)
    both = [name for name in top if name in usage]
    statistics = top | {name: position for name, position in usage.items() if name != REWARD or name not in top}
    for name in both:
        if name == REWARD:
            statistics.setdefault(f"usage.{name}", usage[name])
        else:
            statistics.setdefault(f"result.{name}", top[name])
    infos = {REWARD: top[REWARD]} if REWARD in top else {}
    infos |= usage | top
    for name in both:
        infos.setdefault(f"usage.{name}", usage[name])
    shown = tuple(Field(*item) for item in statistics.items() if not item[0].startswith("_"))
    integers = tuple(position for position, kind in enumerate(kinds) if issubclass(kind, int))
    only_integers = all(field.position in integers for field in shown)
    return Layout(len(kinds), shown, tuple(Field(*item) for item in infos.items()), integers, only_integers)


def _positions(shape: Shape) -> tuple[dict[str, int], dict[str, int], list[type]]:
    top: dict[str, int] = {}
    usage: dict[str, int] = {}
    kinds: list[type] = []
    names = top
    for item in shape:
        if item is None:
            names = usage
        elif isinstance(item, str):
            names[item] = len(kinds)
        else:
            kinds.append(item)
    return top, usage, kinds


def _joined(name: str, parts: list[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> Column:
    if len(parts) == 1:
        return Column(name, *parts[0])
    ranks = np.concatenate([part[0] for part in parts])
    order = np.argsort(ranks, kind="stable")
    return Column(name, ranks[order], np.concatenate([part[1] for part in parts])[order])


def _runs(ordered: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Distinct values of an ascending array, where each run starts, and each element's run."""
    changes = np.ones(len(ordered), bool)
    changes[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(changes).astype(np.int64)
    return ordered[starts], starts, np.cumsum(changes, dtype=np.int64) - 1
