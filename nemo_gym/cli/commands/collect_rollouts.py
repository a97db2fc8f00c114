"""`ng_collect_rollouts`: collect rollouts from running servers into a JSONL file."""

import sys
from functools import partial

from nemo_gym.cli.command import command, whole_config
from nemo_gym.executors.base import Job, executor_named
from nemo_gym.runs.options import RolloutCollectionConfig


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
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +plan=true
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +pilot=20 +max_cost_usd=50
    """
    from nemo_gym.cli.attending import detach, telling_of_end
    from nemo_gym.cli.show import run_and_show, show_plan

    if config.plan:
        from nemo_gym import runtime
        from nemo_gym.rollout_collection import RolloutCollectionHelper

        return show_plan(runtime.run(RolloutCollectionHelper().plan(config)), as_json=config.json_format)
    if config.detach:
        return detach("collect_rollouts", config, sys.argv)

    job = Job(whole_config(), sys.argv)
    run = partial(executor_named(config.executor).collect, config, job)
    return run_and_show(partial(telling_of_end, run, config), job.command, as_json=config.json_format)
