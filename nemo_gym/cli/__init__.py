"""PUBLIC: the commands as functions, their arguments, and `RunHelper` for programs that start servers themselves.

Each function does on this process's arguments what its script does; an exit code other than 0 is raised as SystemExit.
The same functions that live in other public modules (`nemo_gym.benchmarks.prepare_benchmark`, ...) begin here, too.

Importing this package loads nothing, because every console script passes here; names are resolved on first use.
"""

TYPE_CHECKING = False  # spelled out: `typing` takes its time
if TYPE_CHECKING:
    from typing import Any

    from nemo_gym.global_config import GlobalConfigDictParserConfig

_ARGUMENTS = "nemo_gym.schemas.cli_config"
_EXPORTS = {
    "GlobalConfigDictParserConfig": "nemo_gym.global_config:GlobalConfigDictParserConfig",
    "PipListConfig": f"{_ARGUMENTS}:PipListConfig",
    "RunConfig": f"{_ARGUMENTS}:ServerFolderConfig",
    "RunHelper": "nemo_gym.launch.run_helper:RunHelper",
    "TestAllConfig": f"{_ARGUMENTS}:AllServerTestsConfig",
    "TestConfig": f"{_ARGUMENTS}:ServerTestsConfig",
    "VersionConfig": f"{_ARGUMENTS}:VersionConfig",
    "reinstall": "nemo_gym.cli.commands.about:reinstall",
}
_COMMANDS = ("aggregate_rollouts", "collect_rollouts")
"""Called with a config, these two do just the work."""
_FUNCTIONS = (
    "dev_test",
    "display_help",
    "dump_config",
    "e2e_rollout_collection",
    "init_resources_server",
    "pip_list",
    "run",
    "status",
    "test",
    "test_all",
    "version",
)

__all__ = sorted((*_EXPORTS, *_FUNCTIONS))  # noqa: PLE0605, RUF100


def _loaded(address: str) -> "Any":
    from importlib import import_module

    module, _, name = address.partition(":")
    return getattr(import_module(module), name)


def __getattr__(name: str) -> "Any":
    if name in _COMMANDS:
        return _loaded("nemo_gym.cli.command:command_named")(name)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _loaded(_EXPORTS[name])


def run_command(name: str) -> None:
    """Do on this process's arguments what `ng_<name>` does."""
    _loaded("nemo_gym.cli.command:command_named")(name)()


def run(global_config_dict_parser_config: "GlobalConfigDictParserConfig | None" = None) -> None:
    """Start the configured servers and keep them running; with a config of its own, nothing is read from argv."""
    if global_config_dict_parser_config is None:
        run_command("run")
    else:
        _loaded("nemo_gym.cli.commands.servers:serve")(global_config_dict_parser_config)


def e2e_rollout_collection() -> None:
    """`ng_e2e_collect_rollouts`."""
    run_command("e2e_collect_rollouts")


def test() -> None:
    """`ng_test`."""
    run_command("test")


def test_all() -> None:
    """`ng_test_all`."""
    run_command("test_all")


def dev_test() -> None:
    """`ng_dev_test`."""
    run_command("dev_test")


def init_resources_server() -> None:
    """`ng_init_resources_server`."""
    run_command("init_resources_server")


def dump_config() -> None:
    """`ng_dump_config`."""
    run_command("dump_config")


def display_help() -> None:
    """`ng_help`."""
    run_command("help")


def status() -> None:
    """`ng_status`."""
    run_command("status")


def pip_list() -> None:
    """`ng_pip_list`."""
    run_command("pip_list")


def version() -> None:
    """`ng_version`."""
    run_command("version")
