"""PUBLIC (through `nemo_gym.rollout_collection`): several rollout files become one, with one metrics file.

The agents' servers compute the metrics when they run. Without them a loader, which the caller passes in,
builds what is needed: this module is a client and never loads a server's code.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nemo_gym.errors import ConfigError
from nemo_gym.http.errors import HeadServerError
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.http.server_client import ServerClient, setup_server_client
from nemo_gym.http.session import close_global_aiohttp_client
from nemo_gym.rollouts.aggregate import AGGREGATE_PATH, AgentRecords, add_failures
from nemo_gym.rollouts.aggregation_summary import AggregationSummary
from nemo_gym.rollouts.compact import without_garbage_collection
from nemo_gym.rollouts.config import RolloutAggregationConfig
from nemo_gym.rollouts.head import announce_head, require_agents
from nemo_gym.rollouts.lock import RunLock
from nemo_gym.rollouts.manifest import RunManifest, read_manifest
from nemo_gym.rollouts.metrics_source import Hooks, MetricsSource, needs_records, request_of
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Result
from nemo_gym.rollouts.server_watch import ServerWatch
from nemo_gym.rollouts.shard_configs import check_configs
from nemo_gym.rollouts.shard_sets import check_shard_set
from nemo_gym.rollouts.shards import ShardFiles, find_shards
from nemo_gym.rollouts.sidecar import readable_records

logger = logging.getLogger(__name__)

MetricsLoader = Callable[[], MetricsSource]
"""Builds a source of metrics when there are no servers to ask."""


class RunningServers:
    """The agents of a run, asked over HTTP."""

    def __init__(self, client: ServerClient, max_silence_s: float | None) -> None:
        self.client = client
        self._watch = ServerWatch(client, max_silence_s)

    def hooks_of(self, agent: str) -> Hooks | None:
        """What a server does with its records is its own business."""
        return None

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        """Send the records to the agent."""
        return await self._watch.guard(agent, self._ask(agent, records))

    async def _ask(self, agent: str, records: Collection[Result]) -> object:
        response = await self.client.post(server_name=agent, url_path=AGGREGATE_PATH, **request_of(records))
        await raise_for_status(response)
        return await get_response_json(response)


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
        """The same, and what there is to say about it."""
        files = find_shards(config)
        logger.info("%d shards: %s", len(files.shards), ", ".join(map(str, files.shards)))
        _refuse_to_overwrite_run(config, files)
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
                return RunningServers(client, config.max_silence_s)
        if self.loader is None:
            raise ConfigError(
                "without servers the metrics need a loader, RolloutAggregationHelper(loader=…), as "
                "ng_aggregate_rollouts passes one; or start the servers with ng_run and leave offline unset"
            )
        return self.loader()


async def _combined(
    config: RolloutAggregationConfig,
    source: MetricsSource,
    manifests: dict[Path, RunManifest],
    summary: AggregationSummary,
) -> AggregationSummary:
    from nemo_gym.rollouts.metrics_file import write_answers
    from nemo_gym.rollouts.shard_expectations import find_expectations  # loads numpy, as do those below
    from nemo_gym.rollouts.shard_index import ShardIndex
    from nemo_gym.rollouts.shard_intake import read_shards
    from nemo_gym.rollouts.shard_merge import write_merged
    from nemo_gym.rollouts.shard_metrics import compute_answers
    from nemo_gym.rollouts.shard_siblings import merge_siblings

    index = ShardIndex(summary.files.shards)
    merged, intake = read_shards(index, lambda agent: needs_records(source, agent), config.on_duplicate)
    summary.note_records(index, merged, intake)
    summary.expectations = find_expectations(index, merged.order, manifests, summary.files.without_rollouts)
    summary.expectations.is_known &= not summary.shards.missing
    for agent in summary.expectations.by_agent:
        intake.groups.setdefault(agent, AgentRecords())
    for paths in [*map(RolloutPaths, index.paths), *summary.files.without_rollouts]:
        add_failures(intake.groups, readable_records(paths.failures))
    summary.report()
    with _output(config.paths):
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
            answers = await compute_answers(intake, source, summary.expectations)
            summary.metrics = [answer.without_groups() for answer in answers]
            if answers:
                write_answers(answers, config.paths.aggregate_metrics)
                summary.metrics_path = config.paths.aggregate_metrics
    return summary


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


@contextmanager
def _output(paths: RolloutPaths) -> Iterator[None]:
    folder = paths.rollouts.parent
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock(paths.lock))
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}, the folder of +output_jsonl_fpath: {error}") from error
        yield
