"""One rollout as it is shown: its record cut to a size that a page can bear, its attempts, repeats and neighbours."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.jsonl import cut_levels, malformation
from nemo_gym.keys import MODEL_PATHS
from nemo_gym.runs.facts import TIMING_KEY, facts_of, moment_of, number, plain, read_leniently, times_of, visit_fields
from nemo_gym.runs.record import FAILURE_MESSAGE_KEY, FAILURE_SERVER_KEY, FAILURE_STATUS_KEY
from nemo_gym.view.kept_index import FileIndex
from nemo_gym.view.runs import Run
from nemo_gym.view.table import read_bytes

LONGEST_TEXT = 100_000
LONGEST_IMAGE = 5_000_000
MOST_TEXT = 20_000_000
_SHORT_TEXT = 1_000
MOST_LEVELS = 200
_SURELY_FLAT = 1_000
_MOST_CUTS = 1_000
_MOST_FIELDS = 2_000
_MOST_REPEATS = 1_000
_MOST_ATTEMPTS = 100
_MOST_CALLS = 1_000
_LARGEST_RECORD = 512 << 20


class Shown:
    """A value without what no page can bear; `cut` says what is missing."""

    def __init__(self) -> None:
        self.cut: list[dict[str, Any]] = []
        self._left = MOST_TEXT

    def value(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """The value as it is shown."""
        if isinstance(value, str):
            return self._text(value, path)
        if isinstance(value, dict | list) and len(path) >= MOST_LEVELS:
            self._note(path, len(value))
            return None
        if isinstance(value, dict):
            return {key: self.value(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*path, str(place))) for place, inner in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value

    def _text(self, text: str, path: tuple[str, ...]) -> str:
        longest = LONGEST_IMAGE if text.startswith("data:image/") else LONGEST_TEXT
        if self._left <= 0:
            longest = _SHORT_TEXT
        if len(text) > longest:
            self._note(path, len(text))
            text = text[:longest]
        self._left -= len(text)
        return text

    def _note(self, path: tuple[str, ...], length: int) -> None:
        if len(self.cut) < _MOST_CUTS:
            self.cut.append({"path": ".".join(path), "length": length})


def rollout_answer(run: Run, rollout: str, where: str | None = None, sort: str | None = None) -> dict[str, Any] | None:
    """Everything about one rollout; None when there is none of that name.

    Raises:
        SelectError: the condition or the order is not understood.
    """
    table = run.table
    place = table.place_of(rollout)
    if place is None:
        return None
    row = table.row_of(rollout)
    index, position = place
    order = table.order_of(where, sort)
    content = _content(index, position)
    record, problem, raw = _read(content)
    shown = Shown()
    return {
        "run": run.id,
        "row": _row_of_attempt(index, position, rollout) if row is None else table.shown(row),
        "record": shown.value(record),
        "cut": shown.cut,
        "problem": problem,
        "raw": raw,
        "size_bytes": int(index.column("length").at(position)),
        "fields": _fields(record),
        "timing": timing_of(record),
        "attempts": _attempts(run, row, rollout),
        "repeats": [] if row is None else [table.shown(int(other)) for other in table.repeats_of(row)[:_MOST_REPEATS]],
        **_neighbours(run, row, order),
    }


def _content(index: FileIndex, position: int) -> bytes | None:
    length = int(index.column("length").at(position))
    if length > _LARGEST_RECORD:
        return None
    try:
        content = read_bytes(index.path, int(index.column("offset").at(position)), length)
    except OSError:
        return None
    return content if len(content) == length else None


def place_on_disk(run: Run, rollout: str) -> tuple[Path, int, int] | None:
    """Where the line of a rollout is: file, offset and length."""
    place = run.table.place_of(rollout)
    if place is None:
        return None
    index, position = place
    return index.path, int(index.column("offset").at(position)), int(index.column("length").at(position))


def _read(content: bytes | None) -> tuple[Any, str | None, str | None]:
    """The record, or what is wrong with it and how its text begins."""
    if content is None:
        return None, "the file has changed, or the record is too large to be shown", None
    try:
        is_flat = content.count(b"[") + content.count(b"{") < _SURELY_FLAT
        record = read_leniently(content if is_flat else cut_levels(content, MOST_LEVELS))
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else ValueError("it is nested too deeply")
        return None, malformation(content[:LONGEST_TEXT], reason), content[:LONGEST_TEXT].decode(errors="replace")
    if isinstance(record, dict):
        return record, None, None
    return None, "the line is JSON, but no object", content[:LONGEST_TEXT].decode(errors="replace")


def _row_of_attempt(index: FileIndex, position: int, rollout: str) -> dict[str, Any]:
    """The row of a failed attempt that was not the last word on its rollout."""
    names = ("task", "repeat", "agent", "failure_class", "duration_s", "line")
    values = {name: index.column(name).at(position) for name in names}
    times = {name: moment_of(index.column(name).at(position)) for name in ("started_at", "ended_at")}
    nothing = dict.fromkeys(("model", "reward", "incomplete", "incomplete_reason", "tool_calls", "steps"))
    tokens = dict.fromkeys(("input_tokens", "output_tokens", "total_tokens", "cost_usd"))
    rest: dict[str, Any] = {"outcome": "failed", "attempts": None, "tools": [], "fields": {}}
    return {"id": rollout, **values, **times, **nothing, **tokens, **rest}


def _fields(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        if len(found) < _MOST_FIELDS:
            found[name] = plain(value)

    if isinstance(record, dict):
        visit_fields(record, note)
    return found


def timing_of(record: Any) -> dict[str, Any] | None:
    """Where the time went, as far as the record tells."""
    if not isinstance(record, Mapping):
        return None
    duration, _, _ = times_of(record)
    timing = record.get(TIMING_KEY)
    told = timing.get("calls") if isinstance(timing, dict) else None
    calls = list(_calls(told if isinstance(told, list) else []))
    return None if duration is None and not calls else {"duration_s": duration, "calls": calls}


def _calls(told: list[Any]) -> Iterator[dict[str, Any]]:
    for call in told[:_MOST_CALLS]:
        if not isinstance(call, dict):
            continue
        path, server = (value if isinstance(value := call.get(key), str) else "" for key in ("path", "server"))
        is_own = path in ("/verify", "/seed_session")
        kind = "model" if path.endswith(tuple(MODEL_PATHS)) else path.strip("/") if is_own else "tool"
        name = server if kind != "tool" or not path else path.strip("/")
        yield {
            "kind": call["kind"] if isinstance(call.get("kind"), str) else kind,
            "name": call["name"] if isinstance(call.get("name"), str) else name,
            "server": server or None,
            "path": path or None,
            "start_s": number(call.get("start_s")),
            "duration_s": number(call.get("duration_s")),
        }


def _attempts(run: Run, row: int | None, rollout: str) -> list[dict[str, Any]]:
    """All attempts at a rollout, failed ones first, as they were made."""
    table = run.table
    failed = table.attempts_of(row) if row is not None else []
    if not failed and rollout[0] == "f":
        place = table.place_of(rollout)
        failed = [] if place is None else [place[1]]
    attempts = [_failed_attempt(table.failures, position) for position in failed[-_MOST_ATTEMPTS:]]
    if rollout[0] == "r" and row is not None:
        shown = table.shown(row)
        attempts.append(
            {
                "id": rollout,
                "failure_class": shown["failure_class"],
                **dict.fromkeys(("message", "status", "server")),
                **{name: shown[name] for name in ("started_at", "ended_at", "duration_s")},
            }
        )
    return attempts


def _failed_attempt(index: FileIndex, position: int) -> dict[str, Any]:
    record, problem, _ = _read(_content(index, position))
    record = record if isinstance(record, dict) else {}
    facts = facts_of(record, is_failure=True)
    duration, start, end = facts[-3:]
    message = record.get(FAILURE_MESSAGE_KEY, problem)
    return {
        "id": f"f{int(index.column('line').at(position))}",
        "failure_class": index.column("failure_class").at(position),
        "message": None if message is None else Shown().value(message),
        "status": Shown().value(record.get(FAILURE_STATUS_KEY)),
        "server": Shown().value(record.get(FAILURE_SERVER_KEY)),
        "started_at": moment_of(start),
        "ended_at": moment_of(end),
        "duration_s": duration,
    }


def _neighbours(run: Run, row: int | None, order: Any) -> dict[str, str | None]:
    """The rollouts before and after a row in a list."""
    places = [] if row is None else (order == row).nonzero()[0]
    if not len(places):
        return {"previous": None, "next": None}
    place = int(places[0])
    before = run.table.id_of(int(order[place - 1])) if place else None
    after = run.table.id_of(int(order[place + 1])) if place + 1 < len(order) else None
    return {"previous": before, "next": after}
