"""Arguments of commands: those that start servers and ask after them, those of authors, those that read rollouts.

Arguments that belong to the work of a package are there: those about data sets in `data_config`.
"""

import re
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from nemo_gym.errors import UnknownArgumentError, did_you_mean
from nemo_gym.schemas.path_text import PathText


class BaseNeMoGymCLIConfig(BaseModel):
    """Parent of every command's arguments.

    The whole merged config is passed in, so keys that belong to others are ignored.
    A field's docstring is what the help page says about the option.
    """

    # A help page must come at once, and every command reads the fields of all: validators are built when
    # they are first needed, and field docstrings are read by the help page instead of when a class is made.
    model_config = ConfigDict(extra="ignore", defer_build=True)
    shortcuts: ClassVar[tuple[str, ...]] = ()  # those of `Shortcuts` that the command takes; no option itself

    if not TYPE_CHECKING:  # type checkers know the arguments of each class from its fields

        def __init__(self, **arguments: Any) -> None:
            """Whoever names every argument has misspelt one that is unknown; a whole config goes to `model_validate`.

            Raises:
                UnknownArgumentError: arguments that the class does not have.
            """
            if type(self).model_config.get("extra") == "ignore":
                _refuse_unknown(type(self), arguments)
            super().__init__(**arguments)

        __init__.__pydantic_base_init__ = True  # so that validating a mapping does not come here

    @model_validator(mode="before")
    @classmethod
    def pre_process(cls, data: Any) -> Any:
        """Print the help page of these arguments and exit if `data` asks for it (`h`, `help`)."""
        if isinstance(data, Mapping) and (data.get("h") or data.get("help")):
            import_module("nemo_gym.cli.command").show_help_of(cls)
        return data


def _refuse_unknown(config: type[BaseModel], arguments: Mapping[str, Any]) -> None:
    known = {"h", "help"}
    for name, field in config.model_fields.items():
        names = field.validation_alias or field.alias or name
        known |= set(map(str, names.choices)) if isinstance(names, AliasChoices) else {name, str(names)}
    unknown = [name for name in arguments if name not in known]
    if unknown:
        named = ", nor ".join(f"{name!r}{did_you_mean(name, known - {'h', 'help'})}" for name in unknown)
        raise UnknownArgumentError(
            f"{config.__name__} has no argument {named}. (A whole config, of which others have their part, is read by "
            f"{config.__name__}.model_validate.)"
        )


DEPRECATED_UPLOAD_ROLLOUTS_KEY = "upload_rollouts_to_wandb"


class UploadRolloutsConfigMixin(BaseModel):
    """Whether rollouts are uploaded, for arguments of commands that make some."""

    model_config = ConfigDict(defer_build=True)

    upload_rollouts: bool = True
    """Upload the rollouts to the experiment tracker, if one is configured."""

    @model_validator(mode="before")
    @classmethod
    def map_deprecated_upload_rollouts(cls, data: Any) -> Any:
        """Take the former name of the option for the present one, unless both are given."""
        if not isinstance(data, Mapping) or DEPRECATED_UPLOAD_ROLLOUTS_KEY not in data:
            return data
        if "upload_rollouts" in data:
            return data
        warnings.warn(
            f"{DEPRECATED_UPLOAD_ROLLOUTS_KEY} is now called upload_rollouts", DeprecationWarning, stacklevel=3
        )
        return {**data, "upload_rollouts": data[DEPRECATED_UPLOAD_ROLLOUTS_KEY]}


class Shortcuts(BaseModel):
    """Short ways to config paths and the keys that go with them; no fields of the commands that take them.

    They count as text on a command line only: a config may have keys of the same names.
    """

    model_config = ConfigDict(defer_build=True)

    benchmark: str | None = None
    """Take this benchmark's config (ng_list_benchmarks lists them). ng_e2e_collect_rollouts then knows the split, too,
    and writes to results/<benchmark>/<model>.jsonl unless told otherwise."""
    environment: str | None = None
    """Take this environment's config (ng_list_environments lists them); the rest is as with a benchmark, if it has
    but one split."""
    model: str | None = None
    """Take this model as the policy: openai:<name>, openai:<url>#<name>, vllm:<url>#<name>, scripted,
    scripted:<script.yaml>, azure:<url>#<deployment>, openrouter:<name>, nvidia:<name>, or another model server
    (ng_list_models lists them). The key is policy_api_key, or what OPENAI_API_KEY (AZURE_OPENAI_API_KEY, ...) says."""


ALL_SHORTCUTS = tuple(Shortcuts.model_fields)


class HelpConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_help`."""


class VersionConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_version`."""

    json_format: bool = Field(default=False, alias="json")  # `json` itself is a method of every pydantic model
    """Print one JSON object instead of text."""


class DumpConfigConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_dump_config`."""

    shortcuts = ALL_SHORTCUTS


class ValidateConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_validate`."""

    shortcuts = ALL_SHORTCUTS


class ListConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_list_environments`, `ng_list_agents` and `ng_list_models`."""

    query: str | None = None
    """Show only what is like this by name, domain, agent or description."""
    json_format: bool = Field(default=False, alias="json")  # `json` itself is a method of every pydantic model
    """Print one JSON list instead of a table."""


class CompletionConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_completion`."""

    shell: Literal["bash", "zsh"]
    """The shell to print a completion script for."""


class RecordingOptions(BaseNeMoGymCLIConfig):
    """Arguments of the commands that start model servers."""

    recording_folder: PathText | None = Field(default=None, min_length=1)
    """Folder of recorded model calls, for every model server of the config (docs/recording.md)."""
    recording_mode: Annotated[
        Literal["off", "record", "replay", "auto"] | None,
        BeforeValidator(lambda mode: "off" if mode is False else mode),
    ] = None
    """record keeps every model call; replay answers from the recording, and a call that is not in it fails; auto
    answers from it and records what is missing."""
    recording_max_bytes: int | None = Field(default=None, ge=1)
    """How large the recording may become; what comes after that is not recorded, and a warning says so."""


class RecordingsConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_recordings`."""

    folder: PathText = Field(min_length=1)
    """The folder of the recording."""
    check: bool = False
    """Read every recorded call and hold it against its checksum; exit code 1 if one is damaged."""
    rollout: str | None = Field(default=None, min_length=1)
    """List the calls of this rollout, such as 3-0 (task 3, repeat 0), with the beginning of each answer."""
    prune: bool = False
    """Drop what is of no use: calls that were recorded again later, damaged ones, what killed writers left behind."""
    server: str | None = Field(default=None, min_length=1)
    """Look only at the calls of this model server."""
    older_than_days: float | None = Field(default=None, gt=0)
    """With prune: also drop calls that were recorded longer ago than this."""
    max_bytes: int | None = Field(default=None, ge=0)
    """With prune: also drop the oldest calls until so much is left."""
    json_format: bool = Field(default=False, validation_alias=AliasChoices("json", "json_format"))
    """Print one JSON object instead of text."""


_REPLICAS = re.compile(r"(auto:)?[1-9][0-9]{0,3}|auto")


class RunConfig(RecordingOptions):
    """Arguments of `ng_run`: how servers are started and watched."""

    shortcuts = ALL_SHORTCUTS

    dry_run: bool = False
    """Prepare environments and check that every server can be built, then exit; nothing listens."""
    num_replicas: int | str = "auto"
    """Identical host processes; the collector spreads rollouts over them. `auto`: one, and more while all are busy, up
    to the cores if these are more than 2, or as `auto:8` says; only if every environment says `replicable = True`."""
    restart_crashed_servers: bool = False
    """Start a server again when it crashes, at most 5 times in 10 minutes, instead of ending the run."""
    server_start_timeout_s: float = Field(default=300.0, gt=0)
    """How long a server may take from the start of its process until it answers."""
    server_stop_timeout_s: float = Field(default=3.0, ge=0)
    """How long a server may take to stop before it is killed."""
    environment_timeout_s: float = Field(default=3600.0, gt=0)
    """How long installing the requirements of one server may take."""
    nemo_gym_log_dir: PathText | None = None
    """Write each server's output to <name>.log in this folder instead of the terminal."""
    skip_venv_if_present: bool = False
    """Use the .venv in a server's folder as it is, without looking at requirements."""
    uv_venv_dir: PathText | None = None
    """Folder for the environments of servers that need their own."""
    uv_cache_dir: PathText | None = None
    """Folder of uv's download cache."""
    uv_pip_set_python: bool = False
    """Accepted for compatibility: uv is always told which environment to install into."""
    pip_install_verbose: bool = False
    """Show what the installer does."""
    compat_packages: bool = True
    """Give environments built for servers from elsewhere what these may use without listing it (extra `compat`)."""
    python_version: str | None = None
    """Python of servers that get an environment of their own; the running one when unset."""

    @field_validator("num_replicas", mode="before")
    @classmethod
    def _check_num_replicas(cls, given: Any) -> int | str:
        """A number of at least 1, `auto`, or `auto:` and a number."""
        text = str(given)
        if not _REPLICAS.fullmatch(text):
            raise ValueError("a number of at least 1, auto, or auto:<at most>")
        return text if text.startswith("auto") else int(text)


class StatusConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_status`."""

    json_format: bool = Field(default=False, alias="json")  # `json` itself is a method of every pydantic model
    """Print the servers as one JSON list instead of a table."""
    runs: bool = False
    """With json: print one object with the lists `servers` and `runs`. A table has both in any case."""


class ControlConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_control`."""

    run: PathText | None = Field(default=None, min_length=1)
    """The run: its output_jsonl_fpath, or its id as ng_status shows it. May be left out if only one is going on."""
    values: dict[str, Any] | None = Field(default=None, alias="set")
    """Options to change, with their new values: num_samples_in_parallel, rollout_timeout_s, run_timeout_s, fail_fast,
    max_failure_fraction, and budgets that the run has (max_total_tokens, ...). rollout_timeout_s holds for rollouts in
    flight, too."""
    pause: bool = False
    """Start no more rollouts until resumed; those in flight go on."""
    resume: bool = False
    """Go on after a pause."""
    stop: bool = False
    """End the run in good order, as Ctrl-C would: it can be resumed. A second time ends it at once."""
    cancel: str | None = Field(default=None, min_length=1)
    """Give up on a rollout in flight, written <task>/<rollout>, or on all of a task, <task>. It counts as failed
    (`cancelled`), and a resumed run tries it again."""
    retry: Literal["failed"] | None = None
    """Try again all that failed for good, in this run and in those that it resumes."""
    in_flight: bool = False
    """List the rollouts in flight: since when, and what they are doing as far as their agents say."""
    json_format: bool = Field(default=False, alias="json")  # `json` itself is a method of every pydantic model
    """Print one JSON object instead of text: the answers by what was asked."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "ControlConfig":
        if self.pause + self.resume + self.stop > 1:
            raise ValueError("pause, resume and stop exclude each other; give one of them")
        return self


class AttachConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_attach`."""

    run: PathText | None = Field(default=None, min_length=1)
    """The run: its output_jsonl_fpath, or its id as ng_status shows it. May be left out if only one is going on."""


class ServerFolderConfig(BaseNeMoGymCLIConfig):
    """Arguments of every command about one server."""

    entrypoint: PathText
    """The folder of a server, such as resources_servers/my_env."""


class InitResourcesServerConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_init_resources_server`."""

    entrypoint: PathText = Field(min_length=1)
    """The folder to make, resources_servers/<name>, below the current one."""


class ServerTestsConfig(ServerFolderConfig):
    """Arguments of `ng_test`."""

    should_validate_data: bool = False
    """Check the example data of a resources server, too."""
    _dir_path: Path = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Keep the folder as a path."""
        self._dir_path = Path(self.entrypoint)

    @property
    def dir_path(self) -> Path:
        """The server's folder, as it was given."""
        return self._dir_path


class AllServerTestsConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_test_all`."""

    fail_on_total_and_test_mismatch: bool = False
    """Fail when a server has no README.md, without which it is not tested."""
    delete_venvs_after_each_test: bool = False
    """Remove the environment that a server needed, to save space."""
    num_shards: int = Field(default=1, ge=1)
    """Into how many parts the servers are divided, for several machines."""
    shard_index: int = Field(default=0, ge=0)
    """Which part to test, counted from 0."""


class DevTestConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_dev_test`."""


class PipListConfig(ServerFolderConfig):
    """Arguments of `ng_pip_list`."""

    format: Literal["columns", "freeze", "json"] | None = None
    """How to print the list."""
    outdated: bool = False
    """List only packages of which there is a newer version."""


class ExportConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_export`."""

    rollouts_jsonl_fpath: PathText = Field(min_length=1)
    """The rollouts of a run, as ng_collect_rollouts writes them."""
    output_fpath: PathText = Field(min_length=1)
    """Where the data set goes: JSONL, or parquet when the name ends in .parquet."""
    format: Literal["sft", "dpo", "messages", "dataset"]
    """sft: prompt and completion; dpo: prompt, chosen and rejected; messages: the whole conversation; dataset: the
    input row of each task with its solve_rate, mean_reward and num_rollouts, to be rolled out again."""
    where: str | None = Field(default=None, min_length=1)
    """Take only rollouts for which this holds, such as 'output_tokens < 2000 and level == "hard"': names as in ng_view,
    fields of records; for dataset they are those that solve rates are made of."""
    filter: str | None = Field(default=None, min_length=1)
    """Take only tasks for which this holds: '0 < mean < 1' takes those that are solved sometimes. Names: mean, min,
    max, median, std and pass_rate of the reward, num_rollouts, mean/<field>, …"""
    min_reward: float | None = None
    """Take only rollouts with at least this reward; for dpo it is asked of the chosen one."""
    max_per_task: int | None = Field(default=None, ge=1)
    """Take at most so many examples of a task, the best first; for dpo 1 when unset, else all."""
    tool_arguments: Literal["object", "text"] = "object"
    """Arguments of tool calls as objects, which chat templates expect, or as the text that the model wrote."""
    developer_role: Literal["system", "keep"] = "system"
    """What becomes of developer messages, which most chat templates do not know: system messages, or nothing."""
    materialized_inputs_jsonl_fpath: PathText | None = Field(default=None, min_length=1)
    """For dataset: the rows that were rolled out; <rollouts>_materialized_inputs.jsonl when unset."""
    push_to_hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """For dataset: also upload it to this repository of the Hugging Face hub, <owner>/<name>, which is made, private,
    if it does not exist. Needs the extra hf; HF_ENDPOINT names another hub."""
    hub_split: Literal["train", "validation", "test"] = "train"
    """Which split of the repository it becomes."""
    hf_token: str | None = None
    """Access token for the hub; what the environment variable HF_TOKEN says when unset."""
    overwrite: bool = False
    """Replace a data set that is there already."""
    json_format: bool = Field(default=False, validation_alias=AliasChoices("json", "json_format"))
    """Print one line of JSON on stdout instead of text."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "ExportConfig":
        of_others = [name for name in ("min_reward", "max_per_task") if getattr(self, name) is not None]
        of_data_sets = [name for name in ("push_to_hub", "materialized_inputs_jsonl_fpath") if getattr(self, name)]
        if self.format == "dataset" and of_others:
            raise ValueError(
                f"+{of_others[0]} chooses examples, and +format=dataset has one row per task; use +where or +filter"
            )
        if self.format != "dataset" and of_data_sets:
            raise ValueError(f"+{of_data_sets[0]} is for +format=dataset, not for {self.format}")
        if self.format == "dataset" and self.output_fpath.endswith(".parquet"):
            raise ValueError("+format=dataset writes rows as they are, so its output is JSONL; name a .jsonl file")
        return self


class CheckRolloutsConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_check_rollouts`."""

    input: PathText | list[PathText]
    """The rollouts: a file or a glob, or a list of those, such as the shards of a run."""
    where: str | None = Field(default=None, min_length=1)
    """Look only at rollouts for which this holds, such as 'reward < 1 and level == "hard"': names as in ng_view, fields
    of records."""
    reward_range: tuple[float, float] | None = (0.0, 1.0)
    """The lowest and the highest reward that is plausible; null takes any number."""
    examples: int = Field(default=3, ge=0)
    """How many examples are named for each thing that was found."""
    fail_if: str | None = Field(default=None, min_length=1)
    """Exit with 1 if this holds, such as 'truncated.share > 0.01 or refusal > 0': over rollouts, odd, and the name of
    each check (a count) or <name>.share."""
    json_format: bool = Field(default=False, validation_alias=AliasChoices("json", "json_format"))
    """Print what was found as one line of JSON on stdout instead of a table."""

    @field_validator("reward_range")
    @classmethod
    def _in_order(cls, given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and given[0] > given[1]:
            raise ValueError("write the lowest reward first, such as [-1,1]")
        return given


class ViewConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_view`."""

    path: PathText | list[PathText] | None = None
    """A rollouts file, a folder with runs in it, or a list of those; results/ when unset, or else this folder."""
    port: int = Field(0, ge=0, le=65_535)
    """The port to listen on; any that is free when unset."""
    host: str = Field("127.0.0.1", min_length=1)
    """Where to listen. Other machines can ask there if it is not a loopback address; only with the token."""
    open: bool | None = None
    """Open a browser; by default on a terminal with a display."""
    export: PathText | None = Field(None, min_length=1)
    """Write one HTML file that shows rollouts without any server, instead of serving."""
    where: str | None = Field(None, min_length=1)
    """Only rollouts for which this holds: 'reward < 1 and level == "hard"'. Names: reward, outcome, failure_class,
    output_tokens, duration_s, tools, any field of the record, … (docs/viewing.md)"""
    limit: int = Field(200, ge=1)
    """How many rollouts an exported file has at most: the best, the worst, failed ones, and a sample of the others."""
    json_format: bool = Field(False, validation_alias=AliasChoices("json", "json_format"))
    """Print the runs as one line of JSON and exit."""


class RewardProfileConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_reward_profile`."""

    materialized_inputs_jsonl_fpath: PathText = Field(min_length=1)
    """The rows that were rolled out: <stem>_materialized_inputs.jsonl of the run."""
    rollouts_jsonl_fpath: PathText = Field(min_length=1)
    """The rollouts of these rows; the names of all results derive from it."""
    allow_partial_rollouts: bool = False
    """Profile what is there, although rows have no rollout."""
    select: str | None = Field(default=None, min_length=1)
    """Write the input rows of the tasks for which this holds, one row per task: '0 < mean < 1' takes those that are
    solved sometimes. Names: mean, min, max, median, std and pass_rate of the reward, num_rollouts, mean/<field>, …"""
    where: str | None = Field(default=None, min_length=1)
    """Profile only rollouts for which this holds, such as 'output_tokens < 2000 and level == "hard"': names as in
    ng_view, fields of records and rows. select then chooses among the tasks that are left."""
    select_output_jsonl_fpath: PathText | None = Field(default=None, min_length=1)
    """Where these rows go; <rollouts>_selected.jsonl when unset."""
    rollouts_page: str | None = Field(default=None, min_length=1)
    """Where the tasks on the page lead: a file, which is written with their rollouts as `ng_view +export` does, or the
    address of an `ng_view` that shows this run. Unset, tasks lead nowhere."""
    json_format: bool = Field(default=False, validation_alias=AliasChoices("json", "json_format"))
    """Print one line of JSON on stdout instead of text."""
