"""`ng_e2e_collect_rollouts`: from a data set to its scores in one command."""

import sys

from nemo_gym.cli.command import command
from nemo_gym.rollouts.config import E2ERolloutCollectionConfig


@command(E2ERolloutCollectionConfig)
def main(config: E2ERolloutCollectionConfig) -> int:
    r"""Prepare the data sets of a split, start the configured servers, collect rollouts, compute metrics, stop.

    Data that is missing is downloaded, or made by the benchmark's prepare script. Prepared rows go to
    <output without ending>/preprocessed_datasets. Everything else is as with ng_collect_rollouts: Ctrl-C ends the run
    in good order, and the same command with +resume_from_cache=true goes on where it ended.

    Examples:
        ng_e2e_collect_rollouts +split=benchmark +output_jsonl_fpath=results/gsm8k.jsonl \
            "+config_paths=[benchmarks/gsm8k/config.yaml,responses_api_models/openai_model/configs/openai_model.yaml]"
        ng_e2e_collect_rollouts +split=train +output_jsonl_fpath=results/my_env.jsonl +num_repeats=8 +limit=100 \
            "+config_paths=[resources_servers/my_env/configs/my_env.yaml,my_model.yaml]"
        ng_e2e_collect_rollouts +executor=ray +num_shards=16 +split=train +output_jsonl_fpath=/shared/my_env.jsonl \
            "+config_paths=[resources_servers/my_env/configs/my_env.yaml,my_model.yaml]"
    """
    from nemo_gym.cli.e2e import run_end_to_end
    from nemo_gym.cli.results import print_resume_hint, print_summary
    from nemo_gym.global_config import get_global_config_dict
    from nemo_gym.open_files import raise_open_file_limit

    raise_open_file_limit()
    if config.executor == "local":
        summary = run_end_to_end(config, get_global_config_dict(), sys.argv)
    else:
        from nemo_gym.cli.ray_run import run_prepared_on_ray

        summary = run_prepared_on_ray(config, get_global_config_dict(), sys.argv[1:])
    if summary is None:
        return 0
    print_summary(summary, as_json=config.json_format)
    print_resume_hint(summary, sys.argv)
    return summary.exit_code
