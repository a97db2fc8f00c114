"""`ng_validate`: can the servers of this configuration be started? Starts nothing, contacts nothing."""

from typing import TYPE_CHECKING, Any

from nemo_gym.cli.command import command, whole_config
from nemo_gym.schemas.cli_config import ValidateConfig

if TYPE_CHECKING:
    from nemo_gym.errors import ConfigError


def _server_problems(*read: Any) -> "list[ConfigError]":
    from nemo_gym.launch.server_checks import server_problems  # a help page needs nothing of it

    return server_problems(*read)


@command(
    ValidateConfig,
    needs_model=False,
    offline=True,
    starts_servers=True,
    takes_over=False,
    further_checks=_server_problems,
)
def main(config: ValidateConfig) -> None:
    """Check a configuration and everything it refers to, without starting or contacting anything.

    Checked is what ng_run checks before it starts servers, what each server checks in its own settings, and whether
    declared data sets are there or can be obtained. Every problem is listed at once, with file and key; exit code 2.
    What can show only at a start is not: free ports, requirements that must be installed first, endpoints. A server
    whose module cannot be imported here is named in a warning. A configuration that names no model of its own is
    checked with a stand-in.

    Examples:
        ng_validate "+config_paths=[my_servers.yaml,my_model.yaml]"
    """
    from nemo_gym.config.instances import find_instances
    from nemo_gym.launch.server_checks import STAND_IN

    instances = find_instances(whole_config())[0]
    print("Config is valid.")
    if all(instance.implementation == STAND_IN for instance in instances):
        print("It configures no server, so there is nothing to start.")
        return
    column = max(len(instance.name) for instance in instances) + 2
    for instance in instances:
        note = " (stand-in: no model is configured)" if instance.implementation == STAND_IN else ""
        print(f"  {instance.name:<{column}}{instance.SERVER_TYPE}/{instance.implementation}{note}")
