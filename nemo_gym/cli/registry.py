"""Every command, in one table: its group, what it does, and the class that describes its options.

To add a command `ng_<name>`: write `nemo_gym/cli/commands/<name>.py`, give it two lines in
`[project.scripts]` (`nemo_gym.cli.entry` finds its `main`) and one line in `COMMANDS`, then install
again. The line may come first: as long as the module of its config class does not exist, it
counts for nothing. That module is imported by every command (for the options all commands know)
and by completion, so it imports pydantic and light modules of this package only.

`ng_help`, the check for unknown options, the set of text options and completion follow from here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from pydantic import BaseModel

from nemo_gym.config.options import Option, options_of
from nemo_gym.keys import WELL_KNOWN_TEXT_KEYS
from nemo_gym.schemas.cli_config import Shortcuts

SERVERS = "Servers"
ROLLOUTS = "Rollouts"
DATA = "Data sets and benchmarks"
AUTHORING = "Writing environments"
CONFIGURATION = "Configuration"
HELP = "Help"
OTHER = "Other"
GROUPS = (SERVERS, ROLLOUTS, DATA, AUTHORING, CONFIGURATION, HELP, OTHER)
"""The order in which `ng_help` lists the groups."""

PREFIXES = ("ng_", "nemo_gym_")
HELP_OPTIONS = ("h", "help")


@dataclass(frozen=True)
class CommandInfo:
    """One line of the table."""

    name: str
    """Without the `ng_` in front."""
    group: str
    summary: str
    config: str
    """`module:Class` of its arguments."""

    @property
    def module(self) -> str:
        """Where its `main` is."""
        return f"nemo_gym.cli.commands.{self.name}"


_OWN = "nemo_gym.schemas.cli_config"
_DATA = "nemo_gym.schemas.data_config"
_TRANSFER = "nemo_gym.schemas.data_config"
_AUTHORING = "nemo_gym.schemas.cli_config"

COMMANDS = (
    CommandInfo("run", SERVERS, "Start the servers of a configuration", "nemo_gym.schemas.cli_config:RunConfig"),
    CommandInfo("status", SERVERS, "List the running servers and runs", "nemo_gym.schemas.cli_config:StatusConfig"),
    CommandInfo(
        "collect_rollouts",
        ROLLOUTS,
        "Collect rollouts from running servers",
        "nemo_gym.runs.options:RolloutCollectionConfig",
    ),
    CommandInfo(
        "e2e_collect_rollouts",
        ROLLOUTS,
        "Prepare data, start servers, collect rollouts, stop: in one command",
        "nemo_gym.runs.options:E2ERolloutCollectionConfig",
    ),
    CommandInfo("control", ROLLOUTS, "Ask and steer a run while it is made", f"{_OWN}:ControlConfig"),
    CommandInfo("attach", ROLLOUTS, "Show how a run is doing that goes on elsewhere", f"{_OWN}:AttachConfig"),
    CommandInfo(
        "reverify",
        ROLLOUTS,
        "Score stored rollouts again, without agents or models; say what changed",
        "nemo_gym.runs.options.reverify:RolloutReverificationConfig",
    ),
    CommandInfo(
        "aggregate_rollouts",
        ROLLOUTS,
        "Combine rollout files and compute their metrics",
        "nemo_gym.runs.options:RolloutAggregationConfig",
    ),
    CommandInfo(
        "slurm",
        ROLLOUTS,
        "Write the Slurm jobs that collect rollouts in shards",
        "nemo_gym.executors.options:SlurmConfig",
    ),
    CommandInfo(
        "reward_profile",
        ROLLOUTS,
        "Profile rollouts task by task; choose tasks by difficulty",
        "nemo_gym.schemas.cli_config:RewardProfileConfig",
    ),
    CommandInfo(
        "check_rollouts",
        ROLLOUTS,
        "Look for odd rollouts: empty, cut off, in loops, refused, wrongly rewarded; a gate for CI",
        "nemo_gym.schemas.cli_config:CheckRolloutsConfig",
    ),
    CommandInfo(
        "view",
        ROLLOUTS,
        "Show runs and rollouts in a browser, or as one file",
        "nemo_gym.schemas.cli_config:ViewConfig",
    ),
    CommandInfo(
        "compare",
        ROLLOUTS,
        "Compare runs task by task: which is better, by how much, how surely; a gate for CI",
        "nemo_gym.compare.options:CompareConfig",
    ),
    CommandInfo(
        "export",
        ROLLOUTS,
        "Make a training data set (SFT, DPO, chats) of rollouts",
        "nemo_gym.schemas.cli_config:ExportConfig",
    ),
    CommandInfo(
        "recordings",
        ROLLOUTS,
        "List, check and prune recorded model calls",
        "nemo_gym.schemas.cli_config:RecordingsConfig",
    ),
    CommandInfo("prepare_data", DATA, "Check, measure and collate data sets", f"{_DATA}:TrainDataProcessorConfig"),
    CommandInfo(
        "materialize_prompts",
        DATA,
        "Apply a prompt template to a data set",
        "nemo_gym.prompt:MaterializePromptsConfig",
    ),
    CommandInfo("list_benchmarks", DATA, "List the benchmarks there are", f"{_DATA}:ListBenchmarksConfig"),
    CommandInfo("list_environments", DATA, "List the environments there are", f"{_OWN}:ListConfig"),
    CommandInfo("list_models", DATA, "List the model servers there are", f"{_OWN}:ListConfig"),
    CommandInfo("list_agents", DATA, "List the agents there are", f"{_OWN}:ListConfig"),
    CommandInfo("prepare_benchmark", DATA, "Make the data of benchmarks", f"{_DATA}:PrepareBenchmarkConfig"),
    CommandInfo(
        "download_dataset_from_hf",
        DATA,
        "Fetch a data set from the Hugging Face hub",
        f"{_TRANSFER}:DownloadJsonlDatasetHuggingFaceConfig",
    ),
    CommandInfo(
        "upload_dataset_to_hf",
        DATA,
        "Publish a data set on the Hugging Face hub",
        f"{_TRANSFER}:UploadJsonlDatasetHuggingFaceConfig",
    ),
    CommandInfo(
        "init_resources_server",
        AUTHORING,
        "Write a new environment to begin with",
        f"{_AUTHORING}:InitResourcesServerConfig",
    ),
    CommandInfo("test", AUTHORING, "Run the tests of one server", f"{_AUTHORING}:ServerTestsConfig"),
    CommandInfo("test_all", AUTHORING, "Run the tests of every server", f"{_AUTHORING}:AllServerTestsConfig"),
    CommandInfo("dev_test", AUTHORING, "Run the tests of nemo-gym itself", f"{_AUTHORING}:DevTestConfig"),
    CommandInfo("pip_list", AUTHORING, "List the packages a server runs with", f"{_AUTHORING}:PipListConfig"),
    CommandInfo("validate", CONFIGURATION, "Check a configuration, list every problem", f"{_OWN}:ValidateConfig"),
    CommandInfo("dump_config", CONFIGURATION, "Print the resolved configuration as YAML", f"{_OWN}:DumpConfigConfig"),
    CommandInfo("help", HELP, "List the commands", f"{_OWN}:HelpConfig"),
    CommandInfo("version", HELP, "Print versions and facts about this machine", f"{_OWN}:VersionConfig"),
    CommandInfo("completion", HELP, "Print a completion script for bash or zsh", f"{_OWN}:CompletionConfig"),
)


def bare_name(script: str) -> str:
    """`version` for `ng_version` and `nemo_gym_version`."""
    for prefix in PREFIXES:
        if script.startswith(prefix):
            return script.removeprefix(prefix)
    return script


def find_command(script: str) -> CommandInfo | None:
    """The command behind a script's name, or None when it is not in the table."""
    name = bare_name(script)
    return next((info for info in COMMANDS if info.name == name), None)


def config_class_of(info: CommandInfo) -> type[BaseModel] | None:
    """The class of a command's arguments, or None as long as its module does not exist."""
    module_name, _, class_name = info.config.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            return None
        raise
    config_class: type[BaseModel] = getattr(module, class_name)
    return config_class


def all_options() -> Iterator[Option]:
    """The options of every command there is."""
    for info in COMMANDS:
        config_class = config_class_of(info)
        if config_class is not None:
            yield from options_of(config_class)


def shortcuts_of(config_class: type[BaseModel]) -> list[Option]:
    """The short ways that a command takes beside its options."""
    taken = getattr(config_class, "shortcuts", ())
    return [option for option in options_of(Shortcuts) if option.name in taken]


def known_options(own: type[BaseModel]) -> frozenset[str]:
    """Every option that any command reads, those of `own` among them."""
    names = {name for option in (*all_options(), *options_of(own)) for name in option.names}
    return frozenset({*names, *HELP_OPTIONS})


def text_options(own: type[BaseModel]) -> frozenset[str]:
    """Options whose value is text; where commands disagree about one, `own` decides."""
    text = {name for option in all_options() if option.is_text for name in option.names}
    for option in options_of(own):
        text = text | set(option.names) if option.is_text else text - set(option.names)
    return frozenset(text | WELL_KNOWN_TEXT_KEYS)


def installed_scripts() -> list[str]:
    """Names of the installed scripts that start with `ng_` or `nemo_gym_`, sorted."""
    from importlib.metadata import entry_points

    return sorted({entry.name for entry in entry_points(group="console_scripts") if entry.name.startswith(PREFIXES)})
