"""`ng_list_environments`: which environments there are."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import ListConfig


@command(ListConfig, reads_config=False)
def main(config: ListConfig) -> None:
    """List the environments of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    Tasks are the rows of their data sets; needs are what an environment wants beside a model.

    Examples:
        ng_list_environments
        ng_list_environments +query=math
        ng_list_environments +json=true
    """
    from nemo_gym.cli.gallery import environments, print_list

    print_list("environments", environments, config, lambda each: f"+environment={each.name}")
