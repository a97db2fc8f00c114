"""Which fields of the rows identify tasks, and which group them: what error messages may advise.

The files are read again for this, as only a comparison that is refused needs it.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from nemo_gym.compare.measure import QUESTIONS, MeasuredRun, Row, iter_rows
from nemo_gym.errors import ConfigError, did_you_mean, listed
from nemo_gym.runs.rows import digest_of, telling_fields

_MISSING = 0
_MOST_FIELDS = 200
_MOST_LEVELS = 4
_MOST_ADVISED = 3
_LEAST_SHARED = 0.5
GROUPS_SHOWN = 50


def identifying_fields(base: MeasuredRun, new: MeasuredRun) -> list[tuple[str, int]]:
    """Return the fields by which tasks of two runs can be matched, the best first.

    Such a field has another value in every task of a run, and values that the runs share. With each goes the number of
    tasks that it matches, at least half of those of the smaller run. Of fields that match as many, ids come first,
    then questions.
    """
    ours, theirs = (_unique_values(run) for run in (base, new))
    shared = {name: len(ours[name] & theirs[name]) for name in ours.keys() & theirs.keys()}
    least = max(1, _LEAST_SHARED * min(len(base.tasks), len(new.tasks)))
    found = [(name, count) for name, count in shared.items() if count >= least]
    return sorted(found, key=lambda field: (-field[1], _usual_place(field[0]), field[0]))


def pairing_advice(base: MeasuredRun, new: MeasuredRun) -> str | None:
    """Return which `+pair_by` matches how many tasks and why, in words; None where no field does."""
    fields = identifying_fields(base, new)[:_MOST_ADVISED]
    if not fields:
        return None
    choices = " or ".join(f"+pair_by={name} matches {count:,} tasks" for name, count in fields)
    return f"{choices} (its value is another one in every task, and both runs have it)"


def refuse_lacking(runs: Sequence[MeasuredRun]) -> None:
    """Refuse runs of which tasks lack the field that they are to be matched by.

    Raises:
        ConfigError: with how many they are, and a field that is spelled similarly.
    """
    for run in runs:
        if run.lacking:
            names = [name for _, row in islice(iter_rows(run), 1) for name, _ in _leaves(telling_fields(row))]
            which = "no task has" if run.place_of.keys() == {None} else f"{run.lacking:,} tasks lack"
            raise ConfigError(
                f"+pair_by={run.pair_by}: {which} this field in {run.name}{did_you_mean(run.pair_by, names)}"
            )


def grouping_fields(run: MeasuredRun) -> list[str]:
    """Return the fields that have few values over many tasks, so that `+by` can group by them."""
    found = []
    for name, digests in _digests_by_field(run).items():
        values = len({*digests} - {_MISSING})
        if 1 < values <= min(GROUPS_SHOWN, len(run.tasks) - 1):
            found.append(name)
    return sorted(found)


def fields_text(run: MeasuredRun) -> str:
    """Return `; there are a, b` with the fields that `+by` can group by; nothing where there are none."""
    names = grouping_fields(run)
    return f"; there are {listed(names, 20)}" if names else ""


def _usual_place(name: str) -> int:
    last = name.rpartition(".")[2].lower()
    if last in ("id", "uuid", "guid") or last.endswith(("_id", "_uuid")):
        return 0
    return 1 if last in QUESTIONS else 2


def _unique_values(run: MeasuredRun) -> dict[str, set[int]]:
    """Return the fields that have another value in every task, with these values."""
    found = {}
    for name, digests in _digests_by_field(run).items():
        values = {*digests}
        if _MISSING not in values and len(values) == len(run.tasks):
            found[name] = values
    return found


def _digests_by_field(run: MeasuredRun) -> dict[str, "array[int]"]:
    """Return a digest of the value that each task has in each field; fields that vary within a task are left out."""
    found: dict[str, array[int]] = {}
    varying: set[str] = set()
    for place, row in iter_rows(run):
        for name, value in _leaves(telling_fields(row)):
            if name not in found and len(found) == _MOST_FIELDS:
                continue
            digests = found.setdefault(name, array("Q", bytes(8 * len(run.tasks))))
            digest = _digest(value)
            if digests[place] not in (_MISSING, digest):
                varying.add(name)
            digests[place] = digest
    return {name: digests for name, digests in found.items() if name not in varying}


def _digest(value: Any) -> int:
    return int.from_bytes(digest_of(value, 8), "little") or 1


def _leaves(fields: Row, path: str = "", level: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield every value that is there by its dotted name, as `+pair_by` and `+by` take it."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value and level < _MOST_LEVELS:
            yield from _leaves(value, f"{path}{name}.", level + 1)
        elif value is not None:
            yield f"{path}{name}", value
