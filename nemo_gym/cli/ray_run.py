"""`+executor=ray`: a run cut into shards that a Ray cluster collects, from checking the input to the metrics."""

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from nemo_gym import event_loop
from nemo_gym.cli.e2e import prepare_rows
from nemo_gym.cli.options import options_of
from nemo_gym.cli.signals import stopping_on_signals
from nemo_gym.config.instances import find_instances
from nemo_gym.distributed.cluster import connected, require_ray
from nemo_gym.distributed.driver import Driver, ShardRecord
from nemo_gym.distributed.messages import ShardOrder
from nemo_gym.distributed.results import summary_of
from nemo_gym.distributed.shares import caps_of
from nemo_gym.errors import ConfigError, NoServerInstancesError
from nemo_gym.exporters.wandb import wandb_run
from nemo_gym.keys import AGENTS_TYPE, HEAD_SERVER_KEY_NAME
from nemo_gym.rollouts.aggregate import AggregationError, values_for_tracking
from nemo_gym.rollouts.aggregation import RolloutAggregationHelper
from nemo_gym.rollouts.config import (
    E2ERolloutCollectionConfig,
    RolloutAggregationConfig,
    RolloutCollectionConfig,
    RowOptions,
)
from nemo_gym.rollouts.lock import RunLock
from nemo_gym.rollouts.masked import masked_command
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.progress import Progress
from nemo_gym.rollouts.rows import InputRows
from nemo_gym.rollouts.sharding import Shard, ShardOptions
from nemo_gym.rollouts.store import archive_previous
from nemo_gym.rollouts.streaming import lines_to_upload
from nemo_gym.rollouts.summary import RunSummary

logger = logging.getLogger(__name__)

_OWN = {"output_jsonl_fpath", "input_jsonl_fpath", "resume_from_cache", "run_timeout_s", "json", "json_format"}
_REPORTS_PER_S = 400
_OF_THE_PROCESS = ("NEMO_GYM_CONFIG",)
"""Variables that hand a configuration to a child on this machine; a shard reads its own."""


def run_on_ray(config: RolloutCollectionConfig, global_config: DictConfig, arguments: Sequence[str]) -> RunSummary:
    """Collect the rollouts of `config` in `num_shards` shards on a Ray cluster, merge them, compute their metrics.

    Raises:
        ConfigError: something the user can correct, here or in a shard.
        ShardFailedError: a shard was lost again and again.
    """
    started_s = time.monotonic()
    _check(config, global_config)
    caps = caps_of(config.concurrency)
    with (
        contextlib.redirect_stdout(sys.stderr),  # where Ray may say what it likes
        connected(config.ray_address, caps, config.shard_resources, config.ray_runtime_env) as cluster,
    ):
        run = _Run.of(config, arguments, started_s)
        with run.token_on_disk():
            at_once = min([len(run.records), *caps.values()])
            driver = Driver(cluster, run.order, run.records, at_once)
            before = sum(record.rollouts_on_disk() for record in run.records.values())
            progress = Progress(run.expected, finished_before=before, in_flight=driver.in_flight)
            with stopping_on_signals(driver), progress:
                driver.run(progress)
            summary = summary_of(
                run.output, run.records.values(), expected=run.expected, finished_before=before, stopped=driver.stopped
            )
    _conclude(config, global_config, summary, arguments)
    summary.wall_time_s = time.monotonic() - started_s
    return summary


def run_prepared_on_ray(
    config: E2ERolloutCollectionConfig, global_config: DictConfig, arguments: Sequence[str]
) -> RunSummary:
    """The same for the data sets of a split, which are prepared here, once for all shards."""
    _check(config, global_config)
    rows = prepare_rows(config, global_config)
    return run_on_ray(config.for_rows_in(rows.absolute()), global_config, arguments)


@dataclass
class _Run:
    """One run in shards, before and while it goes on."""

    config: RolloutCollectionConfig
    arguments: Sequence[str]
    """Of the command, as far as they concern the shards."""
    started_s: float
    expected: int
    records: dict[Shard, ShardRecord]
    token: Path

    @classmethod
    def of(cls, config: RolloutCollectionConfig, arguments: Sequence[str], started_s: float) -> "_Run":
        """Check the input, and move the files of an earlier run out of the way unless it is resumed."""
        assert config.num_shards is not None
        inputs = InputRows(config)
        inputs.check()
        expected = sum(
            rows * (inputs.rules.repeats_of(agent) or 0) for agent, rows in inputs.scan.rows_of_agent.items()
        )
        output = Path(config.output_jsonl_fpath).absolute()
        output.parent.mkdir(parents=True, exist_ok=True)
        shards = [Shard(index, config.num_shards) for index in range(config.num_shards)]
        records = {shard: ShardRecord(shard.file(output)) for shard in shards}
        if not config.resume_from_cache:
            for record in records.values():
                paths = RolloutPaths(record.output)
                with RunLock(paths.lock):
                    archive_previous(paths)
        token = output.with_name(f".{output.stem}.{secrets.token_hex(8)}.token")
        return cls(config, _for_shards(arguments), started_s, expected, records, token)

    @property
    def output(self) -> Path:
        """The merged rollouts."""
        return Path(self.config.output_jsonl_fpath)

    @contextlib.contextmanager
    def token_on_disk(self) -> Iterator[None]:
        """A file by which nodes recognise the folder."""
        self.token.touch()
        try:
            yield
        finally:
            self.token.unlink(missing_ok=True)

    def order(self, shard: Shard, attempt: int) -> ShardOrder:
        """What a worker is to run."""
        overrides = {
            "input_jsonl_fpath": self.config.input_jsonl_fpath,
            "agent_name": self.config.agent_name or "null",
            "prompt_config": self.config.prompt_config or "null",
            "output_jsonl_fpath": Path(self.config.output_jsonl_fpath).absolute(),
            "executor": "local",
            "shard_index": shard.index,
            "num_shards": shard.count,
            "resume_from_cache": "true",
            "run_timeout_s": self._time_left(),
            "upload_rollouts": "false",
            "wandb_project": "null",  # the driver tracks the run
            f"{HEAD_SERVER_KEY_NAME}.port": 0,
        }
        return ShardOrder(
            shard=shard,
            attempt=attempt,
            arguments=[*self.arguments, *(f"++{name}={value}" for name, value in overrides.items())],
            output=self.records[shard].output,
            token=self.token,
            folder=None if "working_dir" in self.config.ray_runtime_env else Path.cwd(),
            environment={
                name: value
                for name, value in os.environ.items()
                if name.startswith("NEMO_GYM_") and not name.startswith(_OF_THE_PROCESS)
            },
            report_every_s=max(0.5, shard.count / _REPORTS_PER_S),
        )

    def _time_left(self) -> str:
        if self.config.run_timeout_s is None:
            return "null"
        return str(max(1.0, self.config.run_timeout_s - (time.monotonic() - self.started_s)))


def _check(config: RowOptions, global_config: DictConfig) -> None:
    """What can be found out before anything is started."""
    given = config.output_jsonl_fpath
    if "://" in given:
        raise ConfigError(
            f"+output_jsonl_fpath={given}: shards append to their files and resume from them, which a URL does not "
            "allow; name a file in a folder that is mounted on all nodes (NFS, Lustre, ...) and copy the result there "
            "afterwards"
        )
    output = RolloutPaths(Path(given))
    if output.manifest.exists() and output.rollouts.exists():
        raise ConfigError(
            f"+output_jsonl_fpath={given} holds the rollouts of a run that was not cut into shards (see "
            f"{output.manifest}); choose another output"
        )
    if not any(instance.SERVER_TYPE == AGENTS_TYPE for instance in find_instances(global_config)[0]):
        raise NoServerInstancesError(
            "with +executor=ray each shard starts its own servers, and the configuration has no agent; name the config "
            'files of an environment and of a model: "+config_paths=[resources_servers/<name>/configs/<name>.yaml,...]"'
        )
    require_ray()


def _for_shards(arguments: Sequence[str]) -> list[str]:
    """The arguments that shards get as they are; what the driver decides for them comes after these."""
    dropped = _OWN | {name for option in options_of(ShardOptions) for name in option.names}
    return [
        argument for argument in arguments if argument.lstrip("+~").partition("=")[0].partition(".")[0] not in dropped
    ]


def _conclude(
    config: RolloutCollectionConfig, global_config: DictConfig, summary: RunSummary, arguments: Sequence[str]
) -> None:
    """Merge the shards and compute the metrics, unless the run was interrupted."""
    if summary.is_interrupted:
        return
    if config.disable_aggregation:
        summary.metrics_unwanted = True
        return
    from nemo_gym.cli.offline_metrics import OfflineAgents

    assert config.num_shards is not None
    output = summary.paths.rollouts
    combining = RolloutAggregationConfig.model_validate(
        {
            "input_glob": Shard(0, config.num_shards).glob(output),
            "output_jsonl_fpath": str(output),
            "offline": True,
            "allow_changed_config": config.allow_changed_config,
        }
    )
    helper = RolloutAggregationHelper(loader=lambda: OfflineAgents(global_config))
    try:
        combined = event_loop.run(helper.aggregate(combining))
    except AggregationError as error:
        summary.metrics_problem = str(error)
        return
    summary.metrics, summary.metrics_path = combined.metrics, combined.metrics_path
    with wandb_run(global_config, masked_command(arguments)) as tracker:
        if tracker is not None:
            if config.upload_rollouts:
                tracker.log_rollouts(lines_to_upload(summary.paths))
            tracker.log(values_for_tracking(summary.metrics))
