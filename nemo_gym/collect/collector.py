"""The two long steps of a run: make the rollouts, then ask for their metrics.

Both end in good order on Ctrl-C and SIGTERM. Results are kept in memory only for those who ask for it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_gym.collect.adaptive import AdaptiveConcurrency
from nemo_gym.collect.admission import prepare_connections
from nemo_gym.collect.budget import Budget
from nemo_gym.collect.control import RunControl
from nemo_gym.collect.dispatch import Dispatch, DispatchSettings, Post
from nemo_gym.collect.failures import Attempt, RetryPauses
from nemo_gym.collect.line import SCORING
from nemo_gym.collect.metrics import (
    AgentMetrics,
    AgentRecords,
    AggregationError,
    Ask,
    add_costs,
    add_failures,
    ask_agents,
    mark_outdated,
    values_for_tracking,
    write_metrics,
)
from nemo_gym.collect.policies import FinishAt, Policy, RowOrder, StopRepeats
from nemo_gym.collect.progress import Progress
from nemo_gym.collect.run_servers import announce_servers
from nemo_gym.collect.server_health import retried_text
from nemo_gym.collect.server_watch import ServerWatch
from nemo_gym.collect.stopping import Probe, Stop, StopKind
from nemo_gym.collect.summary import RunSummary, why_no_metrics
from nemo_gym.http.client import ServerClient
from nemo_gym.http.request import json_bytes
from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.keys import OBSERVABILITY_ENABLED_KEY_NAME, TOKEN_ID_CAPTURE_BLOCK
from nemo_gym.observability.store import CAPTURES_NOTHING, TOLD_BY_AGENTS, Observing, without_history
from nemo_gym.paths import resolve_for_reading
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import stored_by_agent
from nemo_gym.runs.options import RolloutCollectionConfig, repeats_of
from nemo_gym.runs.read import keys_in, records
from nemo_gym.runs.record import Outcome, Result, RolloutKey, Row, key_or_none, task_order
from nemo_gym.runs.repeats import durations_in, earlier_durations, keys_of
from nemo_gym.runs.resume import Cached, Plan
from nemo_gym.runs.run import Run
from nemo_gym.runs.spending import Meter
from nemo_gym.runs.store import FileChangedError
from nemo_gym.runtime import stopping_on_signals
from nemo_gym.trackers.base import Tracker

if TYPE_CHECKING:
    from nemo_gym.runs.token_ids import TokenDelivery

logger = logging.getLogger(__name__)

_INTERRUPTED = Stop(StopKind.INTERRUPTED, "interrupted while the metrics were computed")
_SERVERS_LEFT = (StopKind.INTERRUPTED, StopKind.SERVER_DOWN)
"""Reasons to end after which no server is asked anything."""
T = TypeVar("T")
Following = Callable[[Dispatch, Progress], AbstractContextManager[object]]
"""Goes along with the rollouts of a run while they are made."""
Keep = Callable[[Attempt, Result, Outcome], object]
"""Takes every attempt as it ends, with what was stored of it and where."""


class KeptResults:
    """Every result of a run, for whoever wants them in memory."""

    def __init__(self, cached: Cached) -> None:
        """Begin with what an earlier run has finished."""
        self._finished = list(zip(cached.done_rows, cached.done_results, strict=True))
        self._others: dict[object, Result] = {}
        self._to_retry: dict[RolloutKey, Result] = {}

    def add(self, attempt: Attempt, record: Result, outcome: Outcome) -> None:
        """Take one attempt; of a rollout that is tried again, the last one counts."""
        key = key_or_none(attempt.row)
        if not attempt.is_final:
            if key is not None:
                self._to_retry[key] = record
            return
        if key is not None:
            self._to_retry.pop(key, None)
        name = object() if key is None else key
        if outcome is Outcome.SUCCESS:
            self._others.pop(name, None)  # a person had it tried again after it was given up
            self._finished.append((attempt.row, record))
        else:
            self._others[name] = record

    def persisted(self) -> tuple[list[Row], list[Result]]:
        """Rows and results that are in the rollouts file, in task order."""
        ordered = sorted(self._finished, key=lambda pair: task_order(pair[0]))
        return [row for row, _ in ordered], [result for _, result in ordered]

    def in_task_order(self) -> list[Result]:
        """Every result, also failed and discarded ones."""
        finished = (result for _, result in self._finished)
        return sorted([*finished, *self._others.values(), *self._to_retry.values()], key=task_order)


def announce_plan(config: RolloutCollectionConfig, plan: Plan, client: ServerClient | None = None) -> None:
    """Say how many rollouts there will be, of how many rows, who makes them if that is known, and where they go."""
    repeats, total = config.num_repeats, plan.total
    tasks = sum(expected.tasks for expected in plan.expected.values())
    if repeats == 1:
        made_of = f"{total}, one per row"
    elif isinstance(repeats, int) and total % repeats == 0 and config.only in (None, "unsolved"):
        made_of = f"{total // repeats} rows \N{MULTIPLICATION SIGN} {repeats} = {total}"
    else:
        made_of = f"{total} of {tasks} tasks"
    before = f", {plan.done} of them finished before" if plan.done else ""
    logger.info("Rollouts: %s%s", made_of, before)
    if client is not None:
        announce_servers(client, plan.owed_by_agent)
    logger.info("Output: %s", config.paths.rollouts)


def settings_for(config: RolloutCollectionConfig, plan: Plan, pauses: RetryPauses) -> DispatchSettings:
    """How the rows that a plan owes are sent; says so, and has connections ready."""
    concurrency = prepare_connections(config, plan.owed_by_agent)
    return replace(
        DispatchSettings.of(config), pauses=pauses, concurrency=concurrency, has_succeeded_before=plan.done > 0
    )


def policies_for(run: Run, plan: Plan, summary: RunSummary) -> list[Policy]:
    """What goes along with the rollouts that a plan owes, as the options of the run say."""
    config = run.config
    policies: list[Policy] = [RunControl(run, plan, summary)]
    if config.budgets:
        before = [meter for meter in (summary.before, summary.meter) if meter is not None]
        meter = Meter(summary.meter.prices, names_unpriced=False)
        policies.append(Budget(config.budgets, meter, before, plan.owed))
    if config.adaptive:
        policies.append(AdaptiveConcurrency(config.adaptive, plan.owed_by_agent, run.manifest))
    if config.finish_at is not None:
        done = plan.done + plan.given_up + plan.left_out
        policies.append(FinishAt(config.finish_at, config.grace_s, plan.total, done))
    if plan.rule is not None:
        policies.append(StopRepeats(plan.rule, plan.not_needed, run.manifest))
    order = order_for(config, plan)
    return policies if order is None else [*policies, order]


def order_for(config: RolloutCollectionConfig, plan: Plan) -> RowOrder | None:
    """In which order the rows of a plan start, if it is not theirs."""
    longest_first = config.order == "longest_first"
    if not longest_first and plan.rule is None:
        return None
    durations: dict[Hashable, float] = {}
    if config.durations_from is not None:
        durations = earlier_durations(resolve_for_reading(config.durations_from))
    elif longest_first and plan.done:
        durations = durations_in(config.paths.rollouts)
    return RowOrder(plan, longest_first=longest_first, in_waves=plan.rule is not None, durations=durations)


def _retried(summary: RunSummary, dispatch: Dispatch) -> str:
    return retried_text(summary.retries, dispatch.awaiting_retry_by_class)


async def roll_out(
    run: Run,
    plan: Plan,
    post: Post,
    summary: RunSummary,
    settings: DispatchSettings,
    *,
    probe: Probe | None = None,
    servers: ServerWatch | None = None,
    following: Following,
    keep: Keep | None = None,
    policies: Sequence[Policy] = (),
    config: Mapping[Any, Any] | None = None,
) -> None:
    """Send what the plan owes, store every attempt as it ends, and count it in `summary`.

    `config` is that of the servers, which says what they keep of rollouts for their records.
    """
    post, observing, tokens = _observed(post, config, summary, is_kept=keep is not None)
    if run.is_resumed:
        mark_outdated(run.store.paths.aggregate_metrics)
    rows = next((each for each in policies if isinstance(each, RowOrder)), plan)
    dispatch = Dispatch(
        rows, post, settings, attempts_left=plan.attempts_left, probe=probe, servers=servers, policies=policies
    )
    progress = _progress_of(plan, dispatch, servers, summary)
    if servers is not None:
        summary.retries = servers.retries
        await servers.count_retries(plan.owed_by_agent)
    async with tokens or nullcontext(), dispatch as attempts:
        with (
            run.store as store,
            progress,
            following(dispatch, progress),
            stopping_on_signals(dispatch.request_stop) as summary.signals,
        ):
            async for attempt in attempts:
                record = attempt.record()
                if observing is not None and (
                    observing is not CAPTURES_NOTHING or not TOLD_BY_AGENTS.isdisjoint(record)
                ):
                    observing.fold(attempt.row, record)
                if tokens is not None:
                    await tokens.put_onto(attempt.row, record)
                outcome = store.append(attempt.row, record)
                if tokens is not None and (why := await tokens.appended(attempt.row, store)) is not None:
                    dispatch.stop(Stop(StopKind.TOO_MANY_MASKED, why))
                progress.add(attempt.row, record, outcome, is_final=attempt.is_final)
                summary.count_usage(attempt.row, record, outcome)
                if outcome is Outcome.FAILURE:
                    summary.failures.add(attempt.row, record, is_final=attempt.is_final)
                if keep is not None:
                    keep(attempt, record, outcome)
    summary.counts.update(progress.counts)
    summary.stopped, summary.not_needed = dispatch.stopped, progress.not_needed()
    if servers is not None and (dispatch.stopped is None or dispatch.stopped.kind not in _SERVERS_LEFT):
        await servers.count_retries(plan.owed_by_agent)


def _observed(
    post: Post, config: Mapping[Any, Any] | None, summary: RunSummary, *, is_kept: bool
) -> "tuple[Post, Observing | None, TokenDelivery | None]":
    """What adds to records as the config of the servers says, and how rows are sent then."""
    if config is None:
        return _read_whole(post) if is_kept else post, None, None
    captures = bool(config.get(OBSERVABILITY_ENABLED_KEY_NAME))
    observing, tokens = Observing.of(config) if captures else CAPTURES_NOTHING, _token_delivery(config, summary)
    if is_kept or tokens is not None:  # else nobody looks into long lists
        post = _read_whole(post)
    if captures:
        from nemo_gym.collect.captured_usage import counting_captured  # runs that observe nothing need none of it

        post = counting_captured(observing.begin(post), config)
    return post if tokens is None else tokens.begin(post), observing, tokens


def _read_whole(post: Post) -> Post:
    async def posted(row: Row) -> Any:
        return await post(row)

    return posted


def _token_delivery(config: Mapping[Any, Any], summary: RunSummary) -> "TokenDelivery | None":
    """What gives records their token ids; None unless the servers keep them."""
    block = config.get(TOKEN_ID_CAPTURE_BLOCK)
    if not isinstance(block, Mapping) or not block.get("enabled"):
        return None
    from nemo_gym.runs.token_ids import TokenDelivery  # other runs need none of it

    tokens = TokenDelivery.of(config, summary.masked)
    summary.masked = None if tokens is None else tokens.masked
    return tokens


def _progress_of(plan: Plan, dispatch: Dispatch, servers: ServerWatch | None, summary: RunSummary) -> Progress:
    """What shows how the rollouts of a plan are doing, to people and to the policies of their run."""

    def notice() -> str:
        watched = servers.notice() if servers else ""
        steering = (policy.notice() for policy in dispatch.policies)
        return ", ".join(filter(None, (watched, _retried(summary, dispatch), *steering)))

    progress = Progress(
        plan.total,
        finished_before=plan.done,
        given_up_before=plan.given_up,
        owed_by_agent=plan.owed_by_agent,
        in_flight=lambda: dispatch.in_flight,
        notice=notice,
        meter=summary.meter,
    )
    if dispatch.settings.path != DispatchSettings.path:  # stored responses are only scored
        progress.title = SCORING
    not_needed = plan.left_out
    progress.not_needed = lambda: not_needed + dispatch.left_out
    for policy in dispatch.policies:
        policy.follow(progress)
    return progress


async def conclude(run: Run, plan: Plan, ask: Ask, summary: RunSummary, tracker: Tracker | None) -> None:
    """Upload what was collected and have its metrics computed; an interrupted run is left as it is."""
    if summary.is_interrupted:
        return
    if tracker is not None and run.config.upload_rollouts:
        tracker.log_rollouts(lines_to_upload(run.store.paths))
    summary.metrics_unwanted = why_no_metrics(run.config)
    if summary.metrics_unwanted is not None:
        return
    try:
        groups = _groups(run.config, plan, summary)
        metrics = await unless_interrupted(ask_agents(groups, ask), summary)
    except AggregationError as error:
        summary.metrics_problem = str(error)
        return
    except FileChangedError:
        raise
    except OSError as error:
        summary.metrics_problem = f"the rollouts cannot be read: {error}"
        return
    if metrics:
        add_costs(metrics, groups, summary.meter.prices)
        if tracker is not None:
            tracker.log(values_for_tracking(metrics))
        _keep(metrics, summary)


async def renew_metrics(
    config: RolloutCollectionConfig, plan: Plan, ask: Ask, summary: RunSummary, *, repair: bool = True
) -> None:
    """Have the metrics of a complete run computed again, as its agents compute them now.

    What cannot be asked leaves those on disk as they are; so do metrics that have not changed. `repair` takes
    damaged lines out of the failures, as a run does that goes on.
    """
    if config.disable_aggregation or not summary.metrics:
        return
    try:
        groups = _groups(config, plan, summary, repair=repair)
        metrics = await unless_interrupted(ask_agents(groups, ask), summary)
    except (AggregationError, OSError) as error:
        logger.warning("the metrics on disk are shown as they are, since they cannot be computed again: %s", error)
        return
    if metrics is not None:
        add_costs(metrics, groups, summary.meter.prices)
    if metrics is not None and [each.as_entry() for each in metrics] != [each.as_entry() for each in summary.metrics]:
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
            is_observed = b'"ng_trajectory"' in line.content or b'"ng_model_call_capture"' in line.content
            yield json_bytes(without_history(parse(line.content))) if is_observed else line.content


def _groups(
    config: RolloutCollectionConfig, plan: Plan, summary: RunSummary, *, repair: bool = True
) -> dict[str, AgentRecords]:
    """What is in the files, by agent."""
    paths = config.paths
    groups = {
        agent: AgentRecords(
            expected=expected,
            repeats=repeats_of(config.num_repeats, agent),
            stops_when=config.stop_repeats_when,
            not_needed=keys_of(plan.not_needed, agent),
        )
        for agent, expected in plan.expected.items()
    }
    for agent, rollouts in stored_by_agent(paths, summary.finished).items():
        group = groups.setdefault(agent, AgentRecords())
        group.records, group.percentiles = rollouts, rollouts.percentiles
    failures = records(paths.failures, "repair" if repair else "leave", may_lack_key=True)
    asked = keys_in(paths.materialized_inputs) if plan.has_strangers else None
    add_failures(groups, (failure for key, _, failure in failures if asked is None or key is None or key in asked))
    return groups


async def unless_interrupted(work: Coroutine[Any, Any, T], summary: RunSummary) -> T | None:
    """What `work` returns; None when a signal ended it, as `summary` says then."""
    task = asyncio.ensure_future(work)

    def stop(*, at_once: bool) -> None:
        task.cancel()

    try:
        with stopping_on_signals(stop) as summary.signals:
            await asyncio.wait([task])
    finally:
        task.cancel()
    if task.cancelled():
        summary.stopped = _INTERRUPTED
        return None
    return task.result()
