"""PUBLIC: the commands as functions, their arguments, and `RunHelper` for programs that start servers themselves.

Importing this package loads nothing; every name is resolved on first use.
"""

TYPE_CHECKING = False  # spelled out: console scripts pass here, and `typing` takes its time
if TYPE_CHECKING:
    from typing import Any

_ARGUMENTS = "nemo_gym.schemas.cli_config"
_FUNCTIONS = "nemo_gym.cli.functions"
_EXPORTS = {
    "GlobalConfigDictParserConfig": "nemo_gym.global_config:GlobalConfigDictParserConfig",
    "PipListConfig": f"{_ARGUMENTS}:PipListConfig",
    "RunConfig": f"{_ARGUMENTS}:ServerFolderConfig",
    "RunHelper": "nemo_gym.launch.run_helper:RunHelper",
    "TestAllConfig": f"{_ARGUMENTS}:AllServerTestsConfig",
    "TestConfig": f"{_ARGUMENTS}:ServerTestsConfig",
    "VersionConfig": "nemo_gym.schemas.cli_config:VersionConfig",
    "dev_test": f"{_FUNCTIONS}:dev_test",
    "display_help": f"{_FUNCTIONS}:display_help",
    "dump_config": f"{_FUNCTIONS}:dump_config",
    "e2e_rollout_collection": f"{_FUNCTIONS}:e2e_rollout_collection",
    "init_resources_server": f"{_FUNCTIONS}:init_resources_server",
    "pip_list": f"{_FUNCTIONS}:pip_list",
    "reinstall": f"{_FUNCTIONS}:reinstall",
    "run": f"{_FUNCTIONS}:run",
    "status": f"{_FUNCTIONS}:status",
    "test": f"{_FUNCTIONS}:test",
    "test_all": f"{_FUNCTIONS}:test_all",
    "version": f"{_FUNCTIONS}:version",
}

__all__ = sorted(_EXPORTS)  # noqa: PLE0605, RUF100


def __getattr__(name: str) -> "Any":
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _EXPORTS[name].partition(":")
    return getattr(import_module(module), attribute)
