"""Mean, max, min, median and standard deviation of every field in every group, computed a column at a time."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.metrics.ordered import Column, runs

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

Entry = tuple[str, Indices, NDArray[Any]]
"""A key, the groups that have it, ascending, and their values."""

STATISTICS = ("mean", "max", "min", "median", "std")
"""In the order of their keys."""
_VALUES_AT_A_TIME = 100_000
"""How many numbers are turned into dicts ahead of the reader."""


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
            values = values[defined]
            if whole and statistic in ("max", "min"):
                values = np.array([int(value) for value in values.tolist()], object)
            entries.append((f"{statistic}/{name}", statistics.groups[defined], values))
    num_values = sum(len(values) for _, _, values in entries)
    portion = max(1, _VALUES_AT_A_TIME * num_groups // max(num_values, 1))
    for start in range(0, num_groups, portion):
        yield from _dicts(entries, start, min(start + portion, num_groups))


def _dicts(entries: Sequence[Entry], start: int, end: int) -> list[dict[str, Any]]:
    dicts: list[dict[str, Any]] = [{} for _ in range(start, end)]
    for key, groups, values in entries:
        low, high = np.searchsorted(groups, (start, end))
        for place, value in zip((groups[low:high] - start).tolist(), values[low:high].tolist(), strict=True):
            dicts[place][key] = value
    return dicts


def _medians(values: Floats, groups: Indices, starts: Indices, counts: Indices) -> Floats:
    if np.all(counts == counts[0]):
        values = np.sort(values.reshape(len(counts), counts[0]), axis=1).ravel()
    else:
        values = values[np.lexsort((values, groups))]
    with np.errstate(all="ignore"):
        middle: Floats = (values[starts + (counts - 1) // 2] + values[starts + counts // 2]) / 2
    return middle
