"""`ng_aggregate_rollouts`: several rollout files become one, with one metrics file."""

import json
from typing import TYPE_CHECKING

from nemo_gym.cli.command import command, whole_config
from nemo_gym.runs.options import RolloutAggregationConfig

if TYPE_CHECKING:
    from nemo_gym.combine.metrics import MetricsSource


@command(RolloutAggregationConfig, needs_model=False, offline=True)
async def main(config: RolloutAggregationConfig) -> None:
    """Combine rollout files that were collected separately, and compute the metrics over all of them.

    Every rollout is checked to be there once. What lies beside the rollouts (failures, materialized inputs, the
    output of an earlier aggregation) is left out. The servers that collected the rollouts compute the metrics; when
    they do not run, their classes are loaded from config_paths and give the same numbers. No model is needed.

    Examples:
        ng_aggregate_rollouts '+input_glob=shards/rollouts-*.jsonl' +output_jsonl_fpath=rollouts.jsonl
        ng_aggregate_rollouts '+input_glob=a/*.jsonl,b/*.jsonl' +output_jsonl_fpath=all.jsonl "+config_paths=[my.yaml]"
        ng_aggregate_rollouts +input_glob=rollouts.jsonl +output_jsonl_fpath=rollouts.jsonl +merge_shards=false
    """
    from nemo_gym.cli.show import print_aggregation
    from nemo_gym.combine.aggregation import RolloutAggregationHelper, track

    summary = await RolloutAggregationHelper(loader=_classes_from_config_paths).aggregate(config)
    track(summary, whole_config())
    if config.json_format:
        print(json.dumps(summary.as_json()))
    else:
        print_aggregation(summary)


def _classes_from_config_paths() -> "MetricsSource":
    from nemo_gym.launch.offline_metrics import OfflineAgents

    return OfflineAgents(whole_config())
