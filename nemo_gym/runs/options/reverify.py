"""What `ng_reverify` can be told. This module is imported for every help page, so it stays light."""

from pathlib import Path

from pydantic import AliasChoices, Field, model_validator

from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.options import (
    DEFAULT_MAX_REFUSED_S,
    DEFAULT_MAX_SILENCE_S,
    DEFAULT_ROLLOUT_TIMEOUT_S,
    RolloutCollectionConfig,
)
from nemo_gym.schemas.cli_config import ALL_SHORTCUTS, BaseNeMoGymCLIConfig, UploadRolloutsConfigMixin
from nemo_gym.schemas.path_text import PathText

UNSAFE = "unsafe_"
"""How the output begins of what was scored although its environment does not vouch for that."""


class RolloutReverificationConfig(UploadRolloutsConfigMixin, BaseNeMoGymCLIConfig):
    """Arguments of `ng_reverify`."""

    shortcuts = ALL_SHORTCUTS

    rollouts_jsonl_fpath: PathText = Field(min_length=1)
    """The rollouts that are scored again; rollouts in the failures beside them are, too, if only scoring failed."""
    materialized_inputs_jsonl_fpath: PathText | None = Field(default=None, min_length=1)
    """The rows they were made of; <rollouts>_materialized_inputs.jsonl when unset."""
    output_jsonl_fpath: PathText = Field(min_length=1)
    """Where the rollouts with their new verdicts go; the names of all other files derive from it."""
    where: str | None = Field(default=None, min_length=1)
    """Score only rollouts for which this holds, such as 'reward < 1 and level == "hard"': names as in ng_view, fields
    of records and rows."""
    judge_failed_only: bool = False
    """Keep the verdicts there are, and score only what failed because of a judge."""
    failed_only: bool = False
    """Keep the verdicts there are, and score only what failed while it was scored, whatever the reason."""
    append: bool = False
    """With judge_failed_only or failed_only: add to an output that is there already what it does not have yet."""
    limit: int | None = Field(default=None, ge=1)
    """Score only the first so many of the rollouts that are chosen."""
    force: bool = False
    """Score although an environment does not say that its verdicts need no live session, or is not the one in which
    the rollouts were made; the name of the output then begins with unsafe_."""
    overwrite: bool = False
    """Start afresh although the output is there already; its files are kept in <output>.previous."""
    resume_from_cache: bool = False
    """Go on with an earlier run of the same output: score only what is missing."""
    retry_exhausted: bool = False
    """When resuming, also try again what was given up."""
    num_samples_in_parallel: int | None = Field(default=None, ge=0)
    """How many rollouts may be with an environment at once (0: any number); 256 when unset."""
    rollout_timeout_s: float | None = Field(default=DEFAULT_ROLLOUT_TIMEOUT_S, gt=0)
    """Give up on a verdict that takes longer than this many seconds; null waits for ever."""
    run_timeout_s: float | None = Field(default=None, gt=0)
    """End after this many seconds, keeping what is scored and leaving the rest to be resumed."""
    max_silence_s: float | None = Field(default=DEFAULT_MAX_SILENCE_S, gt=0)
    """End when a server that is needed has not answered for this many seconds; null goes on trying."""
    max_refused_s: float | None = Field(default=DEFAULT_MAX_REFUSED_S, gt=0)
    """End when a server that is needed has refused connections for this many seconds; null: only max_silence_s
    counts."""
    max_attempts: int | None = Field(default=None, ge=1)
    """How often scoring is tried before it is given up; 3 when unset."""
    fail_fast: bool = False
    """Stop at the first rollout that cannot be scored."""
    max_failure_fraction: float | None = Field(default=None, ge=0, le=1)
    """Stop when more than this fraction could not be scored (judged from 20 on)."""
    disable_aggregation: bool = False
    """Compute no metrics at the end."""
    flips: int = Field(default=10, ge=0)
    """How many of the tasks that changed most are listed."""
    json_format: bool = Field(default=False, validation_alias=AliasChoices("json", "json_format"))
    """Print one line of JSON on stdout that sums up the run."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "RolloutReverificationConfig":
        if self.append and not self.keeps_verdicts:
            raise ValueError(
                "append needs +judge_failed_only=true or +failed_only=true: it adds verdicts, and keeps others"
            )
        for given in ("append", "resume_from_cache"):
            if getattr(self, given) and self.overwrite:
                raise ValueError(f"+{given}=true and +overwrite=true contradict each other; leave one out")
        return self

    @property
    def keeps_verdicts(self) -> bool:
        """Whether only what has no verdict yet is scored."""
        return self.judge_failed_only or self.failed_only

    @property
    def rollouts(self) -> Path:
        """The rollouts that are scored again."""
        return Path(self.rollouts_jsonl_fpath).expanduser()

    @property
    def materialized_inputs(self) -> Path:
        """The file with the rows that these rollouts were made of."""
        if self.materialized_inputs_jsonl_fpath is None:
            return RolloutPaths(self.rollouts).materialized_inputs
        return Path(self.materialized_inputs_jsonl_fpath).expanduser()

    def output(self, *, is_unsafe: bool) -> Path:
        """Where the new verdicts go."""
        given = Path(self.output_jsonl_fpath).expanduser()
        return given.with_name(f"{UNSAFE}{given.name}") if is_unsafe else given

    def as_collection(self, *, is_unsafe: bool) -> RolloutCollectionConfig:
        """The same as the options of a run that collects: what follows is one like any other."""
        shared = {
            name: value
            for name, value in self
            if name in RolloutCollectionConfig.model_fields and name not in ("limit", "where")
        }
        paths = {
            "input_jsonl_fpath": str(self.materialized_inputs),
            "output_jsonl_fpath": str(self.output(is_unsafe=is_unsafe)),
        }
        return RolloutCollectionConfig.model_validate({**shared, **paths})
