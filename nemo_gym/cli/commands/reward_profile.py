"""`ng_reward_profile`: statistics of a run, task by task, as data, as a page, and as a selection of tasks."""

import json
from typing import TYPE_CHECKING

from nemo_gym.cli.command import command
from nemo_gym.schemas.reward_profile_config import RewardProfileConfig

if TYPE_CHECKING:
    from nemo_gym.rollouts.profiling import ProfileSummary


@command(RewardProfileConfig, needs_model=False, offline=True)
def main(config: RewardProfileConfig) -> None:
    """Profile the rollouts of a run: how hard each task is, how long its rollouts are, what failed.

    Writes beside the rollouts: <stem>_reward_profiling.jsonl (one task per line), <stem>_agent_metrics.json and
    <stem>_reward_profile.html, a page to look at. With select, also the input rows of the tasks that match.

    Examples:
        ng_reward_profile +materialized_inputs_jsonl_fpath=r_materialized_inputs.jsonl +rollouts_jsonl_fpath=r.jsonl
        ng_reward_profile … ++allow_partial_rollouts=True '+select=0 < mean < 1'
    """
    from nemo_gym.rollouts.profiling import profile_run

    summary = profile_run(config)
    if config.json_format:
        print(json.dumps(summary.as_json()))
    else:
        _print_summary(summary)


def _print_summary(summary: "ProfileSummary") -> None:
    counts = summary.completion
    print(
        f"Rollouts: {counts['completed_rollout_rows']} of {counts['expected_rollout_rows']} "
        f"({counts['reward_profile_completion_pct']:.2f} %)"
    )
    print(
        f"Input rows: {counts['total_input_rows']}, of them {counts['complete_input_rows']} complete, "
        f"{counts['partial_input_rows']} partial, {counts['missing_input_rows']} dropped"
    )
    print(f"Profile of each task: {summary.groups_path}")
    print(f"Metrics of each agent: {summary.agents_path}")
    print(f"Page: {summary.page_path}")
    if summary.selected_path is not None:
        print(f"Selected: {summary.selected} tasks, in {summary.selected_path}")
