"""The rollouts of a table in key order, from which every profile and every statistic is read."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.bad_records import DUPLICATE_KEY
from nemo_gym.metrics.columns import ROLLOUT_ID, Layout, RolloutTable

_INFOS_AT_A_TIME = 4096


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
        layouts = [self._table.layouts[layout_id] for layout_id in np.unique(self._layout_ids).tolist()]
        fields = {frozenset(name for name, _ in layout.statistics) for layout in layouts}
        return len(fields) <= 1 and all(layout.only_integers for layout in layouts)

    def iter_infos(self) -> Iterator[dict[str, Any]]:
        """The `rollout_infos` entry of every rollout, in key order."""
        for start in range(0, len(self), _INFOS_AT_A_TIME):
            yield from self._infos(start, min(start + _INFOS_AT_A_TIME, len(self)))

    def _infos(self, start: int, end: int) -> list[dict[str, Any]]:
        infos: list[Any] = [None] * (end - start)
        layout_ids = self._layout_ids[start:end]
        for layout_id in np.unique(layout_ids).tolist():
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
