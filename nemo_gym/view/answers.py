"""What the API answers about the rollouts of a run: pages of a list, fields, statistics, a grid of tasks by repeats."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from nemo_gym.runs.facts import FAILED, OUTCOMES
from nemo_gym.view.record_columns import Codes, Column, Numbers, Rows, ranks_of, top_rows
from nemo_gym.view.runs import (
    Run,
    classes_of,
    counts_of,
    estimate_shown,
    outcomes_of,
    repeats_of_run,
    scores_of,
    task_numbers,
)
from nemo_gym.view.table import BUILT_IN, OWN_FIELD, RunTable

LARGEST_PAGE = 10_000
MOST_TASKS = 20_000
MEASURED = ("reward", "input_tokens", "output_tokens", "total_tokens", "duration_s", "steps", "tool_calls")
_BINS = 40
_MOST_VALUES = 50
_EXAMPLES = 3
_TYPES = {bool: "boolean", str: "text", list: "list", int: "number", float: "number"}


def page_of(
    table: RunTable, where: str | None, sort: str | None, limit: int, offset: int, fields: Iterable[str] = ()
) -> dict[str, Any]:
    """One page of the list of rollouts; raises as `RunTable.choose`."""
    choice = table.choose(where, sort, limit, offset)
    names = list(dict.fromkeys([*(name for name in fields if name), *named_fields(table, where, sort)]))
    known = set(table.known_names())
    names = [name for name in names if name in known]
    rows = [table.shown(int(row), names) for row in choice.rows]
    return {"total": len(table), "matching": choice.matching, "offset": offset, "limit": limit, "rows": rows}


def named_fields(table: RunTable, where: str | None, sort: str | None) -> list[str]:
    """The fields that a condition and an order are about."""
    expression = table.understand(where)
    names = [*([] if expression is None else expression.names()), *(name for name, _ in table.sorting(sort))]
    return [name for name in dict.fromkeys(names) if name not in BUILT_IN]


def fields_of_run(table: RunTable) -> dict[str, Any]:
    """What expressions can name."""
    names = [*BUILT_IN, *(name if name not in BUILT_IN else OWN_FIELD + name for name in table.fields())]
    return {"fields": [_field(name, table.column(name)) for name in names]}


def _field(name: str, column: Column) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": name, "type": "number", "builtin": name in BUILT_IN, "present": 0}
    shown |= {"values": None, "low": None, "high": None}
    if isinstance(column, Numbers):
        numbers = column.values[~np.isnan(column.values)]
        if name in ("started_at", "ended_at"):
            return {**shown, "type": "text", "present": len(numbers)}
        if len(numbers):
            shown |= {"present": len(numbers), "low": float(numbers.min()), "high": float(numbers.max())}
        return shown
    counts = np.bincount(column.codes, minlength=len(column.values)).tolist()
    present = [value for value, count in zip(column.values, counts, strict=True) if count and value is not None]
    types = {_TYPES.get(type(value), "mixed") for value in present}
    shown |= {"type": types.pop() if len(types) == 1 else "mixed", "present": len(column) - counts[0]}
    if shown["type"] == "list":
        shown["values"] = sorted({part for value in present for part in value})[:_MOST_VALUES]
    elif shown["type"] in ("text", "boolean") and len(present) <= _MOST_VALUES:
        shown["values"] = sorted(present)
    return shown


def stats_of(run: Run, where: str | None) -> dict[str, Any]:
    """Score, distributions and failures of the rollouts that match."""
    table = run.table
    rows = table.matching(table.understand(where))
    score, passes = scores_of(table, rows, repeats_of_run(run.manifest))
    return {
        "matching": len(rows),
        "outcomes": outcomes_of(table, rows),
        "score": estimate_shown(score),
        "pass_at_k": passes,
        "histograms": {name: _histogram(table.column(name), rows) for name in MEASURED},
        "failures": _failures(table, rows),
        "agents": _by_agent(table, rows),
    }


def _histogram(column: Column, rows: Rows) -> dict[str, Any] | None:
    if not isinstance(column, Numbers):
        return None
    values = column.values[rows]
    numbers = values[np.isfinite(values)]
    if not len(numbers):
        return None
    low, high = float(numbers.min()), float(numbers.max())
    bins = 1 if low == high else min(_BINS, max(2, len(np.unique(numbers[:10_000]))))
    if not np.isfinite(high - low):
        bins = 1
    counts = [len(numbers)] if bins == 1 else np.histogram(numbers, bins, (low, high))[0].tolist()
    middle, most = np.quantile(numbers, (0.5, 0.95)).tolist()
    mean = float(numbers.mean())
    shown = {"low": low, "high": high, "counts": counts, "missing": len(values) - len(numbers)}
    return {**shown, "mean": mean, "median": middle, "p95": most}


def _failures(table: RunTable, rows: Rows) -> list[dict[str, Any]]:
    column = table.column("failure_class")
    attempts = table.column("attempts")
    shown = []
    for name, count in classes_of(table, rows).items():
        assert isinstance(column, Codes)
        assert isinstance(attempts, Numbers)
        of_class = rows[column.codes[rows] == column.values.index(name)]
        examples = [_failure(table, int(row)) for row in of_class[:_EXAMPLES]]
        total = int(attempts.values[of_class].sum())
        shown.append({"class": name, "rollouts": count, "attempts": total, "examples": examples})
    return shown


def _failure(table: RunTable, row: int) -> dict[str, Any]:
    message = table.shown(row, ["_ng_failure_message"])["fields"].get("_ng_failure_message")
    return {
        "id": table.id_of(row),
        "task": table.column("task").at(row),
        "repeat": table.column("repeat").at(row),
        "message": message,
    }


def _by_agent(table: RunTable, rows: Rows) -> list[dict[str, Any]]:
    column = table.column("agent")
    shown = []
    for name, count in sorted(counts_of(table, "agent", rows).items()):
        assert isinstance(column, Codes)
        of_agent = rows[column.codes[rows] == column.values.index(name)]
        shown.append({"agent": name, "rollouts": count, "score": estimate_shown(scores_of(table, of_agent)[0])})
    return shown


def grid_of(table: RunTable, where: str | None, limit: int, offset: int, order: str = "task") -> dict[str, Any]:
    """Tasks by repeats of the rollouts that match."""
    rows = table.matching(table.understand(where))
    return grid_of_rows(table, rows, limit, offset, order)


def grid_of_rows(table: RunTable, rows: Rows, limit: int, offset: int, order: str = "task") -> dict[str, Any]:
    """The same for rows that were chosen already."""
    numbers = task_numbers(table)[rows]
    rows, numbers = rows[numbers >= 0], numbers[numbers >= 0]
    rewards = table.column("reward")
    values = (rewards.values if isinstance(rewards, Numbers) else np.full(len(table), np.nan))[rows]
    distinct, first, places = np.unique(numbers, return_index=True, return_inverse=True)
    sums = np.bincount(places, np.nan_to_num(values), len(distinct))
    counts = np.bincount(places, ~np.isnan(values), len(distinct))
    means = np.divide(sums, counts, out=np.full(len(distinct), np.nan), where=counts > 0)
    by_task = ranks_of(table.column("task"), False)[rows[first]] if len(rows) else np.empty(0)
    keys = [by_task] if order == "task" else [ranks_of(Numbers(means), order == "-mean"), by_task]
    chosen = top_rows(np.arange(len(distinct)), keys, offset + limit)[offset:]
    cells = _cells(table, rows, places, set(chosen.tolist()), values)
    tasks = [
        {
            "task": table.column("task").at(int(rows[first[place]])),
            "mean": None if np.isnan(means[place]) else float(means[place]),
            "cells": cells[place],
        }
        for place in chosen.tolist()
    ]
    return {"tasks_total": len(distinct), "offset": offset, "tasks": tasks}


def _cells(table: RunTable, rows: Rows, places: Rows, chosen: set[int], rewards: Any) -> dict[int, list[list[Any]]]:
    cells: dict[int, list[list[Any]]] = {place: [] for place in chosen}
    repeats, outcomes = table.column("repeat"), table.column("outcome")
    wanted = np.flatnonzero(np.isin(places, list(chosen)))
    for number in wanted.tolist():
        row, reward = int(rows[number]), float(rewards[number])
        outcome = OUTCOMES.index(outcomes.at(row) or FAILED)
        cell = [table.id_of(row), repeats.at(row), None if reward != reward else reward, outcome]
        cells[int(places[number])].append(cell)
    for of_task in cells.values():
        of_task.sort(key=lambda cell: (not isinstance(cell[1], int), cell[1] if isinstance(cell[1], int) else 0))
    return cells


_AROUND = 80
_STEP_BYTES = 8 << 20
_MOST_LINE_BYTES = 256 << 20


def looked_for(text: str) -> list[bytes]:
    """What a text may look like in a line of JSON, in lower case: as it is, or with its characters escaped."""
    plain = json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="surrogatepass")
    return list(dict.fromkeys((plain.lower(), json.dumps(text)[1:-1].encode().lower())))


def matches(run: Run, rows: Rows, text: str, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Search these rows, in this order: an event for each match, one after every few megabytes, and one at the end."""
    needles = looked_for(text)
    found = searched = scanned = 0
    with ExitStack() as stack:
        files: dict[Path, IO[bytes]] = {}
        for row in rows.tolist():
            with run.lock:
                path, offset, length = run.table.file_place(row)
            if path not in files:
                files[path] = stack.enter_context(path.open("rb"))
            files[path].seek(offset)
            content = files[path].read(min(length, _MOST_LINE_BYTES))
            searched, scanned = searched + 1, scanned + len(content)
            place = _first_place(content, needles)
            if place is not None:
                found += 1
                with run.lock:
                    shown = run.table.shown(row)
                yield "match", {"row": shown, "excerpt": excerpt(content, *place)}
                if found >= limit:
                    break
            if scanned >= _STEP_BYTES:
                scanned = 0
                yield "progress", {"searched": searched, "total": len(rows), "matches": found}
    is_complete = searched == len(rows)
    yield "done", {"searched": searched, "total": len(rows), "matches": found, "complete": is_complete}


def _first_place(content: bytes, needles: list[bytes]) -> tuple[int, int] | None:
    lower = content.lower()
    for needle in needles:
        start = lower.find(needle)
        if start >= 0:
            return start, start + len(needle)
    return None


def excerpt(content: bytes, start: int, end: int) -> str:
    """The text around a match, on one line."""
    text = content[max(0, start - _AROUND) : end + _AROUND].decode(errors="replace").strip("\ufffd")
    for escaped, plain in (("\\n", " "), ("\\t", " "), ('\\"', '"')):
        text = text.replace(escaped, plain)
    before, after = "…" if start > _AROUND else "", "…" if end + _AROUND < len(content) else ""
    return f"{before}{' '.join(text.split())}{after}"
