"""`ng_reverify`: stored rollouts scored again by environments as they are now."""

import sys

from nemo_gym.cli.command import command, whole_config
from nemo_gym.keys import RESOURCES_TYPE
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.terminal import harmless_json, print_line


@command(RolloutReverificationConfig, needs_model=False)
def main(config: RolloutReverificationConfig) -> int:
    """Send stored responses to the environments that run now, and say what changed.

    Where environments are configured (config_paths, environment, benchmark), they are started, with the judges that
    they ask and nothing else, and stopped at the end; otherwise those that ng_run started are asked. No agent and no
    policy model is called. Every record of the output has the verdict of before beside the new one, as
    _ng_previous_verdict. The rest is as with ng_collect_rollouts: a verdict that fails goes to <output>_failures.jsonl,
    Ctrl-C ends in good order, and the same command with +resume_from_cache=true goes on where it ended.

    Exit code: 0 when every rollout that was asked for has its verdict, 1 when some are missing, 2 for something to
    correct in the command or the data, 130 after Ctrl-C.

    Examples:
        ng_reverify +environment=mcqa +rollouts_jsonl_fpath=results/old.jsonl +output_jsonl_fpath=results/new.jsonl
        ng_reverify +rollouts_jsonl_fpath=results/old.jsonl +output_jsonl_fpath=results/new.jsonl
        ng_reverify +rollouts_jsonl_fpath=old.jsonl +output_jsonl_fpath=new.jsonl '+where=reward < 1'
        ng_reverify +rollouts_jsonl_fpath=old.jsonl +output_jsonl_fpath=new.jsonl +judge_failed_only=true
        ng_reverify +rollouts_jsonl_fpath=old.jsonl +output_jsonl_fpath=new.jsonl +resume_from_cache=true
    """
    import orjson

    from nemo_gym import runtime
    from nemo_gym.cli.show import print_resume_hint, print_summary
    from nemo_gym.http.addresses import server_names
    from nemo_gym.rollout_reverification import RolloutReverificationHelper

    runtime.raise_open_file_limit()
    whole = whole_config()
    if any(RESOURCES_TYPE in whole[name] for name in server_names(whole)):
        from nemo_gym.launch.end_to_end import reverify_with_servers

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
