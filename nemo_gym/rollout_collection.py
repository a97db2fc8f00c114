"""PUBLIC: rollout collection, as a story.

`RolloutCollectionHelper.collect` is what the command runs: rows are read as they are needed and results are not
kept. `run_from_config` is the same story for Python callers, with the results kept, and `run_examples` is for
trainers who bring their own rows. The steps live in `nemo_gym.collect`, the files in `nemo_gym.runs`.
"""

import json
import logging
import sys
import time
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from aiohttp import ClientResponse
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, PrivateAttr

from nemo_gym.collect.adaptive import AdaptiveConcurrency
from nemo_gym.collect.admission import refuse_unfit_rows, shapes_of, warn_of_lower_caps
from nemo_gym.collect.collector import (
    Keep,
    KeptResults,
    announce_plan,
    conclude,
    lines_to_upload,
    policies_for,
    renew_metrics,
    roll_out,
    settings_for,
    unless_interrupted,
)
from nemo_gym.collect.dispatch import Dispatch, DispatchSettings, Post
from nemo_gym.collect.environments import scoring_first
from nemo_gym.collect.examples import OverriddenExamples, RunSlots, run_examples
from nemo_gym.collect.failures import RetryPauses, request_debug_summary
from nemo_gym.collect.metrics import (
    AGGREGATE_PATH,
    AggregationError,
    ask_agents,
    group_by_agent,
    large_answer,
    request_arguments,
    values_for_tracking,
    write_metrics,
)
from nemo_gym.collect.planning import RunPlan, in_parts, plan_of
from nemo_gym.collect.progress import Progress
from nemo_gym.collect.run_servers import (
    RunPost,
    agent_to_ask,
    announce_head,
    facts_about,
    follow_replicas,
    require_agents,
)
from nemo_gym.collect.server_watch import ServerWatch
from nemo_gym.collect.stopping import health_probe
from nemo_gym.collect.summary import RunSummary, count_given_up, find_settled, is_settled, summary_of
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import maybe_get_global_config_dict
from nemo_gym.http.client import ServerClient, setup_server_client
from nemo_gym.http.errors import HeadServerError
from nemo_gym.http.request import get_response_json, parse_json, raise_for_status, whole_body
from nemo_gym.http.session import is_global_aiohttp_client_request_debug_enabled
from nemo_gym.keys import OBSERVED_KEYS
from nemo_gym.keys import TRAJECTORY_KEY as NG_TRAJECTORY_KEY
from nemo_gym.process_inputs import command_line
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import RunFacts, masked_command
from nemo_gym.runs.options import (
    DEFAULT_MAX_REFUSED_S,
    DEFAULT_MAX_ROLLOUT_ATTEMPTS,
    DEFAULT_MAX_SILENCE_S,
    Concurrency,
    E2ERolloutCollectionConfig,
    RolloutAggregationConfig,
    RolloutCollectionConfig,
    SharedRolloutCollectionConfig,
    max_attempts_from_environment,
)
from nemo_gym.runs.record import NG_FAILURE_CLASS_KEY, NG_NO_PERSIST_KEY, NG_TERMINAL_KEY, Result, Row, agent_name_of
from nemo_gym.runs.resume import Cached, Plan, load_from_cache
from nemo_gym.runs.rows import InputRows, materialized, preprocess
from nemo_gym.runs.run import Run, check_input, open_run, resumes
from nemo_gym.runs.sockets import run_id
from nemo_gym.runtime import pass_on
from nemo_gym.trackers.base import Tracker, active_tracker, tracking

__all__ = [
    "NG_FAILURE_CLASS_KEY",
    "NG_NO_PERSIST_KEY",
    "NG_TERMINAL_KEY",
    "NG_TRAJECTORY_KEY",
    "E2ERolloutCollectionConfig",
    "RolloutAggregationConfig",
    "RolloutAggregationHelper",  # noqa: F822 - imported when it is asked for
    "RolloutCollectionConfig",
    "RolloutCollectionHelper",
    "RunSummary",
    "SharedRolloutCollectionConfig",
]

logger = logging.getLogger(__name__)

_DEBUG_MARKER = "[rollout_collection] /run failed"

_DEFAULT_MAX_ROLLOUT_ATTEMPTS = DEFAULT_MAX_ROLLOUT_ATTEMPTS
_get_max_rollout_attempts = get_max_rollout_attempts = max_attempts_from_environment
_rollout_request_debug_summary = request_debug_summary

_LATER = {
    "RolloutAggregationHelper": "nemo_gym.combine.aggregation:RolloutAggregationHelper",
    "_expand_input_glob": "nemo_gym.combine.shards:_expand_input_glob",
    "aggregate_rollouts": "nemo_gym.cli:aggregate_rollouts",
    "collect_rollouts": "nemo_gym.cli:collect_rollouts",
    "loads_jsonl_line": "nemo_gym.jsonl:loads_jsonl_line",
}
"""Names of this module that live above it, or need more than a trainer does: imported when they are asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LATER[name].partition(":")
    return getattr(import_module(module), attribute)


def _attach_trajectory_record(row: Row, result: Result | None = None) -> None:
    """Give a result with captured model calls, or an agent's account of them, its `ng_trajectory`.

    Drivers of the original call it with a row and its result, in either order, or with the result alone.
    """
    from nemo_gym.observability.trajectories import attach_trajectory, rollout_id_of
    from nemo_gym.rollout_observability import task_id_of

    records = [row] if result is None else [result, row]
    observed = next((record for record in records if not OBSERVED_KEYS.isdisjoint(record)), None)
    rollout_id = next((found for record in records if (found := rollout_id_of(record)) is not None), None)
    if observed is not None and rollout_id is not None:
        attach_trajectory(observed, task_id_of(*reversed(records)), rollout_id)


def _failures_path_for(output_fpath: str | Path) -> Path:
    """The failures sidecar of a rollouts file."""
    return RolloutPaths(Path(output_fpath)).failures


class RolloutCollectionHelper(BaseModel):
    """Collects rollouts; its methods may be overridden one by one."""

    retry_pauses: ClassVar[RetryPauses] = RetryPauses()
    """How long a failed call waits before it is tried again."""
    _servers_at_hand: "_Servers | None" = PrivateAttr(None)
    _stops_when: str | None = PrivateAttr(None)

    async def collect(self, config: RolloutCollectionConfig, command: Sequence[str] = ()) -> RunSummary:
        """Collect every rollout that `config` asks for into its files, without keeping any in memory.

        `command` is the command line, for the manifest. A run in which there is nothing to do needs no servers.
        """
        started_s = time.monotonic()
        inputs = check_input(config)
        try:
            client = self._checked_client(() if inputs is None else inputs.scan.rows_of_agent)
        except HeadServerError:
            settled = find_settled(config)
            if settled is None:
                raise
            return settled[1]
        if inputs is not None and _has_config(client):
            where = f"{inputs.rules.path}, line"
            await refuse_unfit_rows(client, inputs.scan.shapes, where, keep=config.keep_offending_rows)
        with open_run(config, facts_about(client, command), inputs) as run:
            summary = await self._collect_into(run, client)
        summary.wall_time_s = time.monotonic() - started_s
        return summary

    async def plan(self, config: RolloutCollectionConfig) -> RunPlan:
        """What `collect` would do, and what that would take; writes nothing, and does without servers.

        Servers that run are asked whether they have the agents, and whether they would take the rows.
        """
        try:
            client = self.setup_server_client()
        except HeadServerError:
            return plan_of(config)
        facts = facts_about(client) if _has_config(client) else RunFacts()
        made = plan_of(config, facts.models)
        if _has_config(client):
            require_agents(client, [agent for agent, owed in made.owed_by_agent.items() if owed])
            if not resumes(config):
                inputs = InputRows(config)
                where = f"{inputs.rules.path}, line"
                await refuse_unfit_rows(client, inputs.scan.shapes, where, keep=config.keep_offending_rows)
            made.servers = "they run, and have the agents"
        return made

    async def _collect_into(self, run: Run, client: ServerClient) -> RunSummary:
        plan = run.plan()
        summary = summary_of(plan, run.config, run.models)
        with run.store:  # both files exist after any run
            pass
        servers = _Servers.of(client, run.config)
        if is_settled(summary, run.config):
            await renew_metrics(run.config, plan, servers.ask, summary)
            return summary
        servers.require_agents(plan)
        with tracker_of_process() as tracker:
            if plan.owed:
                await self._roll_out(run, plan, summary, servers)
            await conclude(run, plan, servers.ask, summary, tracker)
        summary.given_up = count_given_up(summary, run.config.attempt_cap)
        return summary

    async def run_from_config(self, config: RolloutCollectionConfig) -> list[Result]:
        """Collect every rollout that `config` asks for; all results, also failed ones, in task order.

        Holds rows and results in memory and goes through the overridable methods; `collect` does neither. A signal
        that ends the run early does so in good order; then it does what it does in the rest of the program.
        """
        fresh = None if resumes(config) else self._preprocess_rows_from_config(config)
        servers = None
        if type(self).run_examples is not _OWN_RUN_EXAMPLES:
            _refuse_own_order(config)
        else:  # whoever replaced it may need no servers
            servers = _Servers.of(self._checked_client({agent_name_of(row) or "" for row in fresh or ()}), config)
            if fresh is not None and servers.watch is not None:
                where = f"{config.input_jsonl_fpath}, row"
                await refuse_unfit_rows(servers.client, shapes_of(fresh), where, keep=config.keep_offending_rows)
        facts = RunFacts() if servers is None or servers.watch is None else facts_about(servers.client)
        rows = None if fresh is None else materialized(fresh, is_chosen=bool(config.selection))
        with open_run(config, facts, rows) as run, self._at_hand(servers, config), tracker_of_process() as tracker:
            cached = self._load_from_cache(config) if fresh is None else Cached(fresh, [], [], [])
            plan, kept = run.plan_for(cached), KeptResults(cached)
            summary = summary_of(plan, config, run.models)
            with run.store:  # both files exist after any run
                pass
            if servers is not None:
                servers.require_agents(plan)
            if plan.owed:
                await self._roll_out(run, plan, summary, servers, kept.add)
            await self._conclude(run, kept, summary, tracker)
        if summary.is_interrupted and summary.signals:
            await pass_on(summary.signals[0])
        return kept.in_task_order()

    async def _roll_out(
        self, run: Run, plan: Plan, summary: RunSummary, servers: "_Servers | None", keep: Keep | None = None
    ) -> None:
        """Send what `plan` owes to `servers` or, without them, through the overridden `run_examples`."""
        announce_plan(run.config, plan, None if servers is None or servers.watch is None else servers.client)
        settings = settings_for(run.config, plan, self.retry_pauses)
        if servers is not None:
            warn_of_lower_caps(_plain_config(servers.client), run.config.concurrency, plan.owed_by_agent)
        if not (run.config.is_metered or run.config.estimate_from):  # nobody asks beforehand what it will take
            await self._roll_out_part(run, plan, summary, servers, settings, keep)
            return
        async for part in in_parts(run, plan, summary):
            started_s = time.monotonic()
            await self._roll_out_part(run, part, summary, servers, settings, keep)
            if settings.run_timeout_s is not None:
                left_s = settings.run_timeout_s - (time.monotonic() - started_s)
                settings = replace(settings, run_timeout_s=max(0.0, left_s))

    async def _roll_out_part(
        self,
        run: Run,
        plan: Plan,
        summary: RunSummary,
        servers: "_Servers | None",
        settings: DispatchSettings,
        keep: Keep | None,
    ) -> None:
        if servers is None:
            await self._roll_out_overridden(run, plan, summary, settings, keep)
            return
        client, watch = servers
        post: Post = partial(self._post, client)
        if watch is not None:
            post = RunPost(client, run_id(run.config.paths.rollouts), _raise_unless_run).post
        scoring = scoring_first(run.store.paths, client, post, is_resumed=run.is_resumed)
        async with nullcontext(post) if watch is None else scoring as sending:
            await roll_out(
                run,
                plan,
                sending,
                summary,
                settings,
                probe=health_probe(client),
                servers=watch,
                following=self._following,
                keep=keep,
                policies=policies_for(run, plan, summary),
                config=_plain_config(client),
            )

    async def _roll_out_overridden(
        self, run: Run, plan: Plan, summary: RunSummary, settings: DispatchSettings, keep: Keep | None
    ) -> None:
        slots = RunSlots(settings.concurrency, settings.rollout_timeout_s)
        examples = OverriddenExamples(partial(self.run_examples, semaphore=slots), plan)
        unlimited = replace(settings, concurrency=Concurrency(total=None), post_keeps_time=True)

        def following(dispatch: Dispatch, progress: Progress) -> AbstractContextManager[object]:
            slots.is_stopped = lambda: dispatch.stopped is not None
            return self._following(dispatch, progress)

        try:
            policies = policies_for(run, plan, summary)
            for adaptive in (each for each in policies if isinstance(each, AdaptiveConcurrency)):
                adaptive.lever = slots
            await roll_out(
                run, plan, examples.post, summary, unlimited, following=following, keep=keep, policies=policies
            )
        finally:
            await examples.close()

    async def _conclude(self, run: Run, kept: KeptResults, summary: RunSummary, tracker: Tracker | None) -> None:
        """Upload what was collected and have its metrics computed; an interrupted run is left as it is."""
        config, path = run.config, None
        if summary.is_interrupted:
            return
        if tracker is not None and config.upload_rollouts:
            tracker.log_rollouts(lines_to_upload(config.paths))
        rows, results = kept.persisted()
        if not config.disable_aggregation:
            asking = self._call_aggregate_metrics(results, rows, config.paths.rollouts)
            try:
                path = await unless_interrupted(asking, summary)
            except AggregationError as error:
                if summary.stopped is None:
                    raise
                logger.warning("There are no metrics: %s", error)
        logger.info("%d rollouts are in %s; metrics: %s", len(results), config.paths.rollouts, path)

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
        post = partial(self._post, client)
        if isinstance(semaphore, RunSlots):  # part of a run, which shows its progress itself
            return run_examples(examples, partial(semaphore.limited, post), semaphore)
        total = len(examples) if isinstance(examples, Sequence) else None
        return run_examples(examples, post, semaphore, Progress(total))

    def setup_server_client(self, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """A client for the servers of the run whose head server is given, else of the configured one."""
        client = setup_server_client(head_server_config)
        follow_replicas(client)
        return client

    def _following(self, dispatch: Dispatch, progress: Progress) -> AbstractContextManager[object]:
        """Entered while a run makes rollouts: for whoever wants to watch them, or change their caps."""
        return nullcontext()

    async def _post(self, client: ServerClient, row: Row) -> Any:
        response = await client.post(server_name=agent_to_ask(row), url_path="/run", json=row)
        await _raise_unless_run(response, row)
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
        servers = self._servers_at_hand or _Servers.of(self.setup_server_client())
        groups = group_by_agent(named)
        for group in groups.values():
            group.stops_when = self._stops_when
        metrics = await ask_agents(groups, servers.ask)
        if not metrics:
            return None
        path = RolloutPaths(Path(output_fpath)).aggregate_metrics
        write_metrics(metrics, path)
        tracker = active_tracker()
        if tracker is not None:
            tracker.log(values_for_tracking(metrics))
        return path

    def _client_at_hand(self) -> ServerClient:
        """The client of the run under way, else a new one: a run reads its config once."""
        return self.setup_server_client() if self._servers_at_hand is None else self._servers_at_hand.client

    @contextmanager
    def _at_hand(self, servers: "_Servers | None", config: RolloutCollectionConfig) -> Iterator[None]:
        """While inside, the overridable methods find the servers of the run, and when its repeats stop."""
        self._servers_at_hand, self._stops_when = servers, config.stop_repeats_when
        try:
            yield
        finally:
            self._servers_at_hand = self._stops_when = None

    def _checked_client(self, agents: Iterable[str]) -> ServerClient:
        """A client for a run that is there and has these agents."""
        client = self.setup_server_client()
        if _has_config(client):
            announce_head(client)
            require_agents(client, agents)
        return client


_OWN_RUN_EXAMPLES = RolloutCollectionHelper.run_examples


class _Servers(NamedTuple):
    """The servers of a run, and who watches them."""

    client: ServerClient
    watch: ServerWatch | None
    """None if the client, as in tests, does not say which servers there are."""

    @classmethod
    def of(cls, client: ServerClient, config: RolloutCollectionConfig | None = None) -> "_Servers":
        """Watched as `config` says, else as is usual."""
        if not _has_config(client):
            return cls(client, None)
        silence_s = DEFAULT_MAX_SILENCE_S if config is None else config.max_silence_s
        refused_s = DEFAULT_MAX_REFUSED_S if config is None else config.max_refused_s
        return cls(client, ServerWatch(client, silence_s, refused_s))

    def require_agents(self, plan: Plan) -> None:
        """Refuse rows that are owed by agents that are not there."""
        if self.watch is not None:
            require_agents(self.client, [agent for agent, owed in plan.owed_by_agent.items() if owed])

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        """Ask an agent for its metrics; give up when a server that it needs is down."""
        asking = self._ask(agent, records)
        return await (asking if self.watch is None else self.watch.guard(agent, asking))

    async def _ask(self, agent: str, records: Collection[Result]) -> object:
        response = await self.client.post(server_name=agent, url_path=AGGREGATE_PATH, **request_arguments(records))
        await raise_for_status(response)
        body = await whole_body(response)
        return large_answer(body) or parse_json(body, response)


def _refuse_own_order(config: RolloutCollectionConfig) -> None:
    """An overridden `run_examples` gets all rows at once, and sends them as it likes."""
    given = [name for name in ("order", "stop_repeats_when") if getattr(config, name) not in (None, "input")]
    if given:
        raise ConfigError(f"+{given[0]} has no effect on an overridden run_examples, which gets all rows at once")


async def _raise_unless_run(response: ClientResponse, row: Row) -> None:
    """Raise `ServerResponseError` if `/run` was answered with an error; whoever wants to look into that is told."""
    try:
        await raise_for_status(response)
    except Exception as error:
        if is_global_aiohttp_client_request_debug_enabled():
            summary = json.dumps(request_debug_summary(row), sort_keys=True)
            answered = getattr(response, "status", None)  # programs replace raise_for_status, and stand in for answers
            status = answered if isinstance(answered, int) else getattr(error, "status", None)
            sys.stdout.write(f"{_DEBUG_MARKER} status={status} row={summary}\n")
            sys.stdout.flush()
        raise


def _has_config(client: ServerClient) -> bool:
    """Whether a client says which servers there are; those of tests may not."""
    return isinstance(getattr(client, "global_config_dict", None), DictConfig)


def _plain_config(client: ServerClient) -> dict[Any, Any]:
    """The config of a run's servers; empty if the client has none."""
    found = OmegaConf.to_container(client.global_config_dict, resolve=False) if _has_config(client) else {}
    return found if isinstance(found, dict) else {}


def tracker_of_process() -> AbstractContextManager[Tracker | None]:
    """What this process's config says about tracking."""
    config = maybe_get_global_config_dict()
    return tracking(OmegaConf.create({}) if config is None else config, masked_command(command_line()))
