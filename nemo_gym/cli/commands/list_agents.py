"""`ng_list_agents`: which agents there are."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import ListConfig


@command(ListConfig, reads_config=False)
def main(config: ListConfig) -> None:
    """List the agents of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    Environments usually bring an agent of their own; these are for those that you put together yourself.

    Examples:
        ng_list_agents
        ng_list_agents +query=tool
        ng_list_agents +json=true
    """
    from nemo_gym.cli.gallery import agents, print_list

    print_list("agents", agents, config, lambda each: f"+config_paths=[{each.config_path}]")
