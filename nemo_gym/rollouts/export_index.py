"""What is in a rollouts file, without holding it: where each rollout is and what it scored."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo_gym.jsonl import parse, read_objects
from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.metrics.ordered import SortedRollouts
from nemo_gym.metrics.profile import task_profiles
from nemo_gym.metrics.select import SelectError, select_tasks
from nemo_gym.rollouts.record import Outcome, RolloutKey, key_or_none, outcome_of


class Entry(NamedTuple):
    """One rollout of a file."""

    key: RolloutKey
    reward: float
    line: int
    start: int
    end: int


@dataclass
class RolloutIndex:
    """The usable rollouts of a file by task, and how many are not usable, by reason."""

    path: Path
    by_task: dict[int, list[Entry]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    _seen: set[RolloutKey] = field(default_factory=set)
    _table: RolloutTable | None = None

    @classmethod
    def of(cls, path: Path, *, with_statistics: bool) -> "RolloutIndex":
        """Read a file once; `with_statistics` keeps the numbers that `select` needs.

        Raises:
            ConfigError: a line is not a JSON object.
        """
        index = cls(path, _table=RolloutTable() if with_statistics else None)
        for line, record in read_objects(path, allow_torn=True):
            entry = index._entry(record, line.number, line.start, line.end)
            if isinstance(entry, str):
                index.left_out[entry] += 1
                continue
            index.by_task.setdefault(entry.key.task_index, []).append(entry)
            if index._table is not None:
                index._table.add(record)
        for entries in index.by_task.values():
            entries.sort()
        return index

    def select(self, expression: str) -> None:
        """Keep only the tasks for which the expression holds.

        Raises:
            SelectError: it is not an expression, or uses a name that no task has.
        """
        assert self._table is not None
        profiles = list(task_profiles(SortedRollouts(self._table)))
        try:
            positions = select_tasks(expression, profiles)
        except SelectError as error:
            raise SelectError(str(error).replace("+select", "+filter", 1)) from error
        tasks = {profiles[position][TASK_INDEX_KEY_NAME] for position in positions}
        self.by_task = {task: entries for task, entries in self.by_task.items() if task in tasks}

    def tasks(self) -> list[list[Entry]]:
        """The rollouts of each task, tasks and rollouts in order."""
        return [self.by_task[task] for task in sorted(self.by_task)]

    def _entry(self, record: dict[str, Any], line: int, start: int, end: int) -> Entry | str:
        """The entry for a record, or why there is none."""
        key = key_or_none(record)
        if key is None or type(key.task_index) is not int or type(key.rollout_index) is not int:
            return f"no {TASK_INDEX_KEY_NAME} and {ROLLOUT_INDEX_KEY_NAME}"
        if outcome_of(record) is not Outcome.SUCCESS:
            return "failed"
        reward = record.get("reward")
        if not isinstance(reward, bool | int | float) or not math.isfinite(reward):
            return "no reward"
        if key in self._seen:
            return "repeats a rollout key"
        self._seen.add(key)
        return Entry(key, float(reward), line, start, end)


class RecordReader:
    """Reads single records of an indexed file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    def __enter__(self) -> "RecordReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, entry: Entry) -> dict[str, Any]:
        """The record of an entry."""
        self._file.seek(entry.start)
        content = self._file.read(entry.end - entry.start).removeprefix(b"\xef\xbb\xbf")
        record: dict[str, Any] = parse(content.strip())
        return record
