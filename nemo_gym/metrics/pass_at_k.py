"""pass@k, average and majority vote over the rollouts of each task, as percentages.

What one rollout contributes is named scores and an answer that can be compared. Tasks with equally many rollouts
form one matrix (a row per task, NaN where a score is absent), so that uneven tasks cost no padding and every curve
over k is a few array operations per matrix.

Three documented keys keep a questionable meaning because programs read them; each has a companion, added after all
documented keys:

* `majority@k/no_answer` is always 0, since only rollouts with an answer vote. `unanswered@k` is the percentage of tasks
  that have no answer among their first k rollouts; absent when every task's first rollout has one.
* `per_sample_aggregate` leaves out run positions without any value, so that later runs move up, and
  `…/std_dev_across_runs` and `…/std_err_across_runs` are taken over the moved runs. For scores with such a gap,
  `per_sample_aggregate_aligned` keeps the position (null), and `…/aligned_std_dev_across_runs` and
  `…/aligned_std_err_across_runs` are taken over the first k positions.
* `…/avg_sample_std_dev` is in score units. `…/percent_avg_sample_std_dev` is in percentage points, like its siblings.
"""

import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

Rollout = dict[str, Any]
Scores = dict[str, float]
ScoreFn = Callable[[Any], Mapping[str, Any]]
NO_ANSWER = "no_answer"
Floats = NDArray[np.float64]
Blocks = list[Floats]
Tasks = Sequence[Sequence[Rollout]]
PER_SAMPLE = "per_sample_aggregate"
PER_SAMPLE_ALIGNED = "per_sample_aggregate_aligned"
_SPREAD_SUFFIXES = ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")


def score_rollout(rollout: Rollout, score_fn: ScoreFn | None, answer_key: str | None) -> Scores:
    """The usable scores of one rollout, bools as 0 or 1, plus `no_answer` when there is an `answer_key`."""
    if not isinstance(rollout, dict):
        return {}
    scores: Scores = {}
    for name, value in _raw_scores(rollout, score_fn).items():
        number = usable_number(value)
        if number is not None:
            scores[name] = number
    if answer_key is not None:
        scores[NO_ANSWER] = int(rollout.get(answer_key) is None)
    return scores


def usable_number(value: object) -> float | None:
    """`value` as an int or float when it is a finite number, else None."""
    if isinstance(value, (bool, np.bool_)):
        return int(value)
    if not isinstance(value, (int, float)):
        if not isinstance(value, Real):
            return None
        value = float(value)
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def voting_key(rollout: Rollout, answer_key: str) -> Hashable:
    """The rollout's answer in a form that can be counted; None when it has none."""
    answer = rollout.get(answer_key) if isinstance(rollout, dict) else None
    return hashable(answer)


def hashable(value: Any) -> Hashable:
    """`value` itself when it can be hashed, else its compact JSON, marked so that no text equals it."""
    try:
        hash(value)
    except TypeError:
        return ("json", _compact_json(value))
    result: Hashable = value
    return result


def _raw_scores(rollout: Rollout, score_fn: ScoreFn | None) -> Mapping[str, Any]:
    if score_fn is None:
        return {"accuracy": rollout.get("reward")}
    try:
        return score_fn(rollout)
    except Exception:
        if usable_number(rollout.get("reward")) is None:
            return {}
        raise


def _compact_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return repr(value).encode()


class Curve(NamedTuple):
    """For k = 1, 2, …: the sum of a quantity over the tasks that have it, and how many have it."""

    totals: Floats
    tasks: Floats

    def means(self) -> list[float | None]:
        """The mean for each k; None where no task counts."""
        pairs = zip(self.totals.tolist(), self.tasks.tolist(), strict=True)
        return [total / tasks if tasks else None for total, tasks in pairs]


def blocks_by_length(all_scores: Sequence[Sequence[Mapping[str, float]]], name: str) -> Blocks:
    """The values of score `name`, one matrix per distinct number of rollouts; tasks without rollouts have none."""
    rows: dict[int, list[list[float]]] = {}
    for task in all_scores:
        rows.setdefault(len(task), []).append([scores.get(name, np.nan) for scores in task])
    return [np.array(block, np.float64) for length, block in rows.items() if length]


def pass_curve(blocks: Blocks, max_k: int) -> Curve:
    """Chance that k rollouts drawn from a task's contain a pass; the best of the first k where scores are not 0 or 1.

    A task with fewer than k values does not count.
    """
    curve = Curve(np.zeros(max_k), np.zeros(max_k))
    for block in blocks:
        absent = np.isnan(block)
        binary = np.all(absent | (block == 0) | (block == 1), axis=1)
        sizes = np.sum(~absent, axis=1)
        zeros = np.sum(block == 0, axis=1)
        cases, repeats = np.unique(np.stack([sizes[binary], zeros[binary]]), axis=1, return_counts=True)
        for size, wrong, repeat in zip(*cases.tolist(), repeats.tolist(), strict=True):
            curve.totals[:size] += repeat * _pass_chances(size, wrong)
            curve.tasks[:size] += repeat
        if not binary.all():
            _add_best(curve, block[~binary], absent[~binary])
    return curve


def average_curve(blocks: Blocks, max_k: int) -> Curve:
    """Mean of the values among a task's first k rollouts; a shorter task counts with all it has."""
    curve = Curve(np.zeros(max_k), np.zeros(max_k))
    for block in blocks:
        counts = np.cumsum(~np.isnan(block), axis=1)
        _extend(curve, np.nancumsum(block, axis=1) / np.maximum(counts, 1), counts >= 1)
    return curve


def sample_std_curve(blocks: Blocks, max_k: int) -> Curve:
    """Sample standard deviation of the values among a task's first k rollouts, where there are at least two."""
    curve = Curve(np.zeros(max_k), np.zeros(max_k))
    for block in blocks:
        counts = np.cumsum(~np.isnan(block), axis=1)
        _extend(curve, np.sqrt(_squares(block, counts) / np.maximum(counts - 1, 1)), counts >= 2)
    return curve


def position_curve(blocks: Blocks, max_k: int) -> Curve:
    """The values of all tasks' rollouts number k alone."""
    curve = Curve(np.zeros(max_k), np.zeros(max_k))
    for block in blocks:
        length = block.shape[1]
        curve.totals[:length] += np.nansum(block, axis=0)
        curve.tasks[:length] += np.sum(~np.isnan(block), axis=0)
    return curve


def majority_curve(
    all_scores: Sequence[Sequence[Mapping[str, float]]],
    answers: Sequence[Sequence[Hashable]],
    name: str,
    max_k: int,
) -> Curve:
    """Score of the most frequent (answer, score) pairs among the first k rollouts, 0 without any; every task counts."""
    rows: dict[int, list[list[float]]] = {}
    for task, task_answers in zip(all_scores, answers, strict=True):
        values = [scores.get(name) for scores in task]
        rows.setdefault(len(task), []).append(majority_votes(values, task_answers))
    curve = Curve(np.zeros(max_k), np.zeros(max_k))
    for length, block in rows.items():
        votes = np.array(block, np.float64) if length else np.zeros((len(block), 1))
        _extend(curve, votes, np.ones_like(votes, dtype=bool))
    return curve


def unanswered_curve(answers: Sequence[Sequence[Hashable]], max_k: int) -> Curve:
    """Whether none of a task's first k rollouts has an answer; every task counts."""
    silent = np.array(
        [next((place for place, answer in enumerate(task) if answer is not None), max_k) for task in answers]
    )
    totals = np.array([np.count_nonzero(silent >= k) for k in range(1, max_k + 1)], np.float64)
    return Curve(totals, np.full(max_k, float(len(answers))))


def _extend(curve: Curve, values: Floats, valid: NDArray[np.bool_]) -> None:
    """Add a value per task and k; beyond a task's length its last value holds."""
    length = min(values.shape[1], len(curve.totals))
    totals, tasks = np.sum(np.where(valid, values, 0.0), axis=0), np.sum(valid, axis=0)
    curve.totals[:length] += totals[:length]
    curve.tasks[:length] += tasks[:length]
    curve.totals[length:] += totals[-1]
    curve.tasks[length:] += tasks[-1]


def _add_best(curve: Curve, block: Floats, absent: NDArray[np.bool_]) -> None:
    order = np.argsort(absent, axis=1, kind="stable")
    best = np.maximum.accumulate(np.take_along_axis(np.where(absent, -np.inf, block), order, axis=1), axis=1)
    valid = ~np.take_along_axis(absent, order, axis=1)
    curve.totals[: block.shape[1]] += np.sum(np.where(valid, best, 0.0), axis=0)
    curve.tasks[: block.shape[1]] += np.sum(valid, axis=0)


def _pass_chances(size: int, wrong: int) -> Floats:
    """1 - C(wrong, k) / C(size, k) for k = 1 … size, from exact integers."""
    chances = []
    all_wrong = draws = 1
    for k in range(size):
        all_wrong *= max(wrong - k, 0)
        draws *= size - k
        chances.append(1 - all_wrong / draws)
    return np.array(chances, np.float64)


def _squares(block: Floats, counts: NDArray[np.int64]) -> Floats:
    """Running sum of squared deviations from the running mean along each row (Welford's update)."""
    squares = np.zeros_like(block)
    mean, total = np.zeros(len(block)), np.zeros(len(block))
    for position, values in enumerate(block.T):
        delta = np.where(np.isnan(values), 0.0, values - mean)
        mean = mean + delta / np.maximum(counts[:, position], 1)
        total = total + np.where(np.isnan(values), 0.0, delta * (values - mean))
        squares[:, position] = total
    return squares


def majority_votes(values: Sequence[float | None], answers: Sequence[Hashable]) -> list[float]:
    """For each prefix the mean score of the leading (answer, score) pairs."""
    counts: dict[tuple[Hashable, float], int] = {}
    most = leaders = 0
    leading_sum = 0.0
    votes = []
    for value, answer in zip(values, answers, strict=True):
        if value is not None and answer is not None:
            count = counts[answer, value] = counts.get((answer, value), 0) + 1
            if count > most:
                most, leaders, leading_sum = count, 1, float(value)
            elif count == most:
                leaders, leading_sum = leaders + 1, leading_sum + value
        votes.append(leading_sum / leaders if leaders else 0.0)
    return votes


def compute_pass_majority_metrics(
    tasks: Tasks, score_fn: ScoreFn | None = None, answer_key: str | None = None
) -> tuple[dict[str, Any], list[list[Scores]], list[str], int]:
    """Metrics for every k up to the longest task, the scores of each rollout, the score names, and that longest k.

    `score_fn` names a rollout's scores (default: `accuracy` = `reward`). With `answer_key`, the field that holds a
    rollout's answer, a score `no_answer` and the `majority@k` metrics are added; answers that cannot be hashed are
    compared by their JSON. A score that is not a finite number is left out. So is a rollout for which `score_fn` fails
    when its reward is not a number either; any other failure of `score_fn` is passed on.
    """
    if not tasks:
        return {}, [], [], 0
    all_scores = [[score_rollout(rollout, score_fn, answer_key) for rollout in task] for task in tasks]
    names = sorted({name for task in all_scores for scores in task for name in scores})
    max_k = max(map(len, tasks))
    blocks = {name: blocks_by_length(all_scores, name) for name in names}
    answers = None
    if answer_key is not None:
        answers = [[voting_key(rollout, answer_key) for rollout in task] for task in tasks]
    metrics: dict[str, Any] = _by_k(blocks, all_scores, answers, max_k)
    metrics.update(_across_runs(blocks, max_k))
    if answers is not None:
        metrics.update(_unanswered(answers, max_k))
    return metrics, all_scores, names, max_k


def add_avg_sample_std_dev(
    metrics: dict[str, Any],
    all_score_dicts: Sequence[Sequence[Mapping[str, float]]],
    score_names: Sequence[str],
    max_k: int,
) -> None:
    """Add to `metrics`, for k ≥ 2, how much the first k rollouts of one task differ, averaged over tasks."""
    means = {name: sample_std_curve(blocks_by_length(all_score_dicts, name), max_k).means() for name in score_names}
    in_percent: dict[str, float] = {}
    for k in range(2, max_k + 1):
        for name in score_names:
            mean = means[name][k - 1]
            if mean is not None:
                metrics[f"pass@1[avg-of-{k}]/{name}/avg_sample_std_dev"] = mean
                in_percent[f"pass@1[avg-of-{k}]/{name}/percent_avg_sample_std_dev"] = 100.0 * mean
    metrics.update(in_percent)


def compute_subset_metrics(
    tasks: Tasks, subset_key: str, score_fn: ScoreFn | None = None, answer_key: str | None = None
) -> dict[str, Any]:
    """The metrics of each subset of tasks, keys prefixed `<subset>/`.

    A task belongs to the subset its first rollout names in `subset_key`, or to none if that is empty.
    """
    subsets: dict[Hashable, tuple[Any, list[Sequence[Rollout]]]] = {}
    for task in tasks:
        first = task[0] if task else None
        subset = first.get(subset_key) if isinstance(first, dict) else None
        if subset:
            subsets.setdefault(hashable(subset), (subset, []))[1].append(task)
    return {
        f"{subset}/{key}": value
        for subset, members in subsets.values()
        for key, value in compute_pass_majority_metrics(members, score_fn, answer_key)[0].items()
        if key not in (PER_SAMPLE, PER_SAMPLE_ALIGNED)
    }


def highest_k_metrics(
    agent_metrics: Mapping[str, Any],
    pattern: str,
    score_names: Collection[str] | None = None,
    exclude_names: Collection[str] | None = None,
) -> dict[str, Any]:
    """The entries `<pattern>/<name>` with the highest k, in their original order.

    `pattern` holds `{k}` where the number stands. Measures of spread are never selected; `score_names` and
    `exclude_names` restrict the names before the highest k is sought.
    """
    if pattern.count("{k}") != 1:
        raise ValueError(f"pattern {pattern!r} must hold {{k}} exactly once, as in 'pass@{{k}}'")
    before, after = map(re.escape, pattern.split("{k}"))
    form = re.compile(f"{before}([0-9]+){after}/(.*)", re.DOTALL)
    found: list[tuple[int, str]] = []
    for key in agent_metrics:
        match = form.fullmatch(key)
        if match and _is_selected(match[2], score_names, exclude_names):
            found.append((int(match[1]), key))
    highest = max((k for k, _ in found), default=0)
    return {key: agent_metrics[key] for k, key in found if k == highest}


def _is_selected(name: str, wanted: Collection[str] | None, excluded: Collection[str] | None) -> bool:
    if name.endswith(_SPREAD_SUFFIXES) or (excluded and name in excluded):
        return False
    return wanted is None or name in wanted


def _by_k(
    blocks: Mapping[str, Blocks],
    all_scores: Sequence[Sequence[Scores]],
    answers: Sequence[Sequence[Hashable]] | None,
    max_k: int,
) -> dict[str, float]:
    columns: list[tuple[str, str, list[float | None]]] = []
    for name, block in blocks.items():
        columns.append(("pass@{k}", name, pass_curve(block, max_k).means()))
        columns.append(("pass@1[avg-of-{k}]", name, average_curve(block, max_k).means()))
        if answers is not None:
            columns.append(("majority@{k}", name, majority_curve(all_scores, answers, name, max_k).means()))
    return {
        f"{pattern.format(k=k)}/{name}": 100.0 * mean
        for k in range(1, max_k + 1)
        for pattern, name, means in columns
        if (mean := means[k - 1]) is not None
    }


def _across_runs(blocks: Mapping[str, Blocks], max_k: int) -> dict[str, Any]:
    """The mean of each run (rollout number j of every task) and how much the runs differ."""
    runs = {name: _percent(position_curve(block, max_k).means()) for name, block in blocks.items()}
    packed = {name: [mean for mean in means if mean is not None] for name, means in runs.items()}
    packed = {name: means for name, means in packed.items() if means}
    gapped = {name: runs[name] for name, means in packed.items() if runs[name][: len(means)] != means}
    metrics: dict[str, Any] = {PER_SAMPLE: packed, **_spread(packed, max_k)}
    if gapped:
        metrics[PER_SAMPLE_ALIGNED] = gapped
        metrics.update(_spread(gapped, max_k, "aligned_"))
    return metrics


def _percent(means: Sequence[float | None]) -> list[float | None]:
    return [None if mean is None else 100.0 * mean for mean in means]


def _spread(runs: Mapping[str, Sequence[float | None]], max_k: int, prefix: str = "") -> dict[str, float]:
    """Sample standard deviation of the first k runs, and that of their mean, where at least two have a value."""
    metrics: dict[str, float] = {}
    values = {name: np.array(means, np.float64) for name, means in runs.items()}
    for k in range(2, max_k + 1):
        for name in runs:
            first = values[name][:k]
            first = first[~np.isnan(first)]
            if len(first) >= 2:
                deviation = float(np.std(first, ddof=1))
                key = f"pass@1[avg-of-{k}]/{name}/{prefix}"
                metrics[f"{key}std_dev_across_runs"] = deviation
                metrics[f"{key}std_err_across_runs"] = deviation / math.sqrt(len(first))
    return metrics


def _unanswered(answers: Sequence[Sequence[Hashable]], max_k: int) -> dict[str, float]:
    shares = _percent(unanswered_curve(answers, max_k).means())
    if not shares or not shares[0]:
        return {}
    return {f"unanswered@{k}": share for k, share in enumerate(shares, 1) if share is not None}
