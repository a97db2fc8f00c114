"""A run as numbers: which tasks it was asked, what its rollouts gave, and which of them failed.

A task is what was asked: rows with equal content are one task, whatever their numbers. What a run adds is no content:
indices, the agent's name, sampling parameters.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_gym.errors import ConfigError, did_you_mean, listed
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME, TIMING_KEY_NAME
from nemo_gym.metrics.pass_at_k import hashable, usable_number
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import asked_keys, read_manifest
from nemo_gym.runs.read import plain_records
from nemo_gym.runs.rows import ASKED, content_key
from nemo_gym.runs.select import Expression, field_of
from nemo_gym.runs.spending import Prices, prices_of, used_by
from nemo_gym.terminal import shown

Row = Mapping[str, Any]
Floats = NDArray[np.float64]
Places = NDArray[np.int64]

CONTENT, INDEX = "content", "index"
COST = "cost"
AMOUNTS = ("tokens", "input_tokens", "output_tokens", "duration", COST)
"""Metrics that are no shares, however small they are."""
_LABEL_CHARACTERS = 100
_TOKENS = {"tokens": "total_tokens", "input_tokens": "input_tokens", "output_tokens": "output_tokens"}
QUESTIONS = ("question", "problem", "query", "task", "prompt")
_ANSWERS = ("extracted_answer", "predicted_answer", "model_answer", "answer")


@dataclass(frozen=True)
class Task:
    """A task of a run."""

    index: Any
    """Its number in the input, of the first row with this content."""
    asked: str
    """What is asked, or how that begins."""
    group: Any = None
    """The value of the field that `+by` names."""

    @property
    def label(self) -> str:
        """How what is asked begins, on one line."""
        return shown(self.asked, _LABEL_CHARACTERS)


@dataclass
class Wanted:
    """What is looked at in every record."""

    metrics: Sequence[str]
    pair_by: str = CONTENT
    by: str | None = None
    where: Expression | None = None
    answer_field: str | None = None
    prices: Mapping[str, Any] | None = None
    """What tokens cost; None for what the manifests of the runs say."""

    @property
    def row_fields(self) -> tuple[str, ...]:
        """Fields of rows that are needed while records are read."""
        names = [] if self.where is None else [name.removeprefix("row.") for name in self.where.names()]
        return tuple(dict.fromkeys([*names, *([self.by] if self.by else [])]))


@dataclass
class MeasuredRun:
    """The tasks of a run, and a column of numbers for each metric, in which rollouts that lack it have NaN."""

    name: str
    paths: list[Path]
    tasks: list[Task] = field(default_factory=list)
    place_of: dict[Any, int] = field(default_factory=dict)
    """Where in `tasks` the task with this key is."""
    of_rollout: "array[int]" = field(default_factory=lambda: array("q"))
    """The task of each rollout."""
    columns: dict[str, "array[float]"] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)
    """What each rollout answered, where votes are counted."""
    asked: int = 0
    """How many rollouts were asked for, as far as rows tell."""
    failed: Counter[int] = field(default_factory=Counter)
    """How many of them failed and were not made up for."""
    failure_classes: Counter[str] = field(default_factory=Counter)
    equal_rows: int = 0
    """Rows whose content another row had already."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The sampling parameters of its first row."""
    pair_by: str = CONTENT
    """What two rows have in common that are one task: `content`, `index` or a field."""
    lacking: int = 0
    """Tasks that lack the field `pair_by`."""
    reads_rows: bool = True
    """Whether tasks are known by their rows; else by what records say about the request."""

    @property
    def rollouts(self) -> int:
        """How many rollouts it has."""
        return len(self.of_rollout)

    def column(self, metric: str) -> tuple[Floats, Places]:
        """The usable values of a metric, and the task of each."""
        values = np.array(self.columns[metric], np.float64)
        finite = np.isfinite(values)
        return values[finite], np.array(self.of_rollout, np.int64)[finite]


def measure_run(name: str, paths: Sequence[Path], wanted: Wanted, *, by_rows: bool) -> MeasuredRun:
    """Read the files of one run.

    `by_rows` says whether tasks are known by their rows, in the materialized inputs, or by what their records hold.
    """
    run = MeasuredRun(name, list(paths), pair_by=wanted.pair_by, reads_rows=by_rows)
    run.columns = {metric: array("d") for metric in _columns_for(wanted.metrics)}
    for path in paths:
        _FileReader(run, RolloutPaths(path), wanted).read()
    return run


def iter_rows(run: MeasuredRun) -> Iterator[tuple[int, Row]]:
    """Read the rows of a run again, or its records where rows are not known, each with the place of its task."""
    for path in map(RolloutPaths, run.paths):
        source = path.materialized_inputs if run.reads_rows else path.rollouts
        for key, _, row in plain_records(source, "skip", may_lack_key=not run.reads_rows):
            place = run.place_of.get(_key_of(row, None if key is None else key[0], run.pair_by))
            if place is not None:
                yield place, row


def has_rows(paths: Iterable[Path]) -> bool:
    """Whether the rows of a run are known, for all of its files."""
    return all(RolloutPaths(path).materialized_inputs.is_file() for path in paths)


def _columns_for(metrics: Iterable[str]) -> list[str]:
    """The columns that these metrics need."""
    needed = ["reward" if "@" in metric else metric for metric in metrics]
    return list(dict.fromkeys([*needed, "reward"]))


class _FileReader:
    """Reads one rollouts file of a run, and what lies beside it."""

    def __init__(self, run: MeasuredRun, paths: RolloutPaths, wanted: Wanted) -> None:
        self._run = run
        self._paths = paths
        self._wanted = wanted
        self._place_of_index: dict[Any, int] = {}
        self._row_values: dict[Any, dict[str, Any]] = {}
        """The values that are needed of the row of each task, where any are."""
        prices = _prices(paths, wanted) if COST in run.columns else None
        self._getters = {metric: _getter(metric, prices) for metric in run.columns}
        votes = any(metric.startswith("majority@") for metric in wanted.metrics)
        self._answer = partial(_answer, wanted.answer_field) if votes else None
        self._asked = asked_keys(paths)

    def read(self) -> None:
        if self._run.reads_rows:
            for key, _, row in plain_records(self._paths.materialized_inputs, "skip"):
                assert key is not None
                if key[0] not in self._place_of_index:
                    self._place(key[0], row)
                self._run.asked += 1
        made = self._read_rollouts()
        self._read_failures(made)

    def _read_rollouts(self) -> set[Any]:
        made: set[Any] = set()
        may_be_failed = self._paths.failures.is_file() and self._paths.failures.stat().st_size > 0
        run = self._run
        columns = [(run.columns[metric], getter) for metric, getter in self._getters.items()]
        before = len(run.of_rollout)
        for number, (key, _, record) in enumerate(
            plain_records(self._paths.rollouts, "skip", may_lack_key=True), before
        ):
            if self._asked is not None and key is not None and key not in self._asked:
                continue
            index = number if key is None else key[0]
            place = self._place_of_index.get(index)
            if place is None:
                place = self._place(index, record)
            if may_be_failed:
                made.add(key)
            if self._wanted.where is not None and not self._is_wanted(record, index):
                run.asked -= run.reads_rows
                continue
            run.of_rollout.append(place)
            for column, getter in columns:
                column.append(getter(record))
            if self._answer is not None:
                run.answers.append(self._answer(record))
        return made

    def _read_failures(self, made: set[Any]) -> None:
        last: dict[Any, Any] = {}
        for key, _, record in plain_records(self._paths.failures, "skip"):
            if key not in made and (self._asked is None or (key is not None and key in self._asked)):
                last[key] = record.get("_ng_failure_class")
        for (index, _), failure_class in last.items():
            place = self._place_of_index.get(index)
            if place is None or (self._wanted.where is not None and not self._is_wanted({}, index)):
                continue
            self._run.failed[place] += 1
            self._run.failure_classes[str(failure_class)] += 1

    def _is_wanted(self, record: Row, index: Any) -> bool:
        assert self._wanted.where is not None
        of_row = self._row_values.get(index, {})

        def lookup(name: str) -> Any:
            bare = name.removeprefix("record.").removeprefix("row.")
            found = field_of(record, bare)
            return of_row.get(bare) if found is None else found

        return self._wanted.where.holds(lookup)

    def _place(self, index: Any, row: Row) -> int:
        """Where the task of this row is; a new one, if it was not met before."""
        place = self._place_of_index.get(index)
        if place is None:
            run = self._run
            key = _key_of(row, index, run.pair_by)
            run.lacking += key is None
            place = run.place_of.get(key)
            if place is None:
                place = run.place_of[key] = len(run.tasks)
                run.tasks.append(self._new_task(index, row))
            else:
                run.equal_rows += 1
            self._place_of_index[index] = place
            if self._wanted.row_fields:
                self._row_values[index] = {name: field_of(row, name) for name in self._wanted.row_fields}
        return place

    def _new_task(self, index: Any, row: Row) -> Task:
        run = self._run
        params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
        if not run.tasks and isinstance(params, dict):
            run.sampling = {name: value for name, value in params.items() if name not in ASKED}
        group = None if self._wanted.by is None else field_of(row, self._wanted.by)
        return Task(index, _asked(row), hashable(group))


def _key_of(row: Row, index: Any, pair_by: str) -> Any:
    """What tasks of two runs have in common if they are the same."""
    if pair_by == INDEX:
        return index
    if pair_by != CONTENT:
        return hashable(field_of(row, pair_by))
    return content_key(row)


def _asked(row: Row) -> str:
    """How the question begins: that of the row, which has no prompt around it, else the last thing that a user said."""
    question = next((row[name] for name in QUESTIONS if isinstance(row.get(name), str) and row[name].strip()), None)
    params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
    given = question or (params.get("input") if isinstance(params, dict) else None)
    if isinstance(given, list):
        said = [item.get("content") for item in given if isinstance(item, dict) and item.get("role") == "user"]
        given = said[-1] if said else None
    if isinstance(given, list):
        given = next((part.get("text") for part in given if isinstance(part, dict) and part.get("text")), None)
    return given[: 4 * _LABEL_CHARACTERS] if isinstance(given, str) else ""


def _prices(paths: RolloutPaths, wanted: Wanted) -> Prices | None:
    manifest = read_manifest(paths.manifest)
    models = () if manifest is None else manifest.models
    given = wanted.prices or (None if manifest is None else manifest.options.get("prices"))
    return prices_of(given, models)


def _getter(metric: str, prices: Prices | None) -> Callable[[Row], float]:
    if metric == COST and prices is not None:
        return partial(_cost, prices)
    if metric in _TOKENS:
        return partial(_tokens, _TOKENS[metric])
    return _duration if metric == "duration" else partial(_number, metric)


def _number(name: str, record: Row) -> float:
    value = record[name] if name in record else field_of(record, name)
    if type(value) is float or type(value) is int:  # the usual ones, quickly
        return value if math.isfinite(value) else math.nan
    number = usable_number(value)
    return math.nan if number is None else float(number)


def _tokens(name: str, record: Row) -> float:
    response = record.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    return _number(name, usage) if isinstance(usage, dict) else math.nan


def _cost(prices: Prices, record: Row) -> float:
    used = used_by(record)
    cost = None if used is None else prices.cost_usd(used)
    return math.nan if cost is None else cost


def _duration(record: Row) -> float:
    timing = record.get(TIMING_KEY_NAME)
    return _number("duration_s", timing) if isinstance(timing, dict) else math.nan


def _answer(name: str | None, record: Row) -> Any:
    found = next((each for each in ([name] if name else _ANSWERS) if record.get(each) is not None), None)
    return None if found is None else hashable(record[found])


def require_metrics(runs: Sequence[MeasuredRun], metrics: Sequence[str]) -> None:
    """Refuse a metric that a run has nowhere.

    Raises:
        ConfigError: with those that it has.
    """
    for run in runs:
        for metric in metrics:
            column = "reward" if "@" in metric else metric
            if not run.rollouts or np.any(np.isfinite(np.array(run.columns[column]))):
                continue
            if metric == COST:
                raise ConfigError(
                    f"what the rollouts of {run.name} cost is not known: say what tokens cost of the models that its "
                    "records show, as in '+prices={my-model: {input: 2.5, output: 10}}', or collect it with prices"
                )
            known = numbers_in(run.paths)
            raise ConfigError(
                f"+metric={metric}: no rollout of {run.name} has it as a number; there are "
                f"{listed(known, 20)}{did_you_mean(metric, known)}"
            )


def numbers_in(paths: Sequence[Path]) -> list[str]:
    """The metrics that the first rollouts of a run offer."""
    names: dict[str, None] = {}
    for path in paths:
        for count, (_, _, record) in enumerate(plain_records(path, "skip", may_lack_key=True)):
            if count == 100:
                break
            names.update((name, None) for name, value in record.items() if usable_number(value) is not None)
            tokens = [name for name in _TOKENS if math.isfinite(_tokens(_TOKENS[name], record))]
            names.update((name, None) for name in [*tokens, *(["duration"] if TIMING_KEY_NAME in record else [])])
    return sorted(name for name in names if not name.startswith("_ng_"))
