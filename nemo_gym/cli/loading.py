"""From a command's arguments to the configuration it runs with.

OmegaConf and Hydra's grammar are imported here only when there is something to parse.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from nemo_gym.cli.arguments import check_arguments
from nemo_gym.cli.registry import known_options, text_options
from nemo_gym.keys import (
    CONFIG_PATHS_KEY_NAME,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    VERBOSE_KEY_NAME,
    WELL_KNOWN_KEYS,
)
from nemo_gym.log import setup_logging

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_gym.cli.command import Loading
    from nemo_gym.config.overrides import CommandLine
    from nemo_gym.global_config import GlobalConfigDictParserConfig

logger = logging.getLogger(__name__)


def load_config(arguments: Sequence[str], config_class: type[BaseModel], loading: "Loading") -> Mapping[str, Any]:
    """The configuration for these arguments."""
    if not arguments and not loading.reads_config:
        return {}
    command_line = read_command_line(arguments, config_class)
    setup_logging(verbose=any(change.key == VERBOSE_KEY_NAME and change.value for change in command_line.changes))
    if loading.parse is not None:
        return loading.parse(_parser_config(command_line, loading))
    if loading.reads_config:
        handed_over = _config_from_launcher(command_line)
        if handed_over is not None:
            return handed_over
    from nemo_gym.global_config import set_global_config_dict

    return set_global_config_dict(_parser_config(command_line, loading))


def read_command_line(arguments: Sequence[str], config_class: type[BaseModel]) -> "CommandLine":
    """The changes that `arguments` ask for, and the options that are known."""
    known = known_options(config_class)
    check_arguments(arguments, known | WELL_KNOWN_KEYS | set(NEMO_GYM_RESERVED_TOP_LEVEL_KEYS))

    from nemo_gym.config.overrides import CommandLine, parse_overrides

    return CommandLine(parse_overrides(arguments, text_options(config_class)), known)


def config_of_this_process() -> Mapping[str, Any] | None:
    """The configuration this process already has, if any."""
    module = sys.modules.get("nemo_gym.global_config")
    config: Mapping[str, Any] | None = getattr(module, "_GLOBAL_CONFIG_DICT", None)
    return config


def _parser_config(command_line: "CommandLine", loading: "Loading") -> "GlobalConfigDictParserConfig":
    from omegaconf import DictConfig, OmegaConf

    from nemo_gym.global_config import GlobalConfigDictParserConfig

    bases = [] if loading.needs_model else [GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT]
    initial = OmegaConf.merge(*bases, dict(loading.initial or {}))
    assert isinstance(initial, DictConfig)
    return GlobalConfigDictParserConfig(
        command_line=command_line,
        initial_global_config_dict=initial,
        offline=loading.offline or not loading.reads_config,
        skip_load_from_dotenv=not loading.reads_config,
    )


def _config_from_launcher(command_line: "CommandLine") -> "DictConfig | None":
    """What a launcher handed over, taken as it is, with the command line on top.

    Naming config files on the command line asks for another configuration: the launcher's is then left aside.
    """
    from nemo_gym.config.handover import config_from_environment

    config = config_from_environment(os.environ)
    if config is None:
        return None
    if any(change.top_level_key == CONFIG_PATHS_KEY_NAME for change in command_line.changes):
        logger.warning("config_paths is given, so the configuration in this process's environment is not used")
        return None
    from nemo_gym.global_config import get_global_config_dict

    config = get_global_config_dict()
    _apply(command_line, config)
    return config


def _apply(command_line: "CommandLine", config: "DictConfig") -> None:
    from omegaconf import OmegaConf

    from nemo_gym.config.checks import unknown_options
    from nemo_gym.config.overrides import apply_changes
    from nemo_gym.errors import ConfigError
    from nemo_gym.keys import ALLOW_UNKNOWN_KEYS_KEY_NAME

    known = command_line.known_options | {str(key) for key in config}
    apply_changes(config, command_line.changes)
    tree: Any = OmegaConf.to_container(config, resolve=False)
    problems = [] if tree.get(ALLOW_UNKNOWN_KEYS_KEY_NAME) else unknown_options(command_line.changes, tree, known)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
