"""The two long steps of a run that keeps nothing in memory: make the rollouts, then ask for their metrics.

Both end in good order on Ctrl-C and SIGTERM.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from nemo_gym.jsonl import iter_lines
from nemo_gym.rollouts.aggregate import (
    AgentMetrics,
    AgentRecords,
    AggregationError,
    Ask,
    add_failures,
    ask_agents,
    mark_outdated,
    values_for_tracking,
    write_metrics,
)
from nemo_gym.rollouts.dispatch import Dispatch, DispatchSettings, Post
from nemo_gym.rollouts.failures import RetryPauses
from nemo_gym.rollouts.limits import prepare_connections
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.progress import Progress
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.repair import sound_records
from nemo_gym.rollouts.resume import Plan
from nemo_gym.rollouts.run import Run
from nemo_gym.rollouts.server_watch import ServerWatch
from nemo_gym.rollouts.signals import stopping_on_signals
from nemo_gym.rollouts.stall import Probe
from nemo_gym.rollouts.stop_rules import Stop, StopKind
from nemo_gym.rollouts.stored import stored_by_agent
from nemo_gym.rollouts.summary import RunSummary

T = TypeVar("T")


class Tracker(Protocol):
    """An experiment tracker; it never raises."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Take flat values."""

    def log_rollouts(self, lines: Iterable[bytes]) -> None:
        """Take rollouts, one line of JSON each."""


Following = Callable[[Dispatch, Progress], AbstractContextManager[object]]
"""Goes along with the rollouts of a run while they are made."""


async def roll_out(
    run: Run,
    plan: Plan,
    post: Post,
    summary: RunSummary,
    *,
    probe: Probe | None = None,
    servers: ServerWatch | None = None,
    pauses: RetryPauses,
    following: Following,
) -> None:
    """Send what the plan owes, store every attempt as it ends, and count it in `summary`."""
    mark_outdated(run.store.paths.aggregate_metrics)
    concurrency = prepare_connections(run.config, plan.owed_by_agent)
    settings = replace(DispatchSettings.of(run.config), pauses=pauses, concurrency=concurrency)
    dispatch = Dispatch(plan, post, settings, attempts_left=plan.attempts_left, probe=probe, servers=servers)
    progress = Progress(
        plan.total,
        finished_before=plan.done,
        given_up_before=plan.given_up,
        owed_by_agent=plan.owed_by_agent,
        in_flight=lambda: dispatch.in_flight,
    )
    async with dispatch as attempts:
        with (
            run.store as store,
            progress,
            following(dispatch, progress),
            stopping_on_signals(dispatch.request_stop),
        ):
            async for attempt in attempts:
                record = attempt.record()
                outcome = store.append(attempt.row, record)
                progress.add(attempt.row, record, outcome, is_final=attempt.is_final)
                summary.count_tokens(record)
                if outcome is Outcome.FAILURE:
                    summary.failures.add(attempt.row, record, is_final=attempt.is_final)
    summary.counts, summary.stopped = progress.counts, dispatch.stopped


async def conclude(run: Run, plan: Plan, ask: Ask, summary: RunSummary, tracker: Tracker | None) -> None:
    """Upload what was collected and have its metrics computed; an interrupted run is left as it is."""
    if summary.is_interrupted:
        return
    if tracker is not None and run.config.upload_rollouts:
        tracker.log_rollouts(lines_to_upload(run.store.paths))
    if run.config.disable_aggregation:
        summary.metrics_unwanted = True
        return
    try:
        metrics = await _unless_interrupted(ask_agents(_groups(run, plan, summary), ask))
    except AggregationError as error:
        summary.metrics_problem = str(error)
        return
    except OSError as error:
        summary.metrics_problem = f"the rollouts cannot be read: {error}"
        return
    if metrics is None:
        summary.stopped = Stop(StopKind.INTERRUPTED, "interrupted while the metrics were computed")
    elif metrics:
        if tracker is not None:
            tracker.log(values_for_tracking(metrics))
        _keep(metrics, summary)


def _keep(metrics: list[AgentMetrics], summary: RunSummary) -> None:
    summary.metrics = metrics
    try:
        write_metrics(metrics, summary.paths.aggregate_metrics)
    except OSError as error:
        summary.metrics_problem = f"they cannot be written: {error}"
    else:
        summary.metrics_path = summary.paths.aggregate_metrics


def lines_to_upload(paths: RolloutPaths) -> Iterable[bytes]:
    """Every result on disk: the finished rollouts, then the failed attempts."""
    for path in (paths.rollouts, paths.failures):
        for line in iter_lines(path):
            yield line.content


def _groups(run: Run, plan: Plan, summary: RunSummary) -> dict[str, AgentRecords]:
    """What is in the files, by agent."""
    paths = run.store.paths
    groups = {agent: AgentRecords(expected=expected) for agent, expected in plan.expected.items()}
    for agent, rollouts in stored_by_agent(paths, summary.finished).items():
        groups.setdefault(agent, AgentRecords()).records = rollouts
    failures = sound_records(paths.failures, paths.failures_corrupt, may_lack_key=True)
    add_failures(groups, (record.value for record in failures))
    return groups


async def _unless_interrupted(work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None when a signal ended it."""
    task = asyncio.ensure_future(work)

    def stop(*, at_once: bool) -> None:
        task.cancel()

    try:
        with stopping_on_signals(stop):
            await asyncio.wait([task])
    finally:
        task.cancel()
    return None if task.cancelled() else task.result()
