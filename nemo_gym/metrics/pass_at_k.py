"""pass@k, average and majority vote over the rollouts of each task, as percentages.

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
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from nemo_gym.metrics import curves
from nemo_gym.metrics.scores import Rollout, ScoreFn, Scores, hashable, score_rollout, voting_key

Tasks = Sequence[Sequence[Rollout]]

PER_SAMPLE = "per_sample_aggregate"
PER_SAMPLE_ALIGNED = "per_sample_aggregate_aligned"
_SPREAD_SUFFIXES = ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")


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
    blocks = {name: curves.blocks_by_length(all_scores, name) for name in names}
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
    means = {
        name: curves.sample_std_curve(curves.blocks_by_length(all_score_dicts, name), max_k).means()
        for name in score_names
    }
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
    blocks: Mapping[str, curves.Blocks],
    all_scores: Sequence[Sequence[Scores]],
    answers: Sequence[Sequence[Hashable]] | None,
    max_k: int,
) -> dict[str, float]:
    columns: list[tuple[str, str, list[float | None]]] = []
    for name, block in blocks.items():
        columns.append(("pass@{k}", name, curves.pass_curve(block, max_k).means()))
        columns.append(("pass@1[avg-of-{k}]", name, curves.average_curve(block, max_k).means()))
        if answers is not None:
            columns.append(("majority@{k}", name, curves.majority_curve(all_scores, answers, name, max_k).means()))
    return {
        f"{pattern.format(k=k)}/{name}": 100.0 * mean
        for k in range(1, max_k + 1)
        for pattern, name, means in columns
        if (mean := means[k - 1]) is not None
    }


def _across_runs(blocks: Mapping[str, curves.Blocks], max_k: int) -> dict[str, Any]:
    """The mean of each run (rollout number j of every task) and how much the runs differ."""
    runs = {name: _percent(curves.position_curve(block, max_k).means()) for name, block in blocks.items()}
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
    shares = _percent(curves.unanswered_curve(answers, max_k).means())
    if not shares or not shares[0]:
        return {}
    return {f"unanswered@{k}": share for k, share in enumerate(shares, 1) if share is not None}
