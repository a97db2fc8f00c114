"""`ng_dump_config`: the configuration as a command would see it, safe to paste."""

from typing import Any

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import DumpConfigConfig


@command(DumpConfigConfig)
def main(config: DumpConfigConfig) -> None:
    """Print the complete configuration as YAML: merged, defaults filled in, interpolations resolved, secrets masked.

    Examples:
        ng_dump_config "+config_paths=[my_servers.yaml]"
        ng_dump_config "+config_paths=[my_servers.yaml]" +head_server.port=12000
    """
    from nemo_gym.global_config import get_global_config_dict

    print(safe_yaml(get_global_config_dict()), end="")


def safe_yaml(config: Any) -> str:
    """`config` resolved, without its secrets.

    Masked twice: first so that no `${...}` copies a secret elsewhere, then for URLs that were put together by one.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from nemo_gym.config.secrets import mask_tree
    from nemo_gym.errors import ConfigInterpolationError

    masked = OmegaConf.create(mask_tree(OmegaConf.to_container(config, resolve=False)))
    try:
        resolved = OmegaConf.to_container(masked, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigInterpolationError(f"{error.full_key or 'a value'} cannot be resolved: {reason}") from error
    return OmegaConf.to_yaml(OmegaConf.create(mask_tree(resolved)))
