"""What the rollout commands can be told.

The whole merged configuration is passed in (a dict or an OmegaConf mapping); keys of others are ignored. This module
is imported for every help page, so it stays light.
"""

import logging
import shlex
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from nemo_gym.keys import MAX_ROLLOUT_ATTEMPTS_ENV_VAR_NAME
from nemo_gym.process_inputs import max_rollout_attempts
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.options.choosing import ChoosingOptions
from nemo_gym.runs.options.sharding import ShardOptions
from nemo_gym.runs.options.steering import Bounds, SteeringOptions, checked_cap, most_of
from nemo_gym.runs.spending import PriceOptions, SpendingOptions
from nemo_gym.schemas.cli_config import ALL_SHORTCUTS, BaseNeMoGymCLIConfig, RecordingOptions
from nemo_gym.schemas.path_text import PathText
from nemo_gym.skills import SkillsConfig

logger = logging.getLogger(__name__)

DEFAULT_ENTRY = "_default"
"""The key of a per-agent mapping that stands for every agent not listed."""
DEFAULT_CONCURRENCY = 256
DEFAULT_ROLLOUT_TIMEOUT_S = 6 * 3600.0
DEFAULT_MAX_SILENCE_S = 1800.0
DEFAULT_MAX_REFUSED_S = 60.0
DEFAULT_MAX_ROLLOUT_ATTEMPTS = 3
_UPLOAD_KEY = "upload_rollouts"
_FORMER_UPLOAD_KEY = "upload_rollouts_to_wandb"
Cap = Annotated[int, Field(ge=0)] | str


class AttendingOptions(BaseNeMoGymCLIConfig):
    """Arguments of the commands that collect rollouts, for the command itself: they are no part of the run."""

    detach: bool = Field(default=False, exclude=True)
    """Leave the terminal: the run goes on by itself and writes what it says to a log. ng_attach shows how it is doing,
    ng_control steers it."""
    log_fpath: PathText | None = Field(default=None, min_length=1, exclude=True)
    """With detach: the log, which is continued if it is there. <output without ending>.log when unset."""
    on_end: str | None = Field(default=None, exclude=True)
    """A command to run when the run has ended, however it did: split into words as a shell would, without a shell, and
    given the summary (that of +json=true) on its stdin. It has a minute; what becomes of it changes no exit code."""

    @field_validator("on_end")
    @classmethod
    def _can_be_run(cls, value: str | None) -> str | None:
        if value is None:
            return None
        words = words_of(value)
        if not words:
            raise ValueError("there is no command in it")
        if shutil.which(words[0]) is None:
            raise ValueError(f"there is no program {words[0]!r}")
        return value

    @model_validator(mode="after")
    def _only_a_detached_run_has_a_log(self) -> "AttendingOptions":
        if self.log_fpath is not None and not self.detach:
            raise ValueError("log_fpath is the log of a run with +detach=true; without it, redirect stderr")
        return self


def words_of(command: str) -> list[str]:
    """The words of a command line, as a shell would split it.

    Raises:
        ValueError: a quotation has no end.
    """
    return shlex.split(command)


@dataclass(frozen=True)
class Concurrency:
    """How many rollouts may be in flight; None means any number."""

    total: int | None
    """Over all agents together."""
    per_agent: Mapping[str, int | None] = field(default_factory=dict)
    """For the agents that have a cap of their own."""
    each_other: int | None = None
    """For each agent that is not in `per_agent`."""

    def cap_of(self, agent: str) -> int | None:
        """The cap of one agent, beside the total."""
        return self.per_agent.get(agent, self.each_other)


class SharedRolloutCollectionConfig(BaseNeMoGymCLIConfig):
    """Arguments of every command that collects rollouts."""

    output_jsonl_fpath: PathText = Field(min_length=1)
    """Where finished rollouts go, one JSON object per line; the names of all other files derive from it."""
    num_samples_in_parallel: Cap | dict[str, Cap] | None = None
    """How many rollouts may be in flight: a number (0: any), or one per agent name, where `_default` stands for
    each agent not listed. 256 when unset. `auto` in place of a number finds it: as many of each agent as throughput
    grows with, fewer while the model is overloaded, within 1 and 1024 or as `auto:16-1024` says."""
    responses_create_params: dict[str, Any] = Field(default_factory=dict)
    """Laid over the `responses_create_params` of every row, key by key."""
    upload_rollouts: bool = True
    """Upload the rollouts to the experiment tracker, if one is configured."""
    upload_rollouts_to_wandb: bool = True
    """The former name of upload_rollouts, which has the last word where both are given."""
    disable_aggregation: bool = False
    """Compute no metrics at the end: for shards that ng_aggregate_rollouts combines later."""
    rollout_timeout_s: float | None = Field(default=DEFAULT_ROLLOUT_TIMEOUT_S, gt=0)
    """Give up on a rollout that takes longer than this many seconds; null waits for ever."""
    run_timeout_s: float | None = Field(default=None, gt=0)
    """End the run after this many seconds, keeping what is finished and leaving the rest to be resumed."""
    max_silence_s: float | None = Field(default=DEFAULT_MAX_SILENCE_S, gt=0)
    """End the run when a server it needs has not answered for this many seconds and no rollout has succeeded
    meanwhile; null goes on trying."""
    max_refused_s: float | None = Field(default=DEFAULT_MAX_REFUSED_S, gt=0)
    """End the run when a server it needs has refused connections for this many seconds and no rollout has succeeded
    meanwhile; while `ng_run` is starting that server the time does not count. null: only max_silence_s counts."""
    max_attempts: int | None = Field(default=None, ge=1)
    """How often a rollout is tried before it is given up, over this run and those it resumes. When unset, what the
    environment variable NEMO_GYM_MAX_ROLLOUT_ATTEMPTS says, otherwise 3."""
    fail_fast: bool = False
    """Stop at the first rollout that fails for good."""
    max_failure_fraction: float | None = Field(default=None, ge=0, le=1)
    """Stop when more than this fraction of the finished rollouts failed (judged from 20 on)."""
    rollout_collection_driver: str | None = Field(default=None, min_length=1)
    """For ng_e2e_collect_rollouts: an async function <module>:<function> that collects in place of the collector. It is
    called with the options of the run and the whole configuration, once the servers are up."""
    json_format: bool = Field(default=False, validation_alias=AliasChoices("json", "json_format"))
    """Print one line of JSON on stdout that sums up the run."""

    @model_validator(mode="before")
    @classmethod
    def _accept_any_mapping(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        plain = data if isinstance(data, dict) else _plain(data, cls._keys())
        if _FORMER_UPLOAD_KEY in plain and plain[_FORMER_UPLOAD_KEY] != plain.get(_UPLOAD_KEY):
            warnings.warn(f"{_FORMER_UPLOAD_KEY} is now called upload_rollouts", DeprecationWarning, stacklevel=3)
        for key in (_UPLOAD_KEY, _FORMER_UPLOAD_KEY):
            if key in plain:
                return {**plain, _UPLOAD_KEY: plain[key], _FORMER_UPLOAD_KEY: plain[key]}
        return plain

    @field_validator("num_samples_in_parallel", mode="before")
    @classmethod
    def _numbers_or_bounds(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {agent: checked_cap(cap) for agent, cap in value.items()}
        return checked_cap(value)

    @classmethod
    def _keys(cls) -> set[str]:
        """Every spelling of every field."""
        keys = set(cls.model_fields)
        for declared in cls.model_fields.values():
            if isinstance(declared.validation_alias, AliasChoices):
                keys.update(choice for choice in declared.validation_alias.choices if isinstance(choice, str))
        return keys

    @property
    def paths(self) -> RolloutPaths:
        """Every file of the run."""
        return RolloutPaths.of_output(Path(self.output_jsonl_fpath))

    @property
    def concurrency(self) -> Concurrency:
        """What `num_samples_in_parallel` comes down to; of caps that adapt, the most they may become."""
        caps = self.num_samples_in_parallel
        if isinstance(caps, str):
            caps = {DEFAULT_ENTRY: caps}
        if not isinstance(caps, dict):
            return Concurrency(total=(DEFAULT_CONCURRENCY if caps is None else caps) or None)
        listed = {agent: most_of(cap) for agent, cap in caps.items() if agent != DEFAULT_ENTRY}
        return Concurrency(
            total=None, per_agent=listed, each_other=most_of(caps.get(DEFAULT_ENTRY, DEFAULT_CONCURRENCY))
        )

    @property
    def adaptive(self) -> Mapping[str, Bounds]:
        """Which agents have caps that adapt, and within which bounds; `_default` stands for those not listed."""
        caps = self.num_samples_in_parallel
        named = caps if isinstance(caps, dict) else {DEFAULT_ENTRY: caps}
        return {agent: Bounds.of_text(cap) for agent, cap in named.items() if isinstance(cap, str)}

    @property
    def attempt_cap(self) -> int:
        """`max_attempts`, or what applies when it is unset."""
        return max_attempts_from_environment() if self.max_attempts is None else self.max_attempts


class RowOptions(
    AttendingOptions, ChoosingOptions, ShardOptions, SpendingOptions, SteeringOptions, SharedRolloutCollectionConfig
):
    """Arguments of the commands that make the rows of a run, too, from a file."""

    agent_name: str | None = None
    """The agent for rows that name none in `agent_ref`."""
    limit: int | None = Field(default=None, ge=0)
    """Use only the first so many rows; all of them when unset or 0."""
    num_repeats: int | dict[str, int] = 1
    """Rollouts per row: a number, or one per agent name, where `_default` stands for every agent not listed."""
    num_repeats_add_seed: bool = False
    """Give each repeat of a row a seed of its own (0, 1, …), in `metadata.extra_body` as vLLM model servers read it."""
    resume_from_cache: bool = False
    """Go on with an earlier run of the same output file: collect only what is missing."""
    retry_exhausted: bool = False
    """When resuming, also try rollouts again that were given up."""
    allow_changed_config: bool = False
    """Resume although rows or settings changed; what is missing is collected with the new ones."""
    keep_offending_rows: bool = False
    """Send rows, too, that an agent or its environment says it will refuse; their rollouts fail."""
    prompt_config: PathText | None = None
    """A YAML file with the prompt template (`user`, optionally `system`) that turns row fields into messages."""
    skills: SkillsConfig | None = None
    """Skills for agents that can use some, given as +skills.path=<folder>: one folder per skill, each with a SKILL.md.
    Rows and results name them, with a hash of all their files, as `skills_ref`."""

    @field_validator("limit")
    @classmethod
    def _zero_means_all(cls, value: int | None) -> int | None:
        return value or None

    @field_validator("num_repeats", mode="before")
    @classmethod
    def _unset_means_once(cls, value: Any) -> Any:
        return 1 if value is None else value

    @field_validator("num_repeats")
    @classmethod
    def _at_least_once(cls, value: int | dict[str, int]) -> int | dict[str, int]:
        if isinstance(value, dict):
            offending = {agent: repeats for agent, repeats in value.items() if repeats < 1}
            if offending:
                raise ValueError(f"num_repeats dict values must be >= 1, got {offending}")
        elif value < 1:
            raise ValueError(f"num_repeats must be >= 1, got {value}")
        return value

    @model_validator(mode="after")
    def _a_shard_has_no_metrics(self) -> "RowOptions":
        if self.chosen_shard is not None:
            self.disable_aggregation = True
        return self

    @model_validator(mode="after")
    def _a_pilot_is_made_here(self) -> "RowOptions":
        if self.pilot is not None and self.executor != "local" and not self.plan:
            raise ValueError(
                f"pilot={self.pilot} does not go with executor={self.executor}, whose shards start all at once: "
                "collect a few tasks with +limit first, and pass their rollouts as +estimate_from"
            )
        return self

    @model_validator(mode="after")
    def _a_driver_works_alone(self) -> "RowOptions":
        if self.rollout_collection_driver is not None and self.executor != "local":
            raise ValueError(
                f"rollout_collection_driver={self.rollout_collection_driver} collects by itself, on this machine: it "
                f"does not go with executor={self.executor}"
            )
        return self

    @property
    def paths(self) -> RolloutPaths:
        """Every file of the run, or of the shard of it that was asked for."""
        output = Path(self.output_jsonl_fpath)
        return RolloutPaths.of_output(output if self.chosen_shard is None else self.chosen_shard.file(output))


class RolloutCollectionConfig(RowOptions):
    """Arguments of `ng_collect_rollouts`."""

    input_jsonl_fpath: PathText = Field(min_length=1)
    """Rows to roll out: a file of JSON lines, plain or compressed (.jsonl.gz, .jsonl.zst), .csv or .parquet. To
    start the servers and collect in one go, from this file or a data set, use ng_e2e_collect_rollouts instead."""

    @property
    def materialized_jsonl_fpath(self) -> Path:
        """Where the rows are written as they are sent."""
        return self.paths.materialized_inputs


class E2ERolloutCollectionConfig(RowOptions, RecordingOptions):
    """Arguments of `ng_e2e_collect_rollouts`."""

    shortcuts = ALL_SHORTCUTS
    split: Literal["train", "validation", "benchmark", "example"] | None = None
    """Which data sets of the configured agents to roll out. Required without input_jsonl_fpath."""
    input_jsonl_fpath: PathText | None = Field(default=None, min_length=1)
    """Roll out the rows of this file, which is read as by ng_collect_rollouts, instead of data sets. Rows that name no
    agent go to agent_name, or else to the agent of the configuration if it has only one."""
    reuse_existing_data_preparation: bool = False
    """Use the prepared data of an earlier run if there is any; a resumed run always does."""
    agent_name: str | None = None
    """Roll out only the data sets of this agent; of all configured agents when unset. With input_jsonl_fpath: the agent
    for rows that name none."""
    prompt_config: PathText | None = None
    """A prompt template (a YAML file) that takes the place of those the data sets declare. With input_jsonl_fpath: the
    template for the rows of that file."""
    data_source: Literal["gitlab", "huggingface"] = "huggingface"
    """Where to download a data set from that names both sources."""
    overwrite_metrics_conflicts: bool = False
    """Replace metrics files that disagree with the data instead of ending with an error."""
    keep_offending_rows: bool = False
    """Roll out rows, too, that ng_prepare_data would refuse."""

    @model_validator(mode="after")
    def _says_which_rows(self) -> "E2ERolloutCollectionConfig":
        if self.split is None and self.input_jsonl_fpath is None:
            raise ValueError(
                "it does not say which rows to roll out: give +split=<train|validation|benchmark|example>, or "
                "+input_jsonl_fpath=<file>"
            )
        return self

    @property
    def prepared_dirpath(self) -> Path:
        """Where the prepared data of this run goes: each output file has a folder of its own, named after it.

        Shards prepare for themselves, in case they start at the same time; they share what is there to be reused.
        """
        output = Path(self.output_jsonl_fpath) if self.reuse_existing_data_preparation else self.paths.rollouts
        return output.with_name(output.stem if output.suffix else f"{output.name}_data") / "preprocessed_datasets"

    def for_rows_in(self, path: Path) -> RolloutCollectionConfig:
        """Return the arguments for collecting from a file of prepared rows: agent and prompt are in them already."""
        given = self.model_dump(exclude={"agent_name", "prompt_config"})
        return RolloutCollectionConfig.model_validate({**given, "input_jsonl_fpath": str(path)})

    def for_given_rows(self, agents: Sequence[str]) -> RolloutCollectionConfig:
        """Return the arguments for collecting from `input_jsonl_fpath` with the configured `agents`."""
        sole_agent = agents[0] if len(agents) == 1 else None
        return RolloutCollectionConfig.model_validate(
            {**self.model_dump(), "agent_name": self.agent_name or sole_agent}
        )


class RolloutAggregationConfig(PriceOptions):
    """Arguments of `ng_aggregate_rollouts`."""

    shortcuts = ALL_SHORTCUTS
    input_glob: PathText = Field(min_length=1)
    """The rollout files to combine: a path or glob, or several separated by commas."""
    output_jsonl_fpath: PathText = Field(min_length=1)
    """Where the combined rollouts go; the name of the metrics file derives from it."""
    merge_shards: bool = True
    """Write the combined rollouts too, not only their metrics."""
    on_duplicate: Literal["error", "first", "last"] = "error"
    """What to do when two records of one rollout differ: refuse, or keep the one that comes first or last in the order
    of `input_glob`. Identical ones are dropped and counted in any case."""
    allow_changed_config: bool = False
    """Combine files although their manifests say that they were collected with different settings."""
    allow_missing_shards: bool = False
    """Combine the shards of a run although some of them are not there."""
    offline: bool = False
    """Ask no servers: compute the metrics here, from the agents' classes in `config_paths`. Without this option that
    happens only when no head server answers."""
    max_silence_s: float | None = Field(default=DEFAULT_MAX_SILENCE_S, gt=0)
    """Stop asking for metrics when a server they need has not answered for this many seconds; null waits for ever."""
    max_refused_s: float | None = Field(default=DEFAULT_MAX_REFUSED_S, gt=0)
    """The same for a server that refuses connections; while `ng_run` is starting it the time does not count."""
    json_format: bool = Field(default=False, validation_alias=AliasChoices("json", "json_format"))
    """Print one line of JSON on stdout instead of tables."""

    @property
    def paths(self) -> RolloutPaths:
        """Where the results go."""
        return RolloutPaths.of_output(Path(self.output_jsonl_fpath))


def repeats_of(num_repeats: int | Mapping[str, int], agent: str) -> int | None:
    """How often a row of `agent` is rolled out; None when a mapping says nothing about that agent."""
    if isinstance(num_repeats, int):
        return num_repeats
    return num_repeats.get(agent, num_repeats.get(DEFAULT_ENTRY))


def max_attempts_from_environment() -> int:
    """The attempt cap of the environment; the default, with a warning, when it is no positive number."""
    text = max_rollout_attempts()
    if not text:
        return DEFAULT_MAX_ROLLOUT_ATTEMPTS
    try:
        cap = int(text)
    except ValueError:
        cap = 0
    if cap >= 1:
        return cap
    logger.warning(
        "%s=%r is not a positive number; using %d",
        MAX_ROLLOUT_ATTEMPTS_ENV_VAR_NAME,
        text,
        DEFAULT_MAX_ROLLOUT_ATTEMPTS,
    )
    return DEFAULT_MAX_ROLLOUT_ATTEMPTS


def _plain(config: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    """The values under `keys` as plain data.

    A block that refers to itself (`top_p: ${temperature}`) cannot be resolved from here and stays as it is.
    """
    import omegaconf.errors

    if not isinstance(config, omegaconf.DictConfig):
        return dict(config)
    values: dict[str, Any] = {}
    for key in keys & {str(key) for key in config}:
        if omegaconf.OmegaConf.is_missing(config, key):
            continue
        value = config[key]
        if omegaconf.OmegaConf.is_config(value):
            try:
                value = omegaconf.OmegaConf.to_container(value, resolve=True)
            except omegaconf.errors.InterpolationResolutionError:
                value = omegaconf.OmegaConf.to_container(value, resolve=False)
        values[key] = value
    return values


def describe(config: SharedRolloutCollectionConfig) -> str:
    """The caps of a run in words."""
    if config.num_samples_in_parallel is None:
        return (
            f"At most {DEFAULT_CONCURRENCY} rollouts in parallel, the default; "
            "+num_samples_in_parallel=<number> changes it, 0 lifts it"
        )
    concurrency, adaptive = config.concurrency, config.adaptive
    if isinstance(config.num_samples_in_parallel, str):
        found = adaptive[DEFAULT_ENTRY]
        return f"As many rollouts in parallel as pay off, between {found.low} and {found.high} of each agent"
    if concurrency.total is not None:
        return f"At most {concurrency.total} rollouts in parallel"
    if not concurrency.per_agent and concurrency.each_other is None:
        return "Any number of rollouts in parallel"
    caps = {**concurrency.per_agent, DEFAULT_ENTRY: concurrency.each_other}
    return "Rollouts in parallel, at most: " + ", ".join(
        f"{'each other agent' if agent == DEFAULT_ENTRY else agent} "
        + (f"as many as pay off, {adaptive[agent].low} to {cap}" if agent in adaptive else str(cap or "any number"))
        for agent, cap in caps.items()
    )
