"""The story of a comparison: read the runs, match their tasks, compare every metric, say what else differs."""

import glob
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gym.compare import CompareConfig
from nemo_gym.compare.differences import Differing, what_differs
from nemo_gym.compare.fields import GROUPS_SHOWN, fields_text, refuse_lacking
from nemo_gym.compare.measure import (
    AMOUNTS,
    COST,
    Floats,
    MeasuredRun,
    Task,
    Wanted,
    has_rows,
    measure_run,
    require_metrics,
)
from nemo_gym.compare.pairing import (
    Mask,
    Matched,
    match,
    pair_values,
    refuse_unmatched,
    say_what_was_pooled,
    task_values,
)
from nemo_gym.errors import ConfigError
from nemo_gym.metrics.intervals import Estimate, clustered_mean
from nemo_gym.metrics.paired import Difference, holm, mcnemar_exact, paired_difference, scale_of
from nemo_gym.runs.files import require_rollouts
from nemo_gym.runs.select import Expression

HIGHER_IS_BETTER = ("reward", "pass@", "majority@")
_SMALL_GROUP = 20
_HEAT_MAP_TASKS = 200


@dataclass(frozen=True)
class Compared:
    """One metric of two runs."""

    metric: str
    base: str
    new: str
    found: Difference | None
    """None where fewer than two tasks have the metric in both runs."""
    with_failures: Difference | None
    """The same with failed rollouts counted as 0, where that makes sense and there are any."""
    is_share: bool
    """Whether it lies between 0 and 1, so that differences are points of a hundred."""
    repeats: str
    """How many rollouts of a task there are, in words."""
    mcnemar_p: float | None = None
    """Of McNemar's exact test, for one rollout per task that passed or failed."""
    adjusted_p: float | None = None
    """Holm's, where several comparisons are made."""

    @property
    def contradicts(self) -> bool:
        """Whether counting failures as 0 leads to another conclusion."""
        one, other = self.found, self.with_failures
        if one is None or other is None:
            return False
        turned = one.delta * other.delta < 0 and (one.is_significant or other.is_significant)
        return turned or one.is_significant != other.is_significant


@dataclass(frozen=True)
class Flip:
    """A task that changed."""

    task: Task
    new_index: Any
    base: float
    new: float


@dataclass(frozen=True)
class Group:
    """The comparison among tasks with one value of a field."""

    value: Any
    compared: Compared
    is_small: bool


@dataclass(frozen=True)
class Standing:
    """One line of the leaderboard, over the tasks that all runs have scored."""

    name: str
    score: Estimate
    ranks: tuple[int, int]
    """The best and the worst rank that the differences allow."""


@dataclass
class Comparison:
    """Everything that is reported."""

    runs: list[MeasuredRun]
    matched: dict[str, Matched]
    """Against the baseline, by run."""
    metrics: list[Compared]
    """Of each run against the baseline; the first is the metric that decides."""
    tokens: dict[str, Compared]
    """Of each run against the baseline, where the gate asks for them."""
    cost: dict[str, Compared] = field(default_factory=dict)
    """The same in US dollars."""
    flips: dict[str, list[Flip]] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    pairs: list[Compared] = field(default_factory=list)
    """Every two runs, where there are more than two."""
    standings: list[Standing] = field(default_factory=list)
    heat: list[tuple[Task, list[float]]] = field(default_factory=list)
    """The value of each task in each run, those that differ most first."""
    differing: dict[str, Differing] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def base(self) -> MeasuredRun:
        """The run that the others are compared with."""
        return self.runs[0]

    def main(self, name: str) -> Compared:
        """What the first metric says of a run."""
        return next(each for each in self.metrics if each.new == name)


def compare_runs(config: CompareConfig) -> Comparison:
    """Compare runs as asked.

    Raises:
        ConfigError: a file is no run, a metric is nowhere, or the runs have too few tasks in common.
    """
    paths = {name: list(_files(name, given)) for name, given in config.runs.items()}
    is_gated_by_tokens = config.fail_if is not None and "tokens" in config.fail_if
    is_gated_by_cost = config.fail_if is not None and f"{COST}.delta" in config.fail_if
    wanted = Wanted(
        metrics=[*config.metric, *(["tokens"] if is_gated_by_tokens else []), *([COST] if is_gated_by_cost else [])],
        prices=config.prices,
        pair_by=config.pair_by,
        by=config.by,
        where=None if config.where is None else Expression.parse(config.where, "+where"),
        answer_field=config.answer_field,
    )
    by_rows = all(has_rows(files) for files in paths.values())
    runs = [measure_run(name, files, wanted, by_rows=by_rows) for name, files in paths.items()]
    _refuse_empty(runs, config)
    require_metrics(runs, [*config.metric, *([COST] if is_gated_by_cost else [])])
    refuse_lacking(runs)
    base, *others = runs
    matched = {run.name: match(base, run) for run in others}
    for run in others:
        if not config.allow_unmatched:
            refuse_unmatched(base, run, matched[run.name], config.pair_by)
    result = Comparison(
        runs=runs,
        matched=matched,
        metrics=[_compared(base, run, matched[run.name], each) for each in config.metric for run in others],
        tokens={run.name: _compared(base, run, matched[run.name], "tokens") for run in others if is_gated_by_tokens},
        cost={run.name: _compared(base, run, matched[run.name], COST) for run in others if is_gated_by_cost},
        differing={run.name: what_differs(base, run, matched[run.name]) for run in others},
        notes=say_what_was_pooled(runs),
    )
    _add_details(result, config)
    return result


def _files(name: str, given: Sequence[str]) -> Iterator[Path]:
    for pattern in given:
        found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207 -- absolute ones, too
        if not found:
            raise ConfigError(f"+runs: no file matches {pattern} (run {name})")
        for each in found:
            path = Path(each)
            if path.is_dir():
                raise ConfigError(f"+runs: {path} is a folder; name its rollouts, such as '{path}/*.jsonl'")
            if not path.is_file():
                raise ConfigError(f"+runs: {path} is not there (run {name})")
            is_beside = glob.has_magic(pattern) and path.stem.endswith(("_failures", "_materialized_inputs"))
            if not is_beside:
                require_rollouts(path, "runs")
                yield path


def _refuse_empty(runs: Sequence[MeasuredRun], config: CompareConfig) -> None:
    for run in runs:
        if not run.rollouts:
            which = "holds no rollouts" if config.where is None else f"has no rollout for which {config.where} holds"
            raise ConfigError(f"{run.name} {which}: {', '.join(map(str, run.paths))}")


def _compared(
    base: MeasuredRun, new: MeasuredRun, matched: Matched, metric: str, among: Mask | None = None
) -> Compared:
    ours, theirs = (task_values(run, metric) for run in (base, new))
    pairs = pair_values(matched, ours, theirs, among)
    scale = scale_of(pairs.rollouts, np.append(pairs.base, pairs.new))
    is_share = (
        metric not in AMOUNTS
        and bool(len(pairs.rollouts))
        and bool(np.all((pairs.rollouts >= 0) & (pairs.rollouts <= 1)))
    )
    most = 1.0 if is_share else math.inf
    found = paired_difference(pairs.base, pairs.new, scale, most)
    with_failures = None
    if metric.startswith(HIGHER_IS_BETTER) and (base.failed or new.failed):
        ours_zero, theirs_zero = (task_values(run, metric, failures_as_zero=True) for run in (base, new))
        zero = pair_values(matched, ours_zero, theirs_zero, among)
        with_failures = paired_difference(
            zero.base, zero.new, scale_of(zero.rollouts, np.append(zero.base, zero.new)), most
        )
    counts = np.append(ours.counts[matched.base[pairs.where]], theirs.counts[matched.new[pairs.where]])
    return Compared(
        metric=metric,
        base=base.name,
        new=new.name,
        found=found,
        with_failures=with_failures,
        is_share=is_share,
        repeats=_repeats(counts),
        mcnemar_p=_mcnemar(pairs.base, pairs.new) if pairs.is_single else None,
    )


def _repeats(counts: Any) -> str:
    if not len(counts):
        return ""
    fewest, most = int(counts.min()), int(counts.max())
    return str(most) if fewest == most else f"{fewest} to {most}"


def _mcnemar(base: Floats, new: Floats) -> float | None:
    values = np.append(base, new)
    if not len(base) or not np.all((values == 0) | (values == 1)):
        return None
    return mcnemar_exact(int(np.sum(base > new)), int(np.sum(new > base)))


def _add_details(result: Comparison, config: CompareConfig) -> None:
    base, *others = result.runs
    for run in others:
        matched = result.matched[run.name]
        result.flips[run.name] = _flips(base, run, matched, config.metric[0], config.flips)
        if config.by is not None:
            result.groups[run.name] = _groups(base, run, matched, config, result.notes)
    if len(result.runs) > 2:
        result.pairs = _every_pair(result.runs, config.metric[0])
        result.standings = _standings(result.runs, result.pairs, config.metric[0])
    result.heat = _heat(result.runs, config.metric[0])


def _flips(base: MeasuredRun, new: MeasuredRun, matched: Matched, metric: str, most: int) -> list[Flip]:
    pairs = pair_values(matched, task_values(base, metric), task_values(new, metric))
    changes = pairs.new - pairs.base
    order = np.argsort(-np.abs(changes), kind="stable")[:most]
    return [
        Flip(
            base.tasks[int(matched.base[pairs.where[place]])],
            new.tasks[int(matched.new[pairs.where[place]])].index,
            float(pairs.base[place]),
            float(pairs.new[place]),
        )
        for place in order.tolist()
        if changes[place]
    ]


def _groups(
    base: MeasuredRun, new: MeasuredRun, matched: Matched, config: CompareConfig, notes: list[str]
) -> list[Group]:
    of_task = [base.tasks[place].group for place in matched.base.tolist()]
    values = sorted({value for value in of_task if value is not None}, key=lambda value: (str(type(value)), value))
    if not values:
        raise ConfigError(f"+by={config.by}: no row has this field{fields_text(base)}")
    if len(values) > GROUPS_SHOWN:
        raise ConfigError(
            f"+by={config.by}: it has {len(values):,} values, more than {GROUPS_SHOWN}, so no groups{fields_text(base)}"
        )
    compared = []
    for value in values:
        among = np.array([each == value for each in of_task])
        compared.append(_compared(base, new, matched, config.metric[0], among))
    adjusted = iter(holm([each.found.p for each in compared if each.found is not None]))
    groups = []
    for value, each in zip(values, compared, strict=True):
        tasks = 0 if each.found is None else each.found.tasks
        raised = None if each.found is None else next(adjusted)
        groups.append(Group(value, _with_adjusted(each, raised), tasks < _SMALL_GROUP))
    small = sum(group.is_small for group in groups)
    if small:
        notes.append(f"{small} of {len(groups)} groups have fewer than {_SMALL_GROUP} tasks: read them with caution")
    return groups


def _with_adjusted(compared: Compared, p: float | None) -> Compared:
    return Compared(**{**vars(compared), "adjusted_p": p})


def _every_pair(runs: Sequence[MeasuredRun], metric: str) -> list[Compared]:
    compared = [_compared(one, other, match(one, other), metric) for one, other in combinations(runs, 2)]
    adjusted = iter(holm([each.found.p for each in compared if each.found is not None]))
    return [_with_adjusted(each, None if each.found is None else next(adjusted)) for each in compared]


def _standings(runs: Sequence[MeasuredRun], pairs: Sequence[Compared], metric: str) -> list[Standing]:
    keys = set.intersection(*(set(run.place_of) for run in runs))
    columns = [_values_of(run, keys, metric) for run in runs]
    usable = np.all(np.isfinite(np.array(columns)), axis=0) if keys else np.zeros(0, bool)
    standings = []
    for run, column in zip(runs, columns, strict=True):
        better = sum(_beats(pair, other=run.name) for pair in pairs)
        worse = sum(_beats(pair, winner=run.name) for pair in pairs)
        score = clustered_mean(column[usable], np.arange(int(usable.sum())))
        standings.append(Standing(run.name, score, (1 + better, len(runs) - worse)))
    return sorted(standings, key=lambda standing: -(standing.score.mean or 0.0))


def _values_of(run: MeasuredRun, keys: set[Any], metric: str) -> Floats:
    means = task_values(run, metric).means
    return means[[run.place_of[key] for key in keys]] if keys else means[:0]


def _beats(pair: Compared, winner: str | None = None, other: str | None = None) -> bool:
    """Whether `winner` is surely better than the other of the pair, or somebody surely better than `other`."""
    if pair.found is None or pair.adjusted_p is None or pair.adjusted_p >= 0.05:
        return False
    best, worst = (pair.new, pair.base) if pair.found.delta > 0 else (pair.base, pair.new)
    return best == winner if winner is not None else worst == other


def _heat(runs: Sequence[MeasuredRun], metric: str) -> list[tuple[Task, list[float]]]:
    """The tasks that differ most among the runs, with the value in each."""
    base = runs[0]
    keys = [key for key in base.place_of if all(key in run.place_of for run in runs[1:])]
    if not keys:
        return []
    values = np.array([task_values(run, metric).means[[run.place_of[key] for key in keys]] for run in runs])
    spread = values.max(axis=0) - values.min(axis=0)
    order = np.argsort(np.where(np.isnan(spread), 1.0, -spread), kind="stable")[:_HEAT_MAP_TASKS]
    return [
        (base.tasks[base.place_of[keys[place]]], values[:, place].tolist())
        for place in order.tolist()
        if not np.isnan(spread[place])
    ]
