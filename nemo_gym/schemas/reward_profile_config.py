"""Arguments of `ng_reward_profile`."""

from pydantic import AliasChoices, Field

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class RewardProfileConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_reward_profile`."""

    materialized_inputs_jsonl_fpath: str = Field(min_length=1)
    """The rows that were rolled out: <stem>_materialized_inputs.jsonl of the run."""
    rollouts_jsonl_fpath: str = Field(min_length=1)
    """The rollouts of these rows; the names of all results derive from it."""
    allow_partial_rollouts: bool = False
    """Profile what is there, although rows have no rollout."""
    select: str | None = Field(None, min_length=1)
    """Write the input rows of the tasks for which this holds, one row per task: '0 < mean < 1' takes those that are
    solved sometimes. Names: mean, min, max, median, std and pass_rate of the reward, num_rollouts, mean/<field>, …"""
    select_output_jsonl_fpath: str | None = Field(None, min_length=1)
    """Where these rows go; <rollouts>_selected.jsonl when unset."""
    json_format: bool = Field(False, validation_alias=AliasChoices("json", "json_format"))
    """Print one line of JSON on stdout instead of text."""
