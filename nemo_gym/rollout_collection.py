"""PUBLIC: rollout collection, as a story.

`RolloutCollectionHelper.collect` is what the command runs: rows are read as they are needed and
results are not kept. `run_from_config` is the same for Python callers who want the results, and
`run_examples` is for trainers who bring their own rows. The steps live in `nemo_gym.rollouts`.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf
from pydantic import BaseModel, PrivateAttr

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.exporters.wandb import wandb_run
from nemo_gym.global_config import maybe_get_global_config_dict
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.http.server_client import ServerClient, setup_server_client
from nemo_gym.http.session import close_global_aiohttp_client, is_global_aiohttp_client_request_debug_enabled
from nemo_gym.jsonl import iter_lines
from nemo_gym.rollouts.aggregate import (
    AGGREGATE_PATH,
    AgentMetrics,
    AgentRecords,
    add_failures,
    ask_agents,
    group_by_agent,
    values_for_tracking,
    write_metrics,
)
from nemo_gym.rollouts.collected import Collected, semaphore_for
from nemo_gym.rollouts.config import (
    DEFAULT_MAX_ROLLOUT_ATTEMPTS,
    E2ERolloutCollectionConfig,
    RolloutAggregationConfig,
    RolloutCollectionConfig,
    SharedRolloutCollectionConfig,
    max_attempts_from_environment,
)
from nemo_gym.rollouts.dispatch import Dispatch, DispatchSettings
from nemo_gym.rollouts.examples import run_examples
from nemo_gym.rollouts.failures import request_debug_summary
from nemo_gym.rollouts.head import announce_head, replicas_of, require_agents
from nemo_gym.rollouts.limits import prepare_connections
from nemo_gym.rollouts.manifest import RunFacts
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.progress import Progress
from nemo_gym.rollouts.record import (
    NG_FAILURE_CLASS_KEY,
    NG_NO_PERSIST_KEY,
    NG_TERMINAL_KEY,
    Outcome,
    Result,
    Row,
    agent_name_of,
)
from nemo_gym.rollouts.repair import sound_records
from nemo_gym.rollouts.resume import Cached, Plan, load_from_cache
from nemo_gym.rollouts.rows import materialized, preprocess
from nemo_gym.rollouts.run import Run, check_input, open_run, resumes
from nemo_gym.rollouts.signals import stopping_on_signals
from nemo_gym.rollouts.stall import health_probe
from nemo_gym.rollouts.stop_rules import StopKind
from nemo_gym.rollouts.summary import RunSummary

__all__ = [
    "NG_FAILURE_CLASS_KEY",
    "NG_NO_PERSIST_KEY",
    "NG_TERMINAL_KEY",
    "E2ERolloutCollectionConfig",
    "RolloutAggregationConfig",
    "RolloutCollectionConfig",
    "RolloutCollectionHelper",
    "RunSummary",
    "SharedRolloutCollectionConfig",
]

logger = logging.getLogger(__name__)

_DEFAULT_MAX_ROLLOUT_ATTEMPTS = DEFAULT_MAX_ROLLOUT_ATTEMPTS
_get_max_rollout_attempts = max_attempts_from_environment
_rollout_request_debug_summary = request_debug_summary


def _failures_path_for(path: str | Path) -> Path:
    """The failures sidecar of a rollouts file."""
    return RolloutPaths(Path(path)).failures


class RolloutCollectionHelper(BaseModel):
    """Collects rollouts; its methods may be overridden one by one."""

    _agent_guards: dict[str, asyncio.Semaphore] = PrivateAttr(default_factory=dict)

    async def collect(self, config: RolloutCollectionConfig, facts: RunFacts | None = None) -> RunSummary:
        """Collect every rollout that `config` asks for into its files, without keeping any in memory."""
        inputs = check_input(config)
        client = self._checked_client(() if inputs is None else inputs.scan.rows_of_agent)
        started_s = time.monotonic()
        with open_run(config, _with_config(facts, client), inputs) as run, wandb_run(_tracking_config()) as tracker:
            plan = run.plan()
            summary = RunSummary(
                config.paths, expected=plan.total, finished_before=plan.done, given_up_before=plan.given_up
            )
            if plan.owed:
                prepare_connections(config, plan.owed_by_agent)
                await self._roll_out(run, plan, client, summary)
            interrupted = summary.stopped is not None and summary.stopped.kind is StopKind.INTERRUPTED
            if tracker is not None and config.upload_rollouts:
                tracker.log_rollouts(line.content for line in iter_lines(config.paths.rollouts))
            if not (config.disable_aggregation or interrupted):
                summary.metrics = await self._aggregate(run, plan, client)
                summary.metrics_path = _write(summary.metrics, config.paths)
                if tracker is not None:
                    tracker.log(values_for_tracking(summary.metrics))
            summary.wall_time_s = time.monotonic() - started_s
        await close_global_aiohttp_client()
        return summary

    async def _roll_out(self, run: Run, plan: Plan, client: ServerClient, summary: RunSummary) -> None:
        """Send what the plan owes and store every attempt as it ends."""
        dispatch = Dispatch(
            plan,
            lambda row: self._post(client, row),
            DispatchSettings.of(run.config),
            attempts_left=plan.attempts_left,
            probe=health_probe(client),
        )
        progress = Progress(
            plan.total,
            finished_before=plan.done,
            given_up_before=plan.given_up,
            owed_by_agent=plan.owed_by_agent,
            in_flight=lambda: dispatch.in_flight,
        )
        async with dispatch as attempts:
            with run.store as store, progress, stopping_on_signals(dispatch.request_stop):
                async for attempt in attempts:
                    record = attempt.record()
                    outcome = store.append(attempt.row, record)
                    progress.add(attempt.row, record, outcome, is_final=attempt.is_final)
                    summary.count_tokens(record)
                    if outcome is Outcome.FAILURE:
                        summary.failures.add(attempt.row, record, is_final=attempt.is_final)
        summary.counts, summary.stopped = progress.counts, dispatch.stopped

    async def _aggregate(self, run: Run, plan: Plan, client: ServerClient) -> list[AgentMetrics]:
        """Ask every agent for the metrics of what is in the rollouts file."""
        paths = run.store.paths
        rollouts = (record.value for record in sound_records(paths.rollouts, paths.rollouts_corrupt))
        groups = group_by_agent(rollouts)
        for agent, expected in plan.expected.items():
            groups.setdefault(agent, AgentRecords()).expected = expected
        failures = sound_records(paths.failures, paths.failures_corrupt, may_lack_key=True)
        add_failures(groups, (record.value for record in failures))
        return await ask_agents(groups, _asking(client))

    async def run_from_config(self, config: RolloutCollectionConfig) -> list[Result]:
        """Collect every rollout that `config` asks for; all results, also failed ones, in task order.

        Holds rows and results in memory and goes through the overridable methods; `collect` does neither.
        """
        fresh = None if resumes(config) else self._preprocess_rows_from_config(config)
        with open_run(config, rows=None if fresh is None else materialized(fresh)) as run:
            cached = self._load_from_cache(config) if fresh is None else Cached(fresh, [], [], [])
            run.finished_before = len(cached.done_results)
            collected = Collected(cached, run.store, config.attempt_cap)
            semaphore, self._agent_guards = semaphore_for(config.concurrency)
            with run.store:
                while collected.pending:
                    for awaitable in self.run_examples(collected.next_round(), semaphore=semaphore):
                        await collected.take(awaitable)
                    await collected.pause()
            with wandb_run(_tracking_config()) as tracker:
                if tracker is not None and config.upload_rollouts:
                    tracker.log_rollouts(line.content for line in iter_lines(config.paths.rollouts))
            rows, results = collected.persisted()
            if not config.disable_aggregation:
                await self._call_aggregate_metrics(results, rows, config.paths.rollouts)
            return collected.in_task_order()

    def run_examples(
        self,
        examples: Iterable[Row],
        head_server_config: BaseServerConfig | None = None,
        semaphore: AbstractAsyncContextManager[Any] | None = None,
    ) -> Iterator[Awaitable[tuple[Row, Result]]]:
        """Send rows to their agents; a plain iterator of awaitables, each `(row, result)`, as they finish.

        A failed request raises from its awaitable; the exception's `row` is the row.
        """
        client = self.setup_server_client(head_server_config)
        total = len(examples) if isinstance(examples, Sequence) else None
        return run_examples(examples, lambda row: self._post(client, row), semaphore, Progress(total))

    def setup_server_client(self, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """A client for the servers of the run whose head server is given, else of the configured one."""
        client = setup_server_client(head_server_config)
        for name, addresses in replicas_of(client).items():
            client.set_replicas(name, addresses)
        return client

    async def _post(self, client: ServerClient, row: Row) -> Any:
        name = row["agent_ref"]["name"]
        async with _guarded_by(self._agent_guards.get(name)):
            response = await client.post(server_name=name, url_path="/run", json=row)
            try:
                await raise_for_status(response)
            except Exception as error:
                if is_global_aiohttp_client_request_debug_enabled():
                    status = getattr(error, "status", None)
                    summary = orjson.dumps(request_debug_summary(row), option=orjson.OPT_SORT_KEYS).decode()
                    summary = summary.replace('":', '": ').replace(',"', ', "')
                    sys.stdout.write(f"[rollout_collection] /run failed status={status} row={summary}\n")
                raise
            return await get_response_json(response)

    def _preprocess_rows_from_config(self, config: RolloutCollectionConfig) -> list[Row]:
        return preprocess(config)

    def _load_from_cache(self, config: RolloutCollectionConfig) -> Cached:
        return load_from_cache(config.paths, config.attempt_cap, retry_exhausted=config.retry_exhausted)

    async def _call_aggregate_metrics(
        self, results: list[Result], rows: list[Row], output_fpath: str | Path
    ) -> Path | None:
        """Ask the agents named by `rows` for metrics over `results` and write them beside `output_fpath`."""
        if not results:
            return None
        named = [{**result, "agent_ref": row.get("agent_ref")} for row, result in zip(rows, results, strict=True)]
        groups = group_by_agent(record for record in named if agent_name_of(record) is not None)
        metrics = await ask_agents(groups, _asking(self.setup_server_client()))
        return _write(metrics, RolloutPaths(Path(output_fpath)))

    def _checked_client(self, agents: Iterable[str]) -> ServerClient:
        """A client for a run that is there and has these agents."""
        client = self.setup_server_client()
        announce_head(client)
        require_agents(client, agents)
        return client


def _asking(client: ServerClient) -> Any:
    async def ask(agent: str, records: list[Result]) -> Mapping[str, Any]:
        response = await client.post(server_name=agent, url_path=AGGREGATE_PATH, json={"verify_responses": records})
        await raise_for_status(response)
        answer: Mapping[str, Any] = await get_response_json(response)
        return answer

    return ask


def _write(metrics: list[AgentMetrics], paths: RolloutPaths) -> Path | None:
    if not metrics:
        return None
    write_metrics(metrics, paths.aggregate_metrics)
    return paths.aggregate_metrics


def _with_config(facts: RunFacts | None, client: ServerClient) -> RunFacts:
    config: Any = OmegaConf.to_container(client.global_config_dict, resolve=False)
    command = facts.command if facts is not None else ()
    model = client.global_config_dict.get("policy_model_name")
    return RunFacts(command=command, config=config, models=[model] if isinstance(model, str) and model else [])


def _tracking_config() -> Any:
    known = maybe_get_global_config_dict()
    return known if known is not None else OmegaConf.create({})


@asynccontextmanager
async def _guarded_by(guard: asyncio.Semaphore | None) -> AsyncIterator[None]:
    if guard is None:
        yield
    else:
        async with guard:
            yield
