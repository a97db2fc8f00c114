"""`ng_validate`: is this configuration complete and consistent? Starts nothing, contacts nothing."""

from typing import TYPE_CHECKING

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import ValidateConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_gym.global_config import GlobalConfigDictParserConfig

_STAND_IN = "dummy_model"


def parse_or_list_problems(parser_config: "GlobalConfigDictParserConfig") -> "DictConfig":
    """The parsed configuration, or one error that numbers everything wrong with it."""
    from nemo_gym.global_config import set_global_config_dict

    return set_global_config_dict(parser_config)


@command(ValidateConfig, needs_model=False, offline=True, parse=parse_or_list_problems)
def main(config: ValidateConfig) -> None:
    """Check a configuration and everything it refers to, without starting or contacting anything.

    Every problem is listed at once. A configuration that names no model of its own is checked with a stand-in.

    Examples:
        ng_validate "+config_paths=[my_servers.yaml,my_model.yaml]"
    """
    from nemo_gym.config.instances import find_instances
    from nemo_gym.global_config import get_global_config_dict

    instances = find_instances(get_global_config_dict())[0]
    print("Config is valid.")
    if all(instance.implementation == _STAND_IN for instance in instances):
        print("It configures no server, so there is nothing to start.")
        return
    column = max(len(instance.name) for instance in instances) + 2
    for instance in instances:
        note = " (stand-in: no model is configured)" if instance.implementation == _STAND_IN else ""
        print(f"  {instance.name:<{column}}{instance.SERVER_TYPE}/{instance.implementation}{note}")
