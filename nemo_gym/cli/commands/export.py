"""`ng_export`: a data set for training, made of collected rollouts."""

import json
import logging

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import ExportConfig

logger = logging.getLogger(__name__)
_CHOOSING = ("where", "filter", "min_reward")


@command(ExportConfig, reads_config=False)
def main(config: ExportConfig) -> None:
    """Write collected rollouts as a data set: for supervised (sft, messages) or preference (dpo) training, or of tasks.

    Every example names the rollouts it was made of: file, line and rollout key. Failed rollouts are never exported. A
    dataset has the input row of each chosen task with its solve rate, and can be rolled out and pushed to a hub.

    Examples:
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=sft.jsonl +format=sft +min_reward=1
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=dpo.parquet +format=dpo '+filter=0 < mean < 1'
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=chats.jsonl +format=messages +max_per_task=1
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=hard.jsonl +format=dataset '+filter=mean < 1'
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=hard.jsonl +format=dataset +push_to_hub=me/hard
    """
    from nemo_gym.runs.export import export_rollouts

    summary = export_rollouts(config)
    if config.push_to_hub is not None:
        from nemo_gym.data.hub import Hub, push_file

        summary.pushed_to = push_file(Hub(token=config.hf_token), config.push_to_hub, summary.path, config.hub_split)
    if not summary.examples:
        asked = {f"+{name}={getattr(config, name)}" for name in _CHOOSING if getattr(config, name) is not None}
        why = f"nothing passed {' and '.join(sorted(asked))}" if asked else "there was nothing to export"
        logger.warning("%s: %s is empty", why, summary.path)
    if config.json_format:
        print(json.dumps(summary.as_json()))
        return
    if config.format == "dataset":
        print(f"{summary.tasks} tasks are in {summary.path}")
    else:
        print(f"{summary.examples} examples of {summary.tasks} tasks are in {summary.path}")
    for reason, count in summary.left_out.most_common():
        print(f"Left out: {count} rollouts ({reason})")
    for note, count in summary.notes.most_common():
        print(f"Changed: {count} rollouts ({note})")
    if summary.pushed_to is not None:
        print(f"Uploaded: {summary.pushed_to}")
