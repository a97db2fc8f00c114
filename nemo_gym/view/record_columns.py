"""Columns of many rollouts: how they are kept as bytes, and how conditions and orders are worked out on all at once.

A column is numbers with NaN for what is not there, or codes into a list of distinct values. Conditions about codes are
worked out once for each distinct value, so millions of rows cost little more than those values.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from nemo_gym.runs.facts import TIMES, seconds_of
from nemo_gym.runs.select import (
    COMPARISONS,
    NULL,
    All,
    Any_,
    Compare,
    Holds,
    Literal,
    Name,
    Node,
    Not,
    Truth,
    Value,
    kind_of_value,
    truth_of,
)

Mask: TypeAlias = NDArray[np.bool_]
Rows: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Masks: TypeAlias = tuple[Mask, Mask]
"""Where a condition is true, and where it is false; it may be neither."""
_EXACT = 2**53


@dataclass(frozen=True)
class Numbers:
    """A number for each row; NaN where there is none."""

    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: Rows) -> "Numbers":
        """Only these rows."""
        return Numbers(self.values[rows])

    def at(self, row: int) -> Any:
        """The value in a row; whole numbers without a fraction."""
        value = float(self.values[row])
        return None if value != value else int(value) if value.is_integer() and abs(value) <= _EXACT else value


@dataclass(frozen=True)
class Codes:
    """For each row the place of its value among the distinct ones, the first of which is null."""

    codes: NDArray[np.int32]
    values: Sequence[Any]

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Rows) -> "Codes":
        """Only these rows."""
        return Codes(self.codes[rows], self.values)

    def at(self, row: int) -> Any:
        """The value in a row."""
        return self.values[self.codes[row]]


Column: TypeAlias = Numbers | Codes


def nothing(rows: int) -> Column:
    """The column of something that no row has."""
    return Numbers(np.full(rows, np.nan))


def column_of(values: Sequence[Any], places: Sequence[int] | None = None, rows: int | None = None) -> Column:
    """A column of plain values, None where there is none; with `places`, those are the rows that have one."""
    total = len(values) if rows is None else rows
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if kinds <= {int, float} and (numbers := _exact_numbers(values)) is not None:
        if places is None or len(values) == total:
            return Numbers(numbers)
        spread = np.full(total, np.nan)
        spread[places] = numbers
        return Numbers(spread)
    distinct: dict[Any, int] = {(None if kinds == {str} else (type(None), None)): 0}
    keys: Iterable[Any] = values if kinds == {str} else ((type(value), value) for value in values)
    codes = np.fromiter((distinct.setdefault(key, len(distinct)) for key in keys), np.int32, len(values))
    if places is not None and len(values) != total:
        everywhere = np.zeros(total, np.int32)
        everywhere[places] = codes
        codes = everywhere
    return Codes(codes, list(distinct) if kinds == {str} else [key[1] for key in distinct])


def _exact_numbers(values: Sequence[Any]) -> Floats | None:
    """Numbers as an array; None when one is a whole number that a float cannot hold."""
    try:
        numbers = np.array(values, np.float64) if values else np.empty(0)
    except OverflowError:
        return None
    large = np.flatnonzero(np.abs(numbers) > _EXACT)
    return None if any(type(values[place]) is int for place in large.tolist()) else numbers


def to_bytes(column: Column) -> bytes:
    """A column as it is kept in a file."""
    if isinstance(column, Numbers):
        return b"n" + column.values.tobytes()
    narrow = column.codes.astype(np.uint16) if len(column.values) <= 2**16 else column.codes
    # Half a character cannot be written as UTF-8, so text that has one is escaped.
    try:
        values = orjson.dumps(column.values)
    except orjson.JSONEncodeError:
        values = orjson.dumps([_writable(value) for value in column.values])
    return b"%c%d\n" % (b"s" if narrow.dtype == np.uint16 else b"l", len(values)) + values + narrow.tobytes()


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT else value


def from_bytes(data: bytes) -> Column:
    """What `to_bytes` was given."""
    if data[:1] == b"n":
        return Numbers(np.frombuffer(data, np.float64, offset=1))
    start = data.index(b"\n") + 1
    length = int(data[1 : start - 1])
    codes = np.frombuffer(data, np.uint16 if data[:1] == b"s" else np.int32, offset=start + length)
    return Codes(codes.astype(np.int32), orjson.loads(data[start : start + length]))


def joined(parts: Sequence[Column]) -> Column:
    """Columns one after the other."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Numbers) for part in parts):
        return Numbers(np.concatenate([part.values for part in parts if isinstance(part, Numbers)] or [np.empty(0)]))
    if all(isinstance(part, Codes) and _are_texts(part.values) for part in parts):
        return _joined_texts([part for part in parts if isinstance(part, Codes)])
    place_of: dict[Any, int] = {(type(None), None): 0}
    codes = []
    for part in parts:
        if isinstance(part, Numbers):
            if np.isnan(part.values).all():
                codes.append(np.zeros(len(part), np.int32))
                continue
            part = column_as_codes(part)
        places = [place_of.setdefault((type(value), value), len(place_of)) for value in part.values]
        codes.append(np.array(places, np.int32)[part.codes])
    return Codes(np.concatenate(codes), [value for _, value in place_of])


def _are_texts(values: Sequence[Any]) -> bool:
    return set(map(type, values)) <= {str, type(None)}


def _joined_texts(parts: Sequence[Codes]) -> Codes:
    place_of: dict[str | None, int] = {None: 0}
    codes = []
    for part in parts:
        places = [place_of.setdefault(value, len(place_of)) for value in part.values]
        codes.append(np.array(places, np.int32)[part.codes])
    return Codes(np.concatenate(codes), list(place_of))


def column_as_codes(column: Numbers) -> Codes:
    """Numbers as codes, for a column that also has something else."""
    distinct, places = np.unique(column.values, return_inverse=True)
    values = [Numbers(distinct).at(place) for place in range(len(distinct))]
    return Codes(places.astype(np.int32) + 1, [None, *values])


def masks_of(node: Node, column: Callable[[str], Column], rows: int) -> Masks:
    """Where a condition is true and where it is false."""
    if isinstance(node, All | Any_):
        parts = [masks_of(part, column, rows) for part in node.parts]
        union, common = np.logical_or.reduce, np.logical_and.reduce
        trues, falses = [part[0] for part in parts], [part[1] for part in parts]
        return (common(trues), union(falses)) if isinstance(node, All) else (union(trues), common(falses))
    if isinstance(node, Not):
        true, false = masks_of(node.part, column, rows)
        return false, true
    leaf = _with_moments(node)
    names = [value for value in _values(leaf) if isinstance(value, Name)]
    if not names:
        truth = truth_of(leaf, lambda _: None)
        return np.full(rows, truth is True), np.full(rows, truth is False)
    columns = {name.name: column(name.name) for name in names}
    if len(columns) == 1:
        return _about_one(leaf, *columns.popitem())
    return _about_two(leaf, columns, rows)


def _values(leaf: Compare | Holds) -> tuple[Value, ...]:
    return (leaf.value,) if isinstance(leaf, Holds) else (leaf.left, leaf.right)


def _with_moments(leaf: Compare | Holds) -> Compare | Holds:
    """Texts that are compared with a time become what times are kept as."""
    if isinstance(leaf, Holds) or not any(isinstance(value, Name) and value.name in TIMES for value in _values(leaf)):
        return leaf
    left, right = (
        Literal(seconds_of(value.value)) if isinstance(value, Literal) and isinstance(value.value, str) else value
        for value in _values(leaf)
    )
    return replace(leaf, left=left, right=right)


def _about_one(leaf: Compare | Holds, name: str, column: Column) -> Masks:
    if isinstance(column, Numbers) and (masks := _about_numbers(leaf, column)) is not None:
        return masks
    if isinstance(column, Numbers):
        column = column_as_codes(column)
    if (masks := _about_texts(leaf, column)) is not None:
        return masks
    truths = [_truth_for(leaf, name, value) for value in column.values]
    true = np.fromiter((truth is True for truth in truths), np.bool_, len(truths))
    false = np.fromiter((truth is False for truth in truths), np.bool_, len(truths))
    return true[column.codes], false[column.codes]


def _truth_for(leaf: Compare | Holds, name: str, value: Any) -> Truth:
    return truth_of(leaf, {name: value}.get)


def _about_texts(leaf: Compare | Holds, column: Codes) -> Masks | None:
    """Comparisons with a text, which may be of a million values; None for all else."""
    if isinstance(leaf, Holds) or leaf.sign == "in" or not isinstance(leaf.left, Name) or leaf.left.sign < 0:
        return None
    if not (isinstance(leaf.right, Literal) and isinstance(leaf.right.value, str)):
        return None
    compare, text, count = COMPARISONS[leaf.sign], leaf.right.value, len(column.values)
    if set(map(type, column.values[1:])) != {str}:
        return None
    true, false = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    true[1:] = np.fromiter(map(compare, column.values[1:], repeat(text)), np.bool_, count - 1)
    false[1:] = ~true[1:]
    return true[column.codes], false[column.codes]


_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def _about_numbers(leaf: Compare | Holds, column: Numbers) -> Masks | None:
    """Without looking at single values; None where that is not possible."""
    if isinstance(leaf, Holds) or leaf.sign == "in":
        return None
    left, right, sign = leaf.left, leaf.right, leaf.sign
    if isinstance(left, Literal):
        left, right, sign = right, left, _FLIPPED[sign]
    if not (isinstance(left, Name) and isinstance(right, Literal)):
        return None
    there = ~np.isnan(column.values)
    if right == NULL:
        return (~there, there) if sign == "==" else (there, ~there)
    if kind_of_value(right.value) != "number":
        return np.zeros(len(there), np.bool_), np.zeros(len(there), np.bool_)
    values = column.values if left.sign > 0 else -column.values
    true = there & COMPARISONS[sign](values, float(right.value))
    return true, there & ~true


def _about_two(leaf: Compare | Holds, columns: dict[str, Column], rows: int) -> Masks:
    (one, first), (other, second) = columns.items()
    if isinstance(leaf, Compare) and leaf.sign != "in" and isinstance(first, Numbers) and isinstance(second, Numbers):
        assert isinstance(leaf.left, Name)
        assert isinstance(leaf.right, Name)
        there = ~(np.isnan(first.values) | np.isnan(second.values))
        true = there & COMPARISONS[leaf.sign](first.values * leaf.left.sign, second.values * leaf.right.sign)
        return true, there & ~true
    truths = [truth_of(leaf, {one: first.at(row), other: second.at(row)}.get) for row in range(rows)]
    return (
        np.fromiter((truth is True for truth in truths), np.bool_, rows),
        np.fromiter((truth is False for truth in truths), np.bool_, rows),
    )


def top_rows(rows: Rows, keys: Sequence[NDArray[np.float64]], count: int) -> Rows:
    """The first `count` of `rows` by their ranks: by the first of `keys`, among equals by the second, and so on.

    Only those are sorted that can be among the first.
    """
    if not keys or not count or not len(rows):
        return rows[:count]
    ranks = keys[0][rows]
    if count >= len(rows) // 2:
        return rows[np.lexsort([key[rows] for key in reversed(keys)])][:count]
    edge = np.partition(ranks, count - 1)[count - 1]
    below = rows[ranks < edge]
    first = below[np.lexsort([key[below] for key in reversed(keys)])]
    return np.concatenate([first, top_rows(rows[ranks == edge], keys[1:], count - len(first))])


def ranks_of(column: Column, descending: bool) -> Floats:
    """Numbers that sort as the column should; infinite for null."""
    if isinstance(column, Numbers):
        values = -column.values if descending else column.values
        return np.where(np.isnan(values), np.inf, values)
    order = sorted(range(1, len(column.values)), key=lambda place: _sort_key(column.values[place]), reverse=descending)
    return _ranks(column, order)


def first_ranks(column: Column, descending: bool, rows: Rows, count: int) -> Floats:
    """The same as far as it matters for the first `count` of `rows`: all others are equal and come after these."""
    if isinstance(column, Numbers) or len(column.values) < 4 * count:
        return ranks_of(column, descending)
    present = np.flatnonzero(np.bincount(column.codes[rows], minlength=len(column.values))).tolist()
    there = present[1:] if present and present[0] == 0 else present
    take = heapq.nlargest if descending else heapq.nsmallest
    if _are_texts(column.values):
        return _ranks(column, take(count, there, key=column.values.__getitem__))
    return _ranks(column, take(count, there, key=lambda place: _sort_key(column.values[place])))


def _ranks(column: Codes, order: list[int]) -> Floats:
    """Ranks of rows whose values are in this order, by place; others come after them, and null last."""
    ranks = np.full(len(column.values), float(len(order)))
    ranks[order] = np.arange(len(order), dtype=np.float64)
    ranks[0] = np.inf
    return ranks[column.codes]


def _sort_key(value: Any) -> tuple[int, Any]:
    """Numbers before text."""
    return (2, value) if isinstance(value, list) else (1, value) if isinstance(value, str) else (0, value)
