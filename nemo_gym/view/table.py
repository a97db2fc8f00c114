"""All rollouts of one run as a table: those in its rollouts file, and those of which there are only failures.

A rollout that failed and was not finished later is one row, its last failure; `attempts` counts all that are on
record. The table stands for one moment: `refresh` moves it on.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_gym.errors import listed, similar_names
from nemo_gym.runs.facts import COLUMNS, TIMES, facts_of, moment_of, plain, read_for_facts, read_leniently, visit_fields
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.select import Expression, SelectError
from nemo_gym.runs.spending import Prices, used_by
from nemo_gym.view.kept_index import FIELD, FileIndex
from nemo_gym.view.record_columns import Codes, Column, Numbers, Rows, first_ranks, joined, masks_of, ranks_of, top_rows

BUILT_IN = (*COLUMNS, "attempts", "line")
OWN_FIELD = "record."
_KEPT_BYTES = 256 << 20
_SMALL_BYTES = 1 << 18
_KEPT_ORDERS = 4


class Choice(NamedTuple):
    """Some rollouts of a table."""

    matching: int
    rows: Rows


class RunTable:
    """The rollouts of a run at one moment."""

    def __init__(self, paths: RolloutPaths, cache: Path | None) -> None:
        self.paths = paths
        self.rollouts = FileIndex(paths.rollouts, cache)
        self.failures = FileIndex(paths.failures, cache, is_failures=True)
        self.prices: Prices | None = None
        """What tokens cost, if the run says so."""
        self._generation = (-1, -1)
        self._columns: OrderedDict[str, Column] = OrderedDict()
        self._orders: OrderedDict[tuple[str, str], Rows] = OrderedDict()
        self._settle()

    def close(self) -> None:
        """Let go of the indexes."""
        self.rollouts.close()
        self.failures.close()

    def refresh(self, most_bytes: int | None = None) -> bool:
        """Take in what was appended, at most about `most_bytes`; True when that is all there is."""
        is_all = self.failures.refresh(most_bytes) & self.rollouts.refresh(most_bytes)
        if self._generation != self.generation:
            self._settle()
        return is_all

    @property
    def generation(self) -> tuple[int, int]:
        """Something else after every change."""
        return self.rollouts.generation, self.failures.generation

    def __len__(self) -> int:
        return self._total

    def _settle(self) -> None:
        """Find out which failures are the last word on a rollout, and how many attempts each rollout has."""
        self._generation = self.generation
        self._columns.clear()
        self._orders.clear()
        finished, failed = self.rollouts.rows, self.failures.rows
        self._last_failures = np.empty(0, np.int64)
        attempts = np.ones(finished)
        if failed:
            keys = _keys(self.failures, self.rollouts)
            of_failures, of_rollouts = keys[:failed], keys[failed:]
            distinct, inverse, counts = np.unique(of_failures, return_inverse=True, return_counts=True)
            last = np.zeros(len(distinct), np.int64)
            last[inverse] = np.arange(failed)  # of equal places the last one counts
            is_final = ~np.isin(distinct, of_rollouts)
            order = np.argsort(last[is_final])
            self._last_failures = last[is_final][order]
            places = np.minimum(np.searchsorted(distinct, of_rollouts), len(distinct) - 1)
            attempts += np.where(distinct[places] == of_rollouts, counts[places], 0)
            attempts = np.concatenate([attempts, counts[is_final][order].astype(np.float64)])
        self._total = finished + len(self._last_failures)
        self._columns["attempts"] = Numbers(attempts)

    def column(self, name: str) -> Column:
        """The column that a name in an expression means."""
        if name in self._columns:
            self._columns.move_to_end(name)
            return self._columns[name]
        stored = name if name in BUILT_IN or name in ("offset", "length") else FIELD + name.removeprefix(OWN_FIELD)
        column = self.rollouts.column(stored)
        if len(self._last_failures):
            column = joined([column, self.failures.column(stored).take(self._last_failures)])
        if name == "tools" and isinstance(column, Codes):
            column = Codes(
                column.codes, [None if text is None else text.split("\n") if text else [] for text in column.values]
            )
        self._keep(name, column)
        return column

    def _keep(self, name: str, column: Column) -> None:
        self._columns[name] = column
        size = sum(len(kept) * 8 for kept in self._columns.values())
        for old in [kept for kept in self._columns if kept not in (name, "attempts")]:
            if size <= _KEPT_BYTES:
                break
            size -= len(self._columns.pop(old)) * 8

    def fields(self) -> list[str]:
        """The fields of records that can be named."""
        return sorted({*self.rollouts.fields(), *(self.failures.fields() if len(self._last_failures) else ())})

    def known_names(self) -> list[str]:
        """Every name that an expression may have."""
        fields = self.fields()
        return [
            *BUILT_IN,
            *(name for name in fields if name not in BUILT_IN),
            *(f"{OWN_FIELD}{name}" for name in fields),
        ]

    def understand(self, where: str | None, option: str = "+where") -> Expression | None:
        """A condition on rollouts; None for none.

        Raises:
            SelectError: it is not an expression, or has a name that no rollout has.
        """
        if where is None or not where.strip():
            return None
        expression = Expression.parse(where, option)
        known = self.known_names()
        expression.require_known(known, [name for name in known if not name.startswith(OWN_FIELD)])
        return expression

    def sorting(self, sort: str | None) -> list[tuple[str, bool]]:
        """Names to sort by, each with whether it is descending.

        Raises:
            SelectError: there is no such name.
        """
        orders = []
        known = self.known_names()
        for part in (sort or "").split(","):
            name = part.strip().removeprefix("-").strip("`")
            if not name:
                continue
            if name not in known:
                close = similar_names(name, known)
                meant = f" (did you mean {close[0]!r}?)" if close else ""
                raise SelectError(f"sort: there is no {name!r}{meant}. Known names: {listed(known, 30)}")
            orders.append((name, part.strip().startswith("-")))
        return orders

    def matching(self, expression: Expression | None) -> Rows:
        """The rows for which a condition holds, in the order of the files."""
        if expression is None:
            return np.arange(self._total)
        true, _ = masks_of(expression.node, self.column, self._total)
        return np.flatnonzero(true)

    def choose(self, where: str | None, sort: str | None = None, limit: int | None = None, offset: int = 0) -> Choice:
        """Some rollouts in order; raises as `understand` and `sorting`."""
        rows = self.matching(self.understand(where))
        orders = self.sorting(sort)
        if limit is None:
            limit = len(rows)
        return Choice(len(rows), self._first(rows, orders, offset + limit)[offset:])

    def order_of(self, where: str | None, sort: str | None) -> Rows:
        """All rollouts that match, in order; the last few answers are remembered."""
        key = (where or "", sort or "")
        if key not in self._orders:
            self._orders[key] = self.choose(where, sort).rows
            while len(self._orders) > _KEPT_ORDERS:
                self._orders.popitem(last=False)
        return self._orders[key]

    def _first(self, rows: Rows, orders: Sequence[tuple[str, bool]], count: int) -> Rows:
        keys = [first_ranks(self.column(name), descending, rows, count) for name, descending in orders]
        return top_rows(rows, [*keys, self.natural_order()], count)

    def natural_order(self) -> NDArray[np.float64]:
        """Ranks by task and repeat."""
        name = "natural order"
        if name not in self._columns:
            task, repeat = (_finite(ranks_of(self.column(part), False)) for part in ("task", "repeat"))
            self._keep(name, Numbers(task * (repeat.max(initial=0) + 1) + repeat))
        kept = self._columns[name]
        assert isinstance(kept, Numbers)
        return kept.values

    def id_of(self, row: int) -> str:
        """What a row is called."""
        kind = "r" if row < self.rollouts.rows else "f"
        return f"{kind}{self.column('line').at(row)}"

    def row_of(self, rollout: str) -> int | None:
        """The row that is called so; None when there is none, also for failures that are not the last word."""
        rows = self._places_of(rollout)
        if rows is None or not len(rows):
            return None
        place = int(rows[0])
        if rollout[0] == "r":
            return place
        found = np.flatnonzero(self._last_failures == place)
        return int(found[0]) + self.rollouts.rows if len(found) else None

    def place_of(self, rollout: str) -> tuple[FileIndex, int] | None:
        """The file and the number of a record in it, failures of any kind included."""
        rows = self._places_of(rollout)
        if rows is None or not len(rows):
            return None
        return (self.rollouts if rollout[0] == "r" else self.failures), int(rows[0])

    def _places_of(self, rollout: str) -> Rows | None:
        if rollout[:1] not in ("r", "f") or not rollout[1:].isdecimal() or len(rollout) > 16:
            return None
        index = self.rollouts if rollout[0] == "r" else self.failures
        lines = index.column("line")
        assert isinstance(lines, Numbers)
        return np.flatnonzero(lines.values == int(rollout[1:]))

    def file_place(self, row: int) -> tuple[Path, int, int]:
        """Where a row's record is: file, offset and length."""
        path = self.paths.rollouts if row < self.rollouts.rows else self.paths.failures
        return path, self.column("offset").at(row), self.column("length").at(row)

    def shown(self, row: int, fields: Iterable[str] = ()) -> dict[str, Any]:
        """A row as lists show it, with some fields of its record."""
        record = self._small_record(row)
        if record is None:
            values = {name: self.column(name).at(row) for name in COLUMNS}
            of_record: Mapping[str, Any] = {name: self.column(name).at(row) for name in fields}
        else:
            values = dict(zip(COLUMNS, facts_of(record, is_failure=row >= self.rollouts.rows), strict=True))
            values["tools"] = (values["tools"] or "").split("\n") if values["tools"] else []
            values = {name: _whole(value) for name, value in values.items()}
            of_record = _plain_fields(record)
        for name in TIMES:
            values[name] = moment_of(values[name])
        values["cost_usd"] = self._cost_usd(row, record)
        values |= {name: self.column(name).at(row) for name in ("attempts", "line")}
        values["tools"] = values["tools"] or []
        bare = [name.removeprefix(OWN_FIELD) for name in fields]
        shown = {name: of_record.get(name) for name in bare if of_record.get(name) is not None}
        return {"id": self.id_of(row), **values, "fields": shown}

    def _cost_usd(self, row: int, record: Any) -> float | None:
        """What a rollout cost; None where that is not known."""
        if self.prices is None:
            return None
        if record is None:
            path, offset, length = self.file_place(row)
            try:
                record = read_for_facts(read_bytes(path, offset, length))
            except (OSError, ValueError, RecursionError):
                return None
        used = used_by(record) if isinstance(record, dict) else None
        return None if used is None else self.prices.cost_usd(used)

    def _small_record(self, row: int) -> Any:
        """The record of a row, for a page of which that is quicker than all columns; None if it is not."""
        path, offset, length = self.file_place(row)
        if length > _SMALL_BYTES:
            return None
        try:
            return read_leniently(read_bytes(path, offset, length))
        except (OSError, ValueError, RecursionError):
            return None

    def attempts_of(self, row: int) -> list[int]:
        """The failed attempts at a row's rollout, as numbers of records in the failures file."""
        task, repeat = self.column("task").at(row), self.column("repeat").at(row)
        if task is None or repeat is None:
            return []
        same = equal_to(self.failures.column("task"), task) & equal_to(self.failures.column("repeat"), repeat)
        return [int(place) for place in np.flatnonzero(same)]

    def repeats_of(self, row: int) -> Rows:
        """All rollouts of the same task and agent, by repeat."""
        task, agent = self.column("task").at(row), self.column("agent").at(row)
        if task is None:
            return np.array([row])
        rows = np.flatnonzero(equal_to(self.column("task"), task) & equal_to(self.column("agent"), agent))
        return top_rows(rows, [ranks_of(self.column("repeat"), False)], len(rows))


def read_bytes(path: Path, offset: int, length: int) -> bytes:
    """So many bytes of a file; fewer when it has become shorter."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= 2**53 else value


def _plain_fields(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(record, dict):
        visit_fields(record, lambda name, value: found.setdefault(name, plain(value)))
    return found


def equal_to(column: Column, value: Any) -> NDArray[np.bool_]:
    """Where a column has a value."""
    if isinstance(column, Numbers):
        if value is None:
            return np.isnan(column.values)
        if isinstance(value, str):
            return np.zeros(len(column), np.bool_)
        return np.asarray(column.values == value)
    places = [place for place, other in enumerate(column.values) if other == value and type(other) is type(value)]
    return np.isin(column.codes, places)


def _finite(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks with a last place for null."""
    there = np.isfinite(ranks)
    return np.where(there, ranks, ranks[there].max(initial=-1) + 1)


def _keys(failures: FileIndex, rollouts: FileIndex) -> NDArray[np.int64]:
    """One number for each rollout key, of all failures and then of all rollouts; records without one have their own."""
    columns: list[NDArray[np.int64]] = []
    there = np.ones(failures.rows + rollouts.rows, np.bool_)
    for name in ("task", "repeat"):
        ranks = ranks_of(joined([failures.column(name), rollouts.column(name)]), False)
        there &= np.isfinite(ranks)
        columns.append(np.unique(ranks, return_inverse=True)[1].astype(np.int64))
    keys = columns[0] * (int(columns[1].max(initial=0)) + 1) + columns[1]
    return np.where(there, keys, -1 - np.arange(len(keys)))
