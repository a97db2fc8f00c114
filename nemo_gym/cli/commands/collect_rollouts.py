"""`ng_collect_rollouts`: collect rollouts from running servers into a JSONL file."""

import json
import sys

from nemo_gym.cli.command import command
from nemo_gym.rollouts.config import RolloutCollectionConfig


@command(RolloutCollectionConfig, needs_model=False, offline=True)
async def main(config: RolloutCollectionConfig) -> int:
    """Collect rollouts from servers that ng_run started.

    Every row is sent to its agent, as often as num_repeats says; each finished rollout is one line of the output
    file. A rollout that fails goes to <output>_failures.jsonl and the run goes on. Ctrl-C ends the run in good
    order; the same command with +resume_from_cache=true goes on where it ended.

    Examples:
        ng_collect_rollouts +agent_name=my_agent +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=rollouts.jsonl
        ng_collect_rollouts +agent_name=my_agent +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=rollouts.jsonl \
            +limit=100 +num_repeats=4 +responses_create_params.temperature=0.7
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=rollouts.jsonl +resume_from_cache=true
    """
    from nemo_gym.open_files import raise_open_file_limit
    from nemo_gym.rollout_collection import RolloutCollectionHelper
    from nemo_gym.rollouts.manifest import RunFacts

    raise_open_file_limit()
    summary = await RolloutCollectionHelper().collect(config, RunFacts(command=sys.argv))
    if config.json_format:
        print(json.dumps(summary.as_json()))
    else:
        from nemo_gym.cli.results import print_summary

        print_summary(summary)
    return summary.exit_code
