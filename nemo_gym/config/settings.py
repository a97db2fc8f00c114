"""What a program or a command wants its configuration read from."""

from pathlib import Path
from typing import ClassVar

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict

from nemo_gym.config.overrides import CommandLine
from nemo_gym.keys import (
    MODELS_TYPE,
    POLICY_API_KEY_KEY_NAME,
    POLICY_BASE_URL_KEY_NAME,
    POLICY_MODEL_KEY_NAME,
    POLICY_MODEL_NAME_KEY_NAME,
)


class GlobalConfigDictParserConfig(BaseModel):
    """What a configuration is read from."""

    model_config = ConfigDict(arbitrary_types_allowed=True, defer_build=True)

    dotenv_path: Path | None = None
    """Read this instead of looking for env.yaml."""
    initial_global_config_dict: DictConfig | None = None
    """Base given by a program; the command line overrides it."""
    skip_load_from_cli: bool = False
    """Ignore `command_line`."""
    skip_load_from_dotenv: bool = False
    """Read no env file."""
    hide_secrets: bool = False
    """Mask secrets in the result."""
    offline: bool = False
    """Probe no port and look up no host name: for commands that only look."""
    command_line: CommandLine | None = None
    """What the command was given; None for programs."""

    NO_MODEL_GLOBAL_CONFIG_DICT: ClassVar[DictConfig] = OmegaConf.create(
        {
            POLICY_BASE_URL_KEY_NAME: "",
            POLICY_API_KEY_KEY_NAME: "",
            POLICY_MODEL_NAME_KEY_NAME: "",
            POLICY_MODEL_KEY_NAME: {MODELS_TYPE: {"dummy_model": {"entrypoint": "app.py"}}},
        }
    )
    """Base for commands that need no model, so that configs which refer to one still resolve."""
