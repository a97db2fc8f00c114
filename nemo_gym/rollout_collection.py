"""PUBLIC: rollout collection, as a story.

`RolloutCollectionHelper.collect` is what the command runs: rows are read as they are needed and
results are not kept. `run_from_config` is the same for Python callers who want the results, and
`run_examples` is for trainers who bring their own rows. The steps live in `nemo_gym.rollouts`.
"""

import json
import logging
import sys
import time
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.exporters.wandb import WandbRun, active_run, wandb_run
from nemo_gym.global_config import maybe_get_global_config_dict
from nemo_gym.http.errors import HeadServerError
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.http.server_client import ServerClient, setup_server_client
from nemo_gym.http.session import is_global_aiohttp_client_request_debug_enabled
from nemo_gym.rollouts.aggregate import (
    AGGREGATE_PATH,
    Ask,
    ask_agents,
    group_by_agent,
    request_arguments,
    values_for_tracking,
    write_metrics,
)
from nemo_gym.rollouts.collected import Collected, RunLimits, limits_in_force
from nemo_gym.rollouts.config import (
    DEFAULT_MAX_ROLLOUT_ATTEMPTS,
    DEFAULT_MAX_SILENCE_S,
    E2ERolloutCollectionConfig,
    RolloutAggregationConfig,
    RolloutCollectionConfig,
    SharedRolloutCollectionConfig,
    max_attempts_from_environment,
)
from nemo_gym.rollouts.dispatch import Dispatch
from nemo_gym.rollouts.examples import run_examples
from nemo_gym.rollouts.failures import RetryPauses, request_debug_summary
from nemo_gym.rollouts.finished import count_given_up, is_settled, summary_if_settled, summary_of
from nemo_gym.rollouts.head import announce_head, facts_about, replicas_of, require_agents
from nemo_gym.rollouts.manifest import RunFacts
from nemo_gym.rollouts.masked import masked_command
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.progress import Progress
from nemo_gym.rollouts.record import (
    NG_FAILURE_CLASS_KEY,
    NG_NO_PERSIST_KEY,
    NG_TERMINAL_KEY,
    Result,
    Row,
    agent_name_of,
)
from nemo_gym.rollouts.resume import Cached, load_from_cache, read_attempts
from nemo_gym.rollouts.rows import materialized, preprocess
from nemo_gym.rollouts.run import Run, check_input, open_run, resumes
from nemo_gym.rollouts.server_watch import ServerWatch
from nemo_gym.rollouts.stall import health_probe
from nemo_gym.rollouts.streaming import conclude, lines_to_upload, roll_out
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

_DEBUG_MARKER = "[rollout_collection] /run failed"
_LATER = {
    "RolloutAggregationHelper": "nemo_gym.rollouts.aggregation:RolloutAggregationHelper",
    "_expand_input_glob": "nemo_gym.rollouts.shards:_expand_input_glob",
    "aggregate_rollouts": "nemo_gym.cli.commands.aggregate_rollouts:main",
    "collect_rollouts": "nemo_gym.cli.commands.collect_rollouts:main",
}
"""Names of this module that live above it, or need more than a trainer does: imported when they are asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LATER[name].partition(":")
    return getattr(import_module(module), attribute)


def _failures_path_for(path: str | Path) -> Path:
    """The failures sidecar of a rollouts file."""
    return RolloutPaths(Path(path)).failures


class RolloutCollectionHelper(BaseModel):
    """Collects rollouts; its methods may be overridden one by one."""

    retry_pauses: ClassVar[RetryPauses] = RetryPauses()
    """How long a failed call waits before it is tried again."""

    async def collect(self, config: RolloutCollectionConfig, command: Sequence[str] = ()) -> RunSummary:
        """Collect every rollout that `config` asks for into its files, without keeping any in memory.

        `command` is the command line, for the manifest. A run in which there is nothing to do needs no servers.
        """
        started_s = time.monotonic()
        inputs = check_input(config)
        try:
            client = self._checked_client(() if inputs is None else inputs.scan.rows_of_agent)
        except HeadServerError:
            settled = summary_if_settled(config)
            if settled is None:
                raise
            return settled
        with open_run(config, facts_about(client, command), inputs) as run:
            summary = await self._collect_into(run, client)
        summary.wall_time_s = time.monotonic() - started_s
        return summary

    async def _collect_into(self, run: Run, client: ServerClient) -> RunSummary:
        plan = run.plan()
        summary = summary_of(plan, run.config.paths)
        with run.store:  # both files exist after any run
            pass
        if is_settled(summary, run.config):
            return summary
        require_agents(client, [agent for agent, owed in plan.owed_by_agent.items() if owed])
        servers = ServerWatch(client, run.config.max_silence_s)
        with _tracker() as tracker:
            if plan.owed:
                post, probe = partial(self._post, client), health_probe(client)
                await roll_out(
                    run,
                    plan,
                    post,
                    summary,
                    probe=probe,
                    servers=servers,
                    pauses=self.retry_pauses,
                    following=self._following,
                )
            await conclude(run, plan, _asking(client, servers), summary, tracker)
        summary.given_up = count_given_up(summary, run.config.attempt_cap)
        return summary

    async def run_from_config(self, config: RolloutCollectionConfig) -> list[Result]:
        """Collect every rollout that `config` asks for; all results, also failed ones, in task order.

        Holds rows and results in memory and goes through the overridable methods; `collect` does neither.
        """
        fresh = None if resumes(config) else self._preprocess_rows_from_config(config)
        limits = RunLimits(config.concurrency, config.rollout_timeout_s)
        facts = RunFacts()
        if type(self).run_examples is _OWN_RUN_EXAMPLES:  # whoever replaced it may need no servers
            limits.client = self.setup_server_client()
            facts = _checked_facts(limits.client, fresh or ())
        rows = None if fresh is None else materialized(fresh)
        with open_run(config, facts, rows) as run, limits.in_force(), _tracker() as tracker:
            cached = self._load_from_cache(config) if fresh is None else Cached(fresh, [], [], [])
            run.finished_before = len(cached.done_results)
            failed_before = read_attempts(config.paths) if fresh is None else {}
            collected = Collected(cached, run.store, config, limits, failed_before, self.retry_pauses)
            with run.store:
                await collected.send_all(lambda rows, semaphore: self.run_examples(rows, semaphore=semaphore))
            if tracker is not None and config.upload_rollouts:
                tracker.log_rollouts(lines_to_upload(config.paths))
            finished_rows, results = collected.persisted()
            path = None
            if not config.disable_aggregation:
                path = await self._call_aggregate_metrics(results, finished_rows, config.paths.rollouts)
        logger.info("%d rollouts are in %s; metrics: %s", len(results), config.paths.rollouts, path)
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
        client = self.setup_server_client(head_server_config) if head_server_config else self._client_at_hand()
        total = len(examples) if isinstance(examples, Sequence) else None
        return run_examples(examples, partial(self._post, client), semaphore, Progress(total))

    def setup_server_client(self, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """A client for the servers of the run whose head server is given, else of the configured one."""
        client = setup_server_client(head_server_config)
        for name, addresses in replicas_of(client).items():
            client.set_replicas(name, addresses)
        return client

    def _following(self, dispatch: Dispatch, progress: Progress) -> AbstractContextManager[object]:
        """Entered while `collect` makes rollouts: for whoever wants to watch them, or change their caps."""
        return nullcontext()

    async def _post(self, client: ServerClient, row: Row) -> Any:
        limits = limits_in_force()
        async with nullcontext() if limits is None else limits.around(row):
            response = await client.post(server_name=row["agent_ref"]["name"], url_path="/run", json=row)
            try:
                await raise_for_status(response)
            except Exception as error:
                if is_global_aiohttp_client_request_debug_enabled():
                    _write_debug_marker(row, error)
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
        client = self._client_at_hand()
        metrics = await ask_agents(group_by_agent(named), _asking(client, ServerWatch(client, DEFAULT_MAX_SILENCE_S)))
        if not metrics:
            return None
        path = RolloutPaths(Path(output_fpath)).aggregate_metrics
        write_metrics(metrics, path)
        tracker = active_run()
        if tracker is not None:
            tracker.log(values_for_tracking(metrics))
        return path

    def _client_at_hand(self) -> ServerClient:
        """The client of the run under way, else a new one: a run reads its config once."""
        limits = limits_in_force()
        known = None if limits is None else limits.client
        return self.setup_server_client() if known is None else known

    def _checked_client(self, agents: Iterable[str]) -> ServerClient:
        """A client for a run that is there and has these agents."""
        client = self.setup_server_client()
        announce_head(client)
        require_agents(client, agents)
        return client


_OWN_RUN_EXAMPLES = RolloutCollectionHelper.run_examples


def _asking(client: ServerClient, servers: ServerWatch) -> Ask:
    async def ask(agent: str, records: Collection[Result]) -> object:
        response = await client.post(server_name=agent, url_path=AGGREGATE_PATH, **request_arguments(records))
        await raise_for_status(response)
        return await get_response_json(response)

    return lambda agent, records: servers.guard(agent, ask(agent, records))


def _write_debug_marker(row: Row, error: Exception) -> None:
    summary = json.dumps(request_debug_summary(row), sort_keys=True)
    sys.stdout.write(f"{_DEBUG_MARKER} status={getattr(error, 'status', None)} row={summary}\n")
    sys.stdout.flush()


def _checked_facts(client: ServerClient, rows: Iterable[Row]) -> RunFacts:
    """What the servers are, if the client says so; those of tests may not."""
    if not isinstance(getattr(client, "global_config_dict", None), DictConfig):
        return RunFacts()
    require_agents(client, {agent_name_of(row) or "" for row in rows})
    return facts_about(client)


def _tracker() -> AbstractContextManager[WandbRun | None]:
    """What this process's config says about tracking."""
    config = maybe_get_global_config_dict()
    return wandb_run(OmegaConf.create({}) if config is None else config, masked_command(sys.argv))
