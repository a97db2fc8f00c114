"""How a configuration reaches the processes a command starts.

It travels in a file only its owner can read, named by an environment variable: nothing is
limited in size and nothing secret stands on a command line or in an environment. Launchers
other than ours may put the whole config into `NEMO_GYM_CONFIG_DICT`; that is always accepted.
"""

import atexit
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.interpolations import to_config
from nemo_gym.config.secrets import holds_secret
from nemo_gym.config.yaml_text import load_yaml, parse_yaml
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
    atexit.register(_remove, path, os.getpid())
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(OmegaConf.to_yaml(config))
    return path


def _remove(path: Path, owner: int) -> None:
    """Remove the file in the process that wrote it: a fork inherits its exit handlers too."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def child_environment(
    config: DictConfig, config_file: Path, instance_name: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """`environment` with what a child needs to know its config and which server it is.

    `config_file` is what `write_config_file` made of `config`.
    """
    child = dict(environment)
    child[NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME] = str(config_file)
    child[NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = instance_name
    child.pop(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, None)
    if config_file.stat().st_size < INLINE_LIMIT_BYTES and not holds_secret(config):
        child[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = config_file.read_text(encoding="utf-8")
    return child


def config_from_environment(environment: Mapping[str, str]) -> DictConfig | None:
    """The config a launcher handed to this process, taken as it is; None when there was no launcher."""
    if text := environment.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME):
        return to_config(_parse(text))
    if name := environment.get(NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME):
        try:
            return to_config(load_yaml(Path(name)))
        except ConfigError as error:
            raise ConfigError(
                f"{error} (named by {NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME}, which the launcher of this process sets; "
                "unset it to start afresh)"
            ) from error
    return None


def _parse(text: str) -> dict[str, Any]:
    """Some JSON is no YAML (tabs, surrogate pairs), so JSON is tried first."""
    if text.lstrip().startswith("{"):
        try:
            loaded = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            pass
        else:
            return dict(loaded)
    return parse_yaml(text, NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME)
