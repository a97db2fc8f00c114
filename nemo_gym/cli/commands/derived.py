"""Runs made of runs: `ng_aggregate_rollouts` makes one of shards, `ng_reverify` has responses scored again."""

import json
import sys

import orjson

from nemo_gym import runtime
from nemo_gym.cli.command import whole_config
from nemo_gym.cli.show import print_aggregation, print_resume_hint, print_summary
from nemo_gym.combine.aggregation import RolloutAggregationHelper, track
from nemo_gym.combine.shard_metrics import MetricsSource
from nemo_gym.http.addresses import server_names
from nemo_gym.keys import RESOURCES_TYPE
from nemo_gym.rollout_reverification import RolloutReverificationHelper
from nemo_gym.runs.options import RolloutAggregationConfig
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.terminal import harmless_json, print_line


async def aggregate_rollouts(config: RolloutAggregationConfig) -> None:
    """`ng_aggregate_rollouts`."""
    summary = await RolloutAggregationHelper(loader=_classes_from_config_paths).aggregate(config)
    track(summary, whole_config())
    if config.json_format:
        print(json.dumps(summary.as_json()))
    else:
        print_aggregation(summary)


def _classes_from_config_paths() -> MetricsSource:
    from nemo_gym.launch.offline_metrics import OfflineAgents  # with FastAPI

    return OfflineAgents(whole_config())


def reverify(config: RolloutReverificationConfig) -> int:
    """`ng_reverify`."""
    runtime.raise_open_file_limit()
    whole = whole_config()
    if any(RESOURCES_TYPE in whole[name] for name in server_names(whole)):
        from nemo_gym.launch.end_to_end import reverify_with_servers  # with FastAPI

        summary = reverify_with_servers(config, whole, sys.argv)
    else:
        summary = runtime.run(RolloutReverificationHelper().reverify(config, sys.argv))
    if config.json_format:
        print(harmless_json(orjson.dumps(summary.as_json(), option=orjson.OPT_NON_STR_KEYS).decode()))
    else:
        print_summary(summary.run)
        print_line()
        for line in summary.delta.lines():
            print_line(line)
    print_resume_hint(summary.run, sys.argv)
    return summary.run.exit_code
