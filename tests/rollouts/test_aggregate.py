"""Asking agents for their metrics, and whether those on disk are still those of the run."""

import asyncio
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.collect.metrics import (
    AgentMetrics,
    AgentRecords,
    AggregationError,
    ask_agents,
    current_metrics,
    group_by_agent,
    mark_outdated,
    read_metrics,
    values_for_tracking,
    write_metrics,
)
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import Expected
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics

PATHS = RolloutPaths(Path("out.jsonl"))


def record(task: int, agent: str = "alpha") -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": agent}, "reward": 1.0}


async def count(agent: str, records: Collection[Any]) -> object:
    return {"agent_metrics": {"records": len(records)}}


def test_agents_are_answered_for_in_the_order_of_their_names() -> None:
    groups = group_by_agent([record(0, "beta"), record(1, "alpha"), record(2, "beta"), {"reward": 1.0}])

    metrics = asyncio.run(ask_agents(groups, count))

    assert [(it.agent, it.metrics.agent_metrics) for it in metrics] == [
        ("alpha", {"records": 1}),
        ("beta", {"records": 2}),
    ]


def test_an_agent_of_which_nothing_is_finished_has_no_entry_in_which_its_mean_would_be_missing() -> None:
    groups = group_by_agent([record(0)])
    groups["beta"] = AgentRecords(failed={(1, 0)}, expected=Expected(tasks=2, rollouts=2))

    [alpha] = asyncio.run(ask_agents(groups, count))

    assert (alpha.agent, alpha.coverage) == ("alpha", None)


def test_without_a_single_record_there_are_no_metrics() -> None:
    assert asyncio.run(ask_agents({"alpha": AgentRecords(expected=Expected(tasks=1, rollouts=1))}, count)) == []


def test_every_agent_that_fails_is_named_in_one_error() -> None:
    async def ask(agent: str, records: Collection[Any]) -> object:
        if agent == "alpha":
            raise ConnectionError("nobody there")
        return {"agent_metrics": 3} if agent == "beta" else {}

    groups = group_by_agent([record(n, name) for n, name in enumerate(("alpha", "beta", "gamma"))])

    with pytest.raises(AggregationError) as raised:
        asyncio.run(ask_agents(groups, ask))

    assert "agent 'alpha' could not be asked for its metrics: nobody there" in str(raised.value)
    assert "agent 'beta' answered /aggregate_metrics with something that is no metrics (agent_metrics: " in str(
        raised.value
    )
    assert "gamma" not in str(raised.value)


def test_metrics_survive_their_file() -> None:
    metrics = [AgentMetrics("alpha", AggregateMetrics(key_metrics={"mean/reward": 0.5}), {"scored": {"rollouts": 2}})]

    write_metrics(metrics, PATHS.aggregate_metrics)

    assert read_metrics(PATHS.aggregate_metrics) == metrics


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '[{"agent_ref": {}}]', '[{"agent_ref": {"name": "a"}, "key_metrics": 3}]']
)
def test_a_metrics_file_of_another_kind_is_none(content: str) -> None:
    PATHS.aggregate_metrics.write_text(content)

    assert not read_metrics(PATHS.aggregate_metrics)


def test_metrics_on_disk_count_only_while_nothing_newer_is_there() -> None:
    for path in (PATHS.rollouts, PATHS.failures, PATHS.materialized_inputs):
        path.write_text(json.dumps(record(0)) + "\n")
        os.utime(path, (100, 100))
    assert current_metrics(PATHS) is None

    write_metrics([AgentMetrics("alpha", AggregateMetrics())], PATHS.aggregate_metrics)
    os.utime(PATHS.aggregate_metrics, (100, 100))
    assert [it.agent for it in current_metrics(PATHS) or ()] == ["alpha"]

    os.utime(PATHS.failures, (101, 101))
    assert current_metrics(PATHS) is None

    os.utime(PATHS.aggregate_metrics, (200, 200))  # the clock was set back after they were written
    mark_outdated(PATHS.aggregate_metrics)
    assert current_metrics(PATHS) is None


def test_a_run_without_a_rollout_has_no_metrics_to_compute() -> None:
    assert current_metrics(PATHS) == []


def test_a_tracker_gets_the_coverage_as_flat_values() -> None:
    coverage = {"scored": {"rollouts": 2, "tasks": 1}, "mean_excluding_failures": 0.5, "ci95": {"x": [0, 1]}}
    metrics = AgentMetrics("a", AggregateMetrics(agent_metrics={"mean/reward": 0.5, "per_sample": [1]}), coverage)

    assert values_for_tracking([metrics]) == {
        "a/mean/reward": 0.5,
        "coverage/a/scored_rollouts": 2,
        "coverage/a/scored_tasks": 1,
        "coverage/a/mean_excluding_failures": 0.5,
    }
