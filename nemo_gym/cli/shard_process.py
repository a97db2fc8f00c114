"""The process of one shard of a run that is spread over a cluster: `python -m nemo_gym.cli.shard_process <options>`.

The options are those of `ng_collect_rollouts`, and unlike that command it starts the configured servers itself. The
worker that started it holds the other end of its stdin and stdout.
"""

import json
import os
import sys

from nemo_gym.cli.command import Command
from nemo_gym.cli.config import whole_config
from nemo_gym.cli.pages import Loading
from nemo_gym.executors.shard import Channel, SteeredCollector
from nemo_gym.keys import NEMO_GYM_SECRET_OPTIONS_ENV_VAR_NAME
from nemo_gym.launch.end_to_end import collect_with_servers
from nemo_gym.launch.run_helper import RunHelper
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runtime import raise_open_file_limit


def main() -> None:
    """Run the shard that the command line describes."""
    channel = Channel.over_stdio()

    def started(servers: RunHelper) -> None:
        channel.share_pace = servers.share_pace

    def collect(config: RolloutCollectionConfig) -> int:
        raise_open_file_limit()
        collector = SteeredCollector(channel=channel, concurrency=config.concurrency)
        summary = collect_with_servers(config, whole_config(), sys.argv, collector, started)
        if summary is None:
            return 0
        channel.send({"summary": summary.as_json()})
        return summary.exit_code

    secret = json.loads(os.environ.pop(NEMO_GYM_SECRET_OPTIONS_ENV_VAR_NAME, "[]"))
    Command(collect, RolloutCollectionConfig, "ng_collect_rollouts", Loading()).run([*secret, *sys.argv[1:]])


if __name__ == "__main__":
    main()
