"""`ng_collect_rollouts`: collect rollouts from running servers into a JSONL file."""

import sys

from nemo_gym.cli.command import command
from nemo_gym.rollouts.config import RolloutCollectionConfig


@command(RolloutCollectionConfig, needs_model=False, offline=True)
def main(config: RolloutCollectionConfig) -> int:
    """Collect rollouts from servers that ng_run started.

    Every row is sent to its agent, as often as num_repeats says; each finished rollout is one line of the output
    file. A rollout that fails goes to <output>_failures.jsonl and the run goes on. Ctrl-C ends the run in good
    order; the same command with +resume_from_cache=true goes on where it ended.

    Exit code: 0 when every rollout is in the output file, 1 when some are missing, 2 for something to correct in the
    command or the data, 130 after Ctrl-C.

    Examples:
        ng_collect_rollouts +agent_name=my_agent +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl
        ng_collect_rollouts +agent_name=my_agent +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +limit=9
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl '+num_repeats={a: 4, b: 1}'
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +resume_from_cache=true
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +shard=3/16
    """
    from nemo_gym import event_loop
    from nemo_gym.cli.results import print_resume_hint, print_summary
    from nemo_gym.open_files import raise_open_file_limit
    from nemo_gym.rollout_collection import RolloutCollectionHelper

    raise_open_file_limit()
    if config.executor == "ray":
        from nemo_gym.cli.ray_run import run_on_ray
        from nemo_gym.global_config import get_global_config_dict

        summary = run_on_ray(config, get_global_config_dict(), sys.argv[1:])
    else:
        summary = event_loop.run(RolloutCollectionHelper().collect(config, sys.argv))
    print_summary(summary, as_json=config.json_format)
    print_resume_hint(summary, sys.argv)
    return summary.exit_code
