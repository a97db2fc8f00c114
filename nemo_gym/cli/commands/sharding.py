"""Runs in shards: `ng_slurm` writes their jobs, `ng_aggregate_rollouts` makes one run of them."""

import json
import sys

from nemo_gym.cli.command import whole_config
from nemo_gym.cli.show import print_aggregation
from nemo_gym.combine.aggregation import RolloutAggregationHelper, track
from nemo_gym.combine.metrics import MetricsSource
from nemo_gym.executors.base import Job, job_writer_named
from nemo_gym.executors.options import SlurmConfig
from nemo_gym.launch.offline_metrics import OfflineAgents
from nemo_gym.runs.options import RolloutAggregationConfig


async def aggregate_rollouts(config: RolloutAggregationConfig) -> None:
    """`ng_aggregate_rollouts`."""
    summary = await RolloutAggregationHelper(loader=_classes_from_config_paths).aggregate(config)
    track(summary, whole_config())
    if config.json_format:
        print(json.dumps(summary.as_json()))
    else:
        print_aggregation(summary)


def _classes_from_config_paths() -> MetricsSource:
    return OfflineAgents(whole_config())


def slurm(config: SlurmConfig) -> None:
    """`ng_slurm`."""
    written = job_writer_named("slurm").write(config, Job(whole_config(), sys.argv))
    for path, text in written.items():
        print(f"# ==> {path}")
        print(text)
    print(f"Submit with: bash {list(written)[-1]}", file=sys.stderr)
