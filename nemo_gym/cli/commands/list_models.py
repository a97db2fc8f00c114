"""`ng_list_models`: which models there are."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import ListConfig


@command(ListConfig, reads_config=False)
def main(config: ListConfig) -> None:
    """List the model servers of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    The last column is how one is chosen on the command line; what it needs can also stand in env.yaml.

    Examples:
        ng_list_models
        ng_list_models +query=chat
        ng_list_models +json=true
    """
    from nemo_gym.cli.gallery import models, print_list
    from nemo_gym.cli.shortcuts import shape_of

    print_list("models", models, config, lambda each: f"+model={shape_of(each.name)}")
