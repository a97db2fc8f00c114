"""`ng_e2e_collect_rollouts`: from a data set to its scores in one command."""

import sys
from functools import partial

from nemo_gym.cli.command import command, whole_config
from nemo_gym.executors.base import Job, executor_named
from nemo_gym.runs.options import E2ERolloutCollectionConfig


@command(E2ERolloutCollectionConfig, starts_servers=True)
def main(config: E2ERolloutCollectionConfig) -> int:
    r"""Prepare the data sets of a split, start the configured servers, collect rollouts, compute metrics, stop.

    Data that is missing is downloaded, or made by the benchmark's prepare script. Prepared rows go to
    <output without ending>/preprocessed_datasets. Everything else is as with ng_collect_rollouts: Ctrl-C ends the run
    in good order, and the same command with +resume_from_cache=true goes on where it ended.

    Examples:
        ng_e2e_collect_rollouts +benchmark=gsm8k +model=openai:gpt-4.1-mini
        ng_e2e_collect_rollouts +benchmark=gsm8k +model=vllm:http://localhost:8000/v1#Qwen/Qwen3-8B +limit=100
        ng_e2e_collect_rollouts +environment=example_single_tool_call +model=scripted
        ng_e2e_collect_rollouts +environment=example_single_tool_call +model=scripted +plan=true
        ng_e2e_collect_rollouts +split=benchmark +output_jsonl_fpath=results/gsm8k.jsonl \
            "+config_paths=[benchmarks/gsm8k/config.yaml,responses_api_models/openai_model/configs/openai_model.yaml]"
        ng_e2e_collect_rollouts +split=train +output_jsonl_fpath=results/my_env.jsonl +num_repeats=8 +limit=100 \
            "+config_paths=[resources_servers/my_env/configs/my_env.yaml,my_model.yaml]"
        ng_e2e_collect_rollouts +executor=ray +num_shards=16 +split=train +output_jsonl_fpath=/shared/my_env.jsonl \
            "+config_paths=[resources_servers/my_env/configs/my_env.yaml,my_model.yaml]"
    """
    from nemo_gym.cli.attending import detach, telling_of_end
    from nemo_gym.cli.shortcuts import expand
    from nemo_gym.cli.show import run_and_show, show_plan

    if config.plan:
        from nemo_gym.launch.end_to_end import plan_end_to_end

        return show_plan(plan_end_to_end(config, whole_config()), as_json=config.json_format)

    if config.detach:
        return detach("e2e_collect_rollouts", config, sys.argv)

    job = Job(whole_config(), sys.argv, expand(sys.argv[1:], E2ERolloutCollectionConfig))
    run = partial(executor_named(config.executor).collect_prepared, config, job)
    return run_and_show(partial(telling_of_end, run, config), job.command, as_json=config.json_format)
