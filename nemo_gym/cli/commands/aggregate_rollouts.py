"""`ng_aggregate_rollouts`: several rollout files become one, with one metrics file."""

import json
from typing import TYPE_CHECKING

from nemo_gym.cli.command import command
from nemo_gym.rollouts.config import RolloutAggregationConfig

if TYPE_CHECKING:
    from nemo_gym.rollouts.metrics_source import MetricsSource


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
    from nemo_gym.exporters.wandb import wandb_run
    from nemo_gym.global_config import get_global_config_dict
    from nemo_gym.rollouts.aggregate import values_for_tracking
    from nemo_gym.rollouts.aggregation import RolloutAggregationHelper

    summary = await RolloutAggregationHelper(loader=_classes_from_config_paths).aggregate(config)
    if summary.metrics:
        with wandb_run(get_global_config_dict()) as tracker:
            if tracker is not None:
                tracker.log(values_for_tracking(summary.metrics))
    if config.json_format:
        print(json.dumps(summary.as_json()))
    else:
        from nemo_gym.cli.aggregation_results import print_aggregation

        print_aggregation(summary)


def _classes_from_config_paths() -> "MetricsSource":
    from nemo_gym.cli.offline_metrics import OfflineAgents
    from nemo_gym.global_config import get_global_config_dict

    return OfflineAgents(get_global_config_dict())
