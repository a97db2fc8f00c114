"""How a configuration reaches the processes a command starts.

It travels in a file only its owner can read, named by an environment variable: nothing is
limited in size and nothing secret stands on a command line or in an environment. Launchers
other than ours may put the whole config into `NEMO_GYM_CONFIG_DICT`; that is always accepted.
"""

import atexit
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.secrets import holds_secret
from nemo_gym.config.sources import load_yaml
from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
)

INLINE_LIMIT_BYTES = 64 * 1024


def write_config_file(config: DictConfig) -> Path:
    """Write `config`, interpolations unresolved, to a 0600 file that is removed when this process exits."""
    descriptor, name = tempfile.mkstemp(prefix="nemo_gym_config_", suffix=".yaml")  # mkstemp creates it 0600
    path = Path(name)
    atexit.register(path.unlink, missing_ok=True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(OmegaConf.to_yaml(config))
    return path


def child_environment(
    config: DictConfig, config_file: Path, instance_name: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """`environment` with what a child needs to know its config and which server it is."""
    child = dict(environment)
    child[NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME] = str(config_file)
    child[NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = instance_name
    child.pop(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, None)
    text = OmegaConf.to_yaml(config)
    if len(text.encode()) < INLINE_LIMIT_BYTES and not holds_secret(config):
        child[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = text
    return child


def config_from_environment(environment: Mapping[str, str]) -> DictConfig | None:
    """The config a launcher handed to this process, or None when there was no launcher."""
    if text := environment.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME):
        config = OmegaConf.create(text)
        if not isinstance(config, DictConfig):
            raise ConfigError(f"{NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME} must hold a YAML or JSON mapping")
        return config
    if name := environment.get(NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME):
        return load_yaml(Path(name))
    return None
