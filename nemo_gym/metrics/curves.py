"""Sums over tasks as functions of k, the number of rollouts looked at.

Tasks with equally many rollouts form one matrix (a row per task, NaN where a score is absent), so that uneven tasks
cost no padding and every curve is a few array operations per matrix.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Blocks = list[Floats]


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
        rows.setdefault(len(task), []).append(_votes(values, task_answers))
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


def _votes(values: Sequence[float | None], answers: Sequence[Hashable]) -> list[float]:
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
