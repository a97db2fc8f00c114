"""Reward profile: statistics of results per task and per agent, checked against the rows that asked for them.

Mean, max, min, median and standard deviation of every field in every group are computed a column at a time.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nemo_gym.keys import AGENT_REF_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.columns import Column, RolloutTable, SortedRollouts, is_index, runs
from nemo_gym.paths import write_aside

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Entry = tuple[str, Indices, NDArray[Any]]
"""A key, the groups that have it, ascending, and their values."""
STATISTICS = ("mean", "max", "min", "median", "std")
"""In the order of their keys."""
_VALUES_AT_A_TIME = 100_000
_TASKS_AT_A_TIME = 8192
"""How many numbers are turned into dicts ahead of the reader."""
Record = Mapping[str, Any]
Pair = tuple[Record, Record]
_KEYS_NAMED = 10


class GroupStatistics(NamedTuple):
    """The statistics of one field; each array is parallel to `groups`, the groups that have a value at all."""

    groups: Indices
    counts: Indices
    mean: Floats
    max: Floats
    min: Floats
    median: Floats
    std: Floats
    """Divisor n-1; NaN where it is undefined."""


def group_statistics(values: Floats, groups: Indices) -> GroupStatistics:
    """Statistics of `values` per group; `groups[i]` is the group of `values[i]`, NaN counts as absent."""
    present = ~np.isnan(values)
    values, groups = values[present], groups[present]
    if len(groups) and np.any(groups[1:] < groups[:-1]):
        order = np.argsort(groups, kind="stable")
        values, groups = values[order], groups[order]
    distinct, starts, _ = runs(groups)
    counts = np.diff(starts, append=len(groups))
    if not len(distinct):
        nothing = np.empty(0)
        return GroupStatistics(distinct, counts, nothing, nothing, nothing, nothing, nothing)
    with np.errstate(all="ignore"):  # infinities and overflow: what is undefined becomes NaN and gets no key
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        # Rounding could push a mean just outside its values, and give equal values a deviation.
        mean = np.clip(np.add.reduceat(values, starts) / counts, low, high)
        deviations = values - np.repeat(mean, counts)
        std = np.sqrt(np.add.reduceat(deviations * deviations, starts) / (counts - 1))
    std[counts < 2] = np.nan
    return GroupStatistics(distinct, counts, mean, high, low, _medians(values, groups, starts, counts), std)


def iter_group_dicts(
    columns: Sequence[Column],
    group_of_rank: Indices,
    num_groups: int,
    *,
    whole: bool = False,
    leading: tuple[str, Indices] | None = None,
) -> Iterator[dict[str, Any]]:
    """For each group in turn the dict of its statistics, keyed `<statistic>/<field>`, ordered by statistic.

    `group_of_rank[r]` is the group of the rollout at place r. An undefined number has no key, with one exception: in a
    group of one rollout, whose every std is undefined, std is 0.0. With `whole`, max and min are ints. `leading` is a
    key put before the statistics, with its value for each group.
    """
    sizes = np.bincount(group_of_rank, minlength=num_groups)
    per_field = [(column.name, group_statistics(column.values, group_of_rank[column.ranks])) for column in columns]
    entries: list[Entry] = []
    if leading is not None:
        entries.append((leading[0], np.arange(num_groups), leading[1]))
    for statistic in STATISTICS:
        for name, statistics in per_field:
            values: NDArray[Any] = getattr(statistics, statistic)
            if statistic == "std":
                values = np.where(sizes[statistics.groups] == 1, 0.0, values)
            defined = ~np.isnan(values)
            groups = statistics.groups
            if not defined.all():  # else nothing is copied
                values, groups = values[defined], groups[defined]
            if whole and statistic in ("max", "min"):
                values = np.array([int(value) for value in values.tolist()], object)
            entries.append((f"{statistic}/{name}", groups, values))
    num_values = sum(len(values) for _, _, values in entries)
    yield from _dicts(entries, num_groups, max(1, _VALUES_AT_A_TIME * num_groups // max(num_values, 1)))


def _dicts(entries: Sequence[Entry], num_groups: int, portion: int) -> Iterator[dict[str, Any]]:
    """Yield the dict of each group, of which `portion` are made at a time.

    A portion looks at the entries that have a value in it, not at all of them: there may be as many entries as values.
    """
    waiting: dict[int, list[tuple[int, int]]] = {}  # portion -> (number of an entry, place of its next value)
    for number, (_, groups, _) in enumerate(entries):
        if len(groups):
            waiting.setdefault(int(groups[0]) // portion, []).append((number, 0))
    for start in range(0, num_groups, portion):
        end = min(start + portion, num_groups)
        dicts: list[dict[str, Any]] = [{} for _ in range(start, end)]
        for number, low in sorted(waiting.pop(start // portion, ())):
            key, groups, values = entries[number]
            high = int(np.searchsorted(groups, end))
            for place, value in zip((groups[low:high] - start).tolist(), values[low:high].tolist(), strict=True):
                dicts[place][key] = value
            if high < len(groups):
                waiting.setdefault(int(groups[high]) // portion, []).append((number, high))
        yield from dicts


def _medians(values: Floats, groups: Indices, starts: Indices, counts: Indices) -> Floats:
    if np.all(counts == counts[0]):
        values = np.sort(values.reshape(len(counts), counts[0]), axis=1).ravel()
    else:
        values = values[np.lexsort((values, groups))]
    with np.errstate(all="ignore"):
        middle: Floats = (values[starts + (counts - 1) // 2] + values[starts + counts // 2]) / 2
    return middle


class _Key(NamedTuple):
    """Identity of one rollout; sorts in task order."""

    task_index: int
    rollout_index: int


class RewardProfiler:
    """Profiles results against materialized rows. Input order never matters; a repeated rollout key is an error."""

    def align_rows_and_results(
        self, rows: Sequence[Record], results: Sequence[Record], allow_partial_rollouts: bool = False
    ) -> list[Pair]:
        """The matched (row, result) pairs in ascending key order.

        Raises ValueError for a repeated key, for results that no row asked for and, unless partial rollouts are
        allowed, for rows without a result.
        """
        row_of, result_of = _by_key(rows, "materialized input"), _by_key(results, "result")
        extra = sorted(result_of.keys() - row_of.keys())
        if extra:
            raise ValueError(
                f"{len(extra)} result rows have no matching materialized input; first keys: {_named(extra)}. "
                "Use the materialized inputs of the run that wrote these rollouts"
            )
        missing = sorted(row_of.keys() - result_of.keys())
        if missing and not allow_partial_rollouts:
            raise ValueError(
                f"{len(missing)} materialized input rows have no result; first keys: {_named(missing)}. "
                "Finish the run, or profile what is there with ++allow_partial_rollouts=True"
            )
        return [(row_of[key], result_of[key]) for key in sorted(result_of)]

    def profile_completion_summary(self, rows: Sequence[Record], results: Sequence[Record]) -> dict[str, Any]:
        """How many rollouts and tasks of `rows` have results, as counts and a percentage."""
        wanted, got = _by_key(rows, "materialized input").keys(), _by_key(results, "result").keys()
        matched = wanted & got
        wanted_per_task, matched_per_task = _per_task(wanted), _per_task(matched)
        complete = sum(matched_per_task[task] == count for task, count in wanted_per_task.items())
        return {
            "expected_rollout_rows": len(wanted),
            "completed_rollout_rows": len(matched),
            "missing_rollout_rows": len(wanted) - len(matched),
            "extra_rollout_rows": len(got - wanted),
            "reward_profile_completion_pct": 100.0 * len(matched) / len(wanted) if wanted else 100.0,
            "total_input_rows": len(wanted_per_task),
            "complete_input_rows": complete,
            "partial_input_rows": len(matched_per_task) - complete,
            "missing_input_rows": len(wanted_per_task) - len(matched_per_task),
        }

    def profile_from_data(
        self, rows: Sequence[Record], results: Sequence[Record], allow_partial_rollouts: bool = False
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Statistics per task, and pooled per agent of the rows.

        Raises ValueError as `align_rows_and_results` does. A number a result lacks is left out of the statistics it
        belongs to; results that could not be used in full are named in a warning.
        """
        pairs = self.align_rows_and_results(rows, results, allow_partial_rollouts)
        table = RolloutTable()
        for _, result in pairs:
            table.add(result)
        if table.bad.count:
            logger.warning("some results could not be used in full: %s", table.bad.summary())
        rollouts = SortedRollouts(table)
        expected = _per_task(_key_of(row, "materialized input", number) for number, row in enumerate(rows))
        groups = list(task_profiles(rollouts, expected, [pairs[start][0] for start in rollouts.starts.tolist()]))
        return groups, _agent_profiles(rollouts, [row for row, _ in pairs])

    def prepare_for_serialization(self, metrics: Iterable[Record]) -> list[dict[str, Any]]:
        """Copies without the `histogram…` entries, which exist in memory only."""
        return [{key: value for key, value in entry.items() if not key.startswith("histogram")} for entry in metrics]

    def write_to_disk(
        self, group_level_metrics: Iterable[Record], agent_level_metrics: Iterable[Record], base_path: str | Path
    ) -> tuple[Path, Path]:
        """Write both levels beside `base_path` and return the two paths; an interrupted write leaves no half file."""
        base = Path(base_path)
        groups_path = base.with_name(f"{base.stem}_reward_profiling.jsonl")
        agents_path = base.with_name(f"{base.stem}_agent_metrics.json")
        lines = (orjson.dumps(entry) + b"\n" for entry in self.prepare_for_serialization(group_level_metrics))
        _write(groups_path, lines)
        _write(agents_path, [orjson.dumps(self.prepare_for_serialization(agent_level_metrics))])
        return groups_path, agents_path


def task_profiles(
    rollouts: SortedRollouts,
    expected: Mapping[int, int] | None = None,
    first_rows: Sequence[Record] | None = None,
) -> Iterator[dict[str, Any]]:
    """One dict per task, ascending.

    `expected` is the number of rows per task (by default as many as there are rollouts), `first_rows` the row shown as
    each task's sample (by default a placeholder).
    """
    tasks = rollouts.task_ids
    profiles = chain.from_iterable(
        _statistics_of_tasks(rollouts, first, min(first + _TASKS_AT_A_TIME, len(tasks)))
        for first in range(0, len(tasks), _TASKS_AT_A_TIME)
    )
    counts = np.diff(rollouts.starts, append=len(rollouts)).tolist()
    infos = rollouts.iter_infos()
    for ordinal, (profile, count) in enumerate(zip(profiles, counts, strict=True)):
        wanted = count if expected is None else expected[profile[TASK_INDEX_KEY_NAME]]
        profile["sample"] = (
            {AGENT_REF_KEY_NAME: {"name": "agent"}} if first_rows is None else _sample(first_rows[ordinal])
        )
        profile["num_rollouts"] = count
        profile["expected_num_rollouts"] = wanted
        profile["missing_num_rollouts"] = wanted - count
        profile["reward_profile_completion_pct"] = 100.0 * count / wanted
        profile["rollout_infos"] = list(islice(infos, count))
        yield profile


def _statistics_of_tasks(rollouts: SortedRollouts, first: int, end: int) -> Iterator[dict[str, Any]]:
    """Those of some tasks that follow each other: the arrays for all of them would be larger than the rollouts."""
    starts = [*rollouts.starts[first : end + 1].tolist(), len(rollouts)]
    low, high = starts[0], starts[end - first]
    columns = []
    for column in rollouts.columns:
        begin, stop = np.searchsorted(column.ranks, (low, high))
        if begin < stop:
            columns.append(Column(column.name, column.ranks[begin:stop] - low, column.values[begin:stop]))
    return iter_group_dicts(
        columns,
        rollouts.task_ordinals[low:high] - first,
        end - first,
        whole=rollouts.only_integers,
        leading=(TASK_INDEX_KEY_NAME, rollouts.task_ids[first:end]),
    )


def pooled_statistics(rollouts: SortedRollouts) -> dict[str, float]:
    """The statistics over all rollouts together."""
    everything = np.zeros(len(rollouts), np.int64)
    return next(iter_group_dicts(rollouts.columns, everything, 1, whole=rollouts.only_integers))


def _agent_profiles(rollouts: SortedRollouts, rows: Sequence[Record]) -> list[dict[str, Any]]:
    names = [_agent_name(row) for row in rows]
    known = sorted({name for name in names if name is not None})
    ordinal_of = {name: ordinal for ordinal, name in enumerate(known)}
    # Rows without an agent share one last group, which is not reported.
    ordinals = np.array([len(known) if name is None else ordinal_of[name] for name in names], np.int64)
    statistics = iter_group_dicts(rollouts.columns, ordinals, len(known) + 1, whole=rollouts.only_integers)
    return [{**numbers, AGENT_REF_KEY_NAME: {"name": name}} for name, numbers in zip(known, statistics, strict=False)]


def _agent_name(row: Record) -> str | None:
    agent_ref = row.get(AGENT_REF_KEY_NAME)
    name = agent_ref.get("name") if isinstance(agent_ref, Mapping) else None
    return name if isinstance(name, str) else None


def _sample(row: Record) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME)}


def _key_of(record: Record, kind: str, number: int) -> _Key:
    task, rollout = record.get(TASK_INDEX_KEY_NAME), record.get(ROLLOUT_INDEX_KEY_NAME)
    if is_index(task) and is_index(rollout):
        return _Key(task, rollout)
    raise KeyError(
        f"{kind} row {number + 1} has {TASK_INDEX_KEY_NAME}={task!r} and {ROLLOUT_INDEX_KEY_NAME}={rollout!r}; "
        "both must be integers, as the collector writes them"
    )


def _by_key(records: Sequence[Record], kind: str) -> dict[_Key, Record]:
    found: dict[_Key, Record] = {}
    for number, record in enumerate(records):
        key = _key_of(record, kind, number)
        if key in found:
            raise ValueError(f"Duplicate {kind} row with key {tuple(key)}: row {number + 1} repeats an earlier one")
        found[key] = record
    return found


def _named(keys: Sequence[_Key]) -> list[tuple[int, int]]:
    return [(task, rollout) for task, rollout in keys[:_KEYS_NAMED]]


def _per_task(keys: Iterable[_Key]) -> Counter[int]:
    return Counter(key.task_index for key in keys)


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    with write_aside(path) as file:
        file.writelines(chunks)
