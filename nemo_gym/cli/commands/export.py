"""`ng_export`: a data set for training, made of collected rollouts."""

import json

from nemo_gym.cli.command import command
from nemo_gym.schemas.export_config import ExportConfig


@command(ExportConfig, reads_config=False)
def main(config: ExportConfig) -> None:
    """Write collected rollouts as a data set for supervised (sft, messages) or preference (dpo) training.

    Every example names the rollouts it was made of: file, line and rollout key. Failed rollouts are never exported.

    Examples:
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=sft.jsonl +format=sft +min_reward=1
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=dpo.parquet +format=dpo '+filter=0 < mean < 1'
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=chats.jsonl +format=messages +max_per_task=1
    """
    from nemo_gym.rollouts.export import export_rollouts

    summary = export_rollouts(config)
    if config.json_format:
        print(json.dumps(summary.as_json()))
        return
    print(f"{summary.examples} examples of {summary.tasks} tasks are in {summary.path}")
    for reason, count in summary.left_out.most_common():
        print(f"Left out: {count} rollouts ({reason})")
