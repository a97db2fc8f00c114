"""PUBLIC (through `nemo_gym.rollout_collection`): several rollout files become one, with one metrics file.

The agents' servers compute the metrics when they run. Without them a loader, which the caller passes in,
builds what is needed: this module is a client and never loads a server's code.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict

from nemo_gym.collect.metrics import (
    AGGREGATE_PATH,
    AgentMetrics,
    AgentRecords,
    add_costs,
    add_failures,
    large_answer,
    values_for_tracking,
    write_metrics,
)
from nemo_gym.collect.run_servers import announce_head, require_agents
from nemo_gym.collect.server_watch import ServerWatch
from nemo_gym.combine.expectations import Expectations, find_expectations
from nemo_gym.combine.merge import Merged, merge_siblings, write_merged
from nemo_gym.combine.shard_metrics import (
    Hooks,
    Intake,
    MetricsSource,
    RecordTexts,
    compute_metrics,
    keeps_of,
    read_shards,
    request_of,
)
from nemo_gym.combine.shards import ShardFiles, ShardSet, check_configs, check_shard_set, find_shards
from nemo_gym.errors import ConfigError, listed
from nemo_gym.http.client import ServerClient, setup_server_client
from nemo_gym.http.errors import HeadServerError
from nemo_gym.http.request import parse_json, raise_for_status, whole_body
from nemo_gym.http.session import close_global_aiohttp_client
from nemo_gym.paths import remove_debris
from nemo_gym.runs.files import RolloutPaths, refuse_strangers
from nemo_gym.runs.index import RecordIndex
from nemo_gym.runs.lock import only_writer
from nemo_gym.runs.manifest import RunManifest, asked_keys, read_manifest
from nemo_gym.runs.options import RolloutAggregationConfig, repeats_of
from nemo_gym.runs.read import records
from nemo_gym.runs.record import KeySet, Result, without_garbage_collection
from nemo_gym.runs.repeats import not_needed_in
from nemo_gym.runs.run import refuse_files_of_others
from nemo_gym.runs.spending import Prices, prices_of
from nemo_gym.trackers.base import tracking

logger = logging.getLogger(__name__)

MetricsLoader = Callable[[], MetricsSource]
"""Builds a source of metrics when there are no servers to ask."""


@dataclass
class AggregationSummary:
    """The end of one aggregation."""

    paths: RolloutPaths
    files: ShardFiles
    shards: ShardSet = field(default_factory=lambda: ShardSet({}, []))
    """Those of the files that are shards of one run."""
    differences: list[str] = field(default_factory=list)
    """Between the settings of the shards, one line each."""
    is_offline: bool = False
    """Whether the metrics were computed here instead of by servers."""
    is_merged: bool = False
    """Whether the merged file was written."""
    records: int = 0
    """In the merged file."""
    identical_duplicates: int = 0
    different_duplicates: int = 0
    no_longer_asked: int = 0
    """Records that their runs are no longer asked for."""
    torn: list[str] = field(default_factory=list)
    without_agent: int = 0
    without_reward: int = 0
    without_key: int = 0
    expectations: Expectations | None = None
    metrics: list[AgentMetrics] = field(default_factory=list)
    """Without their per-task part, which is in the file only."""
    metrics_path: Path | None = None

    @property
    def missing(self) -> int:
        """Rollouts that the shards' inputs ask for and that have no result."""
        return 0 if self.expectations is None else self.expectations.missing.number + self.expectations.missing_unnamed

    def note_records(self, index: RecordIndex, merged: Merged, intake: Intake) -> None:
        """Take over what reading the shards found."""
        self.records = len(merged.order)
        self.identical_duplicates, self.different_duplicates = merged.identical, merged.different
        self.no_longer_asked = merged.no_longer_asked
        self.torn = [str(tail) for tail in index.torn]
        self.without_agent, self.without_key = intake.without_agent, index.without_key
        self.without_reward = intake.without_reward

    def report(self) -> None:
        """Log everything that is not as it should be."""
        for line in self.remarks():
            logger.warning("%s", line)

    def remarks(self) -> list[str]:
        """What a reader of the metrics should know, one line each."""
        remarks = list(self.torn)
        for paths in self.files.without_rollouts:
            remarks.append(
                f"{paths.materialized_inputs} is there, but {paths.rollouts} is not: no rollout was collected"
            )
        if self.shards.missing:
            remarks.append(f"{len(self.shards.missing)} shards are not there: {listed(self.shards.missing)}")
        if self.identical_duplicates:
            remarks.append(f"{self.identical_duplicates} records are there more than once and count once")
        if self.different_duplicates:
            remarks.append(f"{self.different_duplicates} records gave way to another one of the same rollout")
        if self.no_longer_asked:
            remarks.append(f"{self.no_longer_asked} records are no longer asked for by their runs and are left out")
        if self.without_agent:
            remarks.append(f"{self.without_agent} records name no agent (agent_ref.name) and are part of no metrics")
        if self.without_key:
            remarks.append(f"{self.without_key} records do not say which rollout they are (_ng_task_index)")
        if self.without_reward:
            remarks.append(f"{self.without_reward} records have a reward that is no finite number: they have no score")
        if self.missing:
            remarks.append(self._missing_text())
        return remarks

    def _missing_text(self) -> str:
        assert self.expectations is not None
        keys = ", ".join(str(tuple(key)) for key in self.expectations.missing.first)
        named = "" if not keys else f" (task, rollout): {keys}" + (", …" if self.missing > keys.count("(") else "")
        return f"{self.missing} of the rollouts that were asked for have no result{named}"

    def as_json(self) -> dict[str, Any]:
        """For programs: one object."""
        known = self.expectations is not None and self.expectations.is_known
        return {
            "output_jsonl_fpath": str(self.paths.rollouts) if self.is_merged else None,
            "aggregate_metrics_fpath": None if self.metrics_path is None else str(self.metrics_path),
            "shards": [str(path) for path in self.files.shards],
            "excluded": {str(path): reason for path, reason in self.files.excluded},
            "records": self.records,
            "identical_duplicates": self.identical_duplicates,
            "different_duplicates": self.different_duplicates,
            "no_longer_asked": self.no_longer_asked,
            "torn_tails": self.torn,
            "missing": self.missing if known else None,
            "missing_shards": [str(path) for path in self.shards.missing],
            "different_configs": self.differences,
            "remarks": self.remarks(),
            "offline": self.is_offline,
            "key_metrics": {of_agent.agent: of_agent.metrics.key_metrics for of_agent in self.metrics},
            "coverage": {of_agent.agent: of_agent.coverage for of_agent in self.metrics},
        }


class RunningServers:
    """The agents of a run, asked over HTTP."""

    def __init__(self, client: ServerClient, watch: ServerWatch) -> None:
        self.client = client
        self._watch = watch

    def hooks_of(self, agent: str) -> Hooks | None:
        """Always None: a running server is asked instead."""
        return None

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        """What the agent's `/aggregate_metrics` answers to these records."""
        return await self._watch.guard(agent, self._ask(agent, records))

    async def _ask(self, agent: str, records: Collection[Result]) -> object:
        request = records.as_request() if isinstance(records, RecordTexts) else request_of(records)
        response = await self.client.post(server_name=agent, url_path=AGGREGATE_PATH, **request)
        await raise_for_status(response)
        body = await whole_body(response)
        return large_answer(body) or parse_json(body, response)


class RolloutAggregationHelper(BaseModel):
    """Combines rollout files."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    loader: MetricsLoader | None = None
    """For when no head server answers, and for `offline`."""

    async def run_from_config(self, config: RolloutAggregationConfig) -> Path | None:
        """Combine the files that `config` names; the path of the metrics, None when there were no records.

        Raises:
            ConfigError: no file matches, files contradict each other, or a line is not JSON.
            AggregationError: an agent could not say what its metrics are; the merged file is complete.
        """
        return (await self.aggregate(config)).metrics_path

    async def aggregate(self, config: RolloutAggregationConfig) -> AggregationSummary:
        """Combine the files that `config` names; counts, remarks and metrics of the result.

        Raises:
            ConfigError, AggregationError: as `run_from_config` does.
        """
        files = find_shards(config)
        logger.info("%d shards: %s", len(files.shards), ", ".join(map(str, files.shards)))
        _refuse_to_overwrite_run(config, files)
        refuse_files_of_others(config.paths)
        _refuse_strangers(config)
        manifests = _manifests(files)
        shards = check_shard_set(files.shards, manifests, config)
        differences = check_configs(manifests, allow_changed=config.allow_changed_config)
        summary = AggregationSummary(config.paths, files, shards, differences)
        source = self._source(config)
        summary.is_offline = not isinstance(source, RunningServers)
        try:
            return await _combined(config, source, manifests, summary)
        finally:
            await close_global_aiohttp_client()

    def setup_server_client(self) -> ServerClient:
        """A client for the run of the configured head server."""
        return setup_server_client()

    def _source(self, config: RolloutAggregationConfig) -> MetricsSource:
        if not config.offline:
            try:
                client = self.setup_server_client()
            except HeadServerError as error:
                if self.loader is None:
                    raise
                logger.info("The metrics are computed here, because there are no servers to ask: %s", error)
            else:
                announce_head(client)
                return RunningServers(client, ServerWatch(client, config.max_silence_s, config.max_refused_s))
        if self.loader is None:
            raise ConfigError(
                "without servers the metrics need a loader, RolloutAggregationHelper(loader=…), as "
                "ng_aggregate_rollouts passes one; or start the servers with ng_run and leave offline unset"
            )
        return self.loader()


def track(summary: AggregationSummary, config: DictConfig) -> None:
    """Send the metrics, where there are any, to the experiment trackers that `config` names."""
    if not summary.metrics:
        return
    with tracking(config) as tracker:
        if tracker is not None:
            tracker.log(values_for_tracking(summary.metrics))


async def _combined(
    config: RolloutAggregationConfig,
    source: MetricsSource,
    manifests: dict[Path, RunManifest],
    summary: AggregationSummary,
) -> AggregationSummary:
    index = RecordIndex(summary.files.shards)
    asked = _asked_of_narrowed(index.paths, manifests)
    merged, intake = read_shards(index, lambda agent: keeps_of(source, agent), config.on_duplicate, asked)
    summary.note_records(index, merged, intake)
    summary.expectations = find_expectations(index, merged.order, manifests, summary.files.without_rollouts)
    summary.expectations.is_known &= not summary.shards.missing
    for agent in summary.expectations.by_agent:
        intake.groups.setdefault(agent, AgentRecords())
    _note_repeats(intake, manifests.values())
    for place, paths in enumerate([*map(RolloutPaths, index.paths), *summary.files.without_rollouts]):
        wanted = asked.get(place)
        failures = (it for key, _, it in records(paths.failures, "skip") if wanted is None or key in wanted)
        add_failures(intake.groups, failures)
    summary.report()
    with only_writer(config.paths):
        refuse_files_of_others(config.paths)
        remove_debris(config.paths.of_one_run)
        if config.merge_shards:
            write_merged(index, merged.order, config.paths.rollouts)
            summary.is_merged = True
            if summary.shards.is_complete:
                merge_siblings(summary.shards.files.values(), config.paths)
        if not len(merged.order):
            return summary
        if isinstance(source, RunningServers):
            _require_agents(source.client, intake.groups)
        with without_garbage_collection():
            metrics = await compute_metrics(intake, source, summary.expectations)
            add_costs(metrics, intake.groups, _prices(config, manifests.values()))
            summary.metrics = [of_agent.without_groups() for of_agent in metrics]
            if metrics:
                write_metrics(metrics, config.paths.aggregate_metrics)
                summary.metrics_path = config.paths.aggregate_metrics
    return summary


def _asked_of_narrowed(files: Sequence[Path], manifests: Mapping[Path, RunManifest]) -> dict[int, KeySet]:
    """The rollouts asked for of those files, by their place, that may hold others: once more was asked for."""
    known = {place: asked_keys(RolloutPaths(path)) for place, path in enumerate(files) if path in manifests}
    return {place: keys for place, keys in known.items() if keys is not None}


def _prices(config: RolloutAggregationConfig, manifests: Collection[RunManifest]) -> Prices | None:
    """Those given, else those that the shards were collected with, if they agree."""
    models = sorted({model for each in manifests for model in each.models})
    if config.prices is not None:
        return prices_of(config.prices, models)
    given = [each.options.get("prices") for each in manifests]
    return prices_of(given[0], models) if given and all(each == given[0] for each in given) else None


def _repeats_asked(agent: str, manifests: Collection[RunManifest]) -> int | None:
    """How many rollouts of a row all runs of the agent asked for; None when they differ, or do not say."""
    asked = {repeats_of(each.options.get("num_repeats", 1), agent) for each in manifests if agent in each.agents}
    return asked.pop() if len(asked) == 1 else None


def _note_repeats(intake: Intake, manifests: Collection[RunManifest]) -> None:
    """Take over from the manifests how often each task was to be rolled out, and what was not needed of that."""
    for agent, group in intake.groups.items():
        group.repeats = _repeats_asked(agent, manifests)
        group.stops_when = next((found for each in manifests if (found := _stops_when(each, agent))), None)
    for manifest in manifests:
        for agent, keys in not_needed_in(manifest.not_needed).items():
            intake.groups.setdefault(agent, AgentRecords()).not_needed |= keys


def _stops_when(manifest: RunManifest, agent: str) -> str | None:
    """The condition under which a run stops the repeats of a task of `agent`."""
    return manifest.options.get("stop_repeats_when") if agent in manifest.agents else None


def _require_agents(client: ServerClient, agents: Collection[str]) -> None:
    try:
        require_agents(client, agents)
    except ConfigError as error:
        raise ConfigError(
            f"{error}, or compute the metrics here with +offline=true and the run's config_paths"
        ) from error


def _manifests(files: ShardFiles) -> dict[Path, RunManifest]:
    found = {}
    for paths in [*map(RolloutPaths, files.shards), *files.without_rollouts]:
        manifest = read_manifest(paths.manifest)
        if manifest is not None:
            found[paths.rollouts] = manifest
            if manifest.ended_at is None:
                logger.warning("%s: its run is still going on, or was killed", paths.rollouts)
    return found


def _refuse_strangers(config: RolloutAggregationConfig) -> None:
    """Only what an earlier aggregation wrote is replaced."""
    paths = config.paths
    merged = (paths.rollouts, paths.failures, paths.materialized_inputs) if config.merge_shards else ()
    refuse_strangers(paths, files=(*merged, paths.aggregate_metrics))


def _refuse_to_overwrite_run(config: RolloutAggregationConfig, files: ShardFiles) -> None:
    """The rollouts of a run exist once; only when they are among the inputs nothing is lost."""
    output = config.paths
    if not (config.merge_shards and output.manifest.exists() and output.rollouts.exists()):
        return
    if not any(shard.samefile(output.rollouts) for shard in files.shards):
        raise ConfigError(
            f"+output_jsonl_fpath={output.rollouts} holds the rollouts of a run (see {output.manifest}), which are not "
            "among the input files and would be lost; choose another output"
        )
