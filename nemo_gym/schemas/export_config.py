"""Arguments of `ng_export`."""

from typing import Literal

from pydantic import AliasChoices, Field

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class ExportConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_export`."""

    rollouts_jsonl_fpath: str = Field(min_length=1)
    """The rollouts of a run, as ng_collect_rollouts writes them."""
    output_fpath: str = Field(min_length=1)
    """Where the data set goes: JSONL, or parquet when the name ends in .parquet."""
    format: Literal["sft", "dpo", "messages"]
    """sft: prompt and completion; dpo: prompt, chosen and rejected; messages: the whole conversation."""
    filter: str | None = Field(None, min_length=1)
    """Take only tasks for which this holds: '0 < mean < 1' takes those that are solved sometimes. Names: mean, min,
    max, median, std and pass_rate of the reward, num_rollouts, mean/<field>, …"""
    min_reward: float | None = None
    """Take only rollouts with at least this reward; for dpo it is asked of the chosen one."""
    max_per_task: int | None = Field(None, ge=1)
    """Take at most so many examples of a task, the best first; for dpo 1 when unset, else all."""
    overwrite: bool = False
    """Replace a data set that is there already."""
    json_format: bool = Field(False, validation_alias=AliasChoices("json", "json_format"))
    """Print one line of JSON on stdout instead of text."""
