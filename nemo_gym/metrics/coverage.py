"""How much of a run a score rests on: what was expected, what was scored, and what failures would make of the mean."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_gym.metrics.columns import REWARD, RolloutTable
from nemo_gym.metrics.intervals import Estimate, clustered_mean
from nemo_gym.metrics.ordered import SortedRollouts

Key = tuple[int, int]
"""Task index and rollout index."""


def compute_coverage(
    scored: RolloutTable | Iterable[Mapping[str, Any]],
    failed: Iterable[Key] = (),
    expected_rollouts: int | None = None,
    expected_tasks: int | None = None,
) -> dict[str, Any]:
    """The `coverage` entry of one agent.

    `scored` are the agent's results, `failed` the keys of rollouts whose last attempt failed; a key that is in both
    counts as scored. The numbers expected are None when unknown, and so is then what is missing.

    * `expected`, `scored`, `failed`, `missing`: each `{"rollouts": …, "tasks": …}`; the last three add up to the first.
      A rollout is scored when its reward is a finite number and missing when it is neither scored nor failed. A task is
      scored when any of its rollouts is, else failed when any of them is, else missing.
    * `mean_excluding_failures` is over the scored rollouts, `mean_failures_as_zero` over these and the failed ones.
    * `ci95` holds `[low, high]` for each of the two means, null for fewer than two tasks.
    * `tasks_per_k`: for each k (as text) how many tasks have at least k scored rollouts.
    """
    rewards, tasks, numbers = _scores(scored if isinstance(scored, RolloutTable) else _read(scored))
    failures = set(failed)
    if failures:
        failures.difference_update(zip(tasks.tolist(), numbers.tolist(), strict=True))
    failed_tasks = np.array([task for task, _ in failures], np.int64)
    scored_alone = clustered_mean(rewards, tasks)
    with_failures = clustered_mean(np.append(rewards, np.zeros(len(failures))), np.append(tasks, failed_tasks))
    per_task = np.unique(tasks, return_counts=True)[1]
    return {
        "expected": {"rollouts": expected_rollouts, "tasks": expected_tasks},
        "scored": {"rollouts": scored_alone.rollouts, "tasks": scored_alone.tasks},
        "failed": {"rollouts": len(failures), "tasks": with_failures.tasks - scored_alone.tasks},
        "missing": {
            "rollouts": _missing(expected_rollouts, with_failures.rollouts),
            "tasks": _missing(expected_tasks, with_failures.tasks),
        },
        "mean_excluding_failures": scored_alone.mean,
        "mean_failures_as_zero": with_failures.mean,
        "ci95": {"mean_excluding_failures": _ends(scored_alone), "mean_failures_as_zero": _ends(with_failures)},
        "tasks_per_k": {str(k): int(np.sum(per_task >= k)) for k in range(1, int(per_task.max(initial=0)) + 1)},
    }


def _read(records: Iterable[Mapping[str, Any]]) -> RolloutTable:
    table = RolloutTable()
    for record in records:
        table.add(record)
    return table


def _scores(table: RolloutTable) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The usable rewards, and the task and rollout index of each."""
    rollouts = SortedRollouts(table)
    for column in rollouts.columns:
        if column.name == REWARD:
            usable = np.isfinite(column.values)
            ranks = column.ranks[usable]
            return column.values[usable], rollouts.tasks[ranks], rollouts.rollouts[ranks]
    return np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64)


def _missing(expected: int | None, seen: int) -> int | None:
    return None if expected is None else max(0, expected - seen)


def _ends(estimate: Estimate) -> list[float] | None:
    return None if estimate.ci95 is None else list(estimate.ci95)
