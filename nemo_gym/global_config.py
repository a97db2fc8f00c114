"""PUBLIC: one OmegaConf config is a process's single source of truth; this is how it comes about.

Precedence, low to high: config files < env.yaml < `initial_global_config_dict` < command line.
Nothing here reads argv: a command passes what it was given as `command_line`.
"""

import os
from pathlib import Path
from typing import Any, ClassVar, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel, ConfigDict

from nemo_gym.config import ports
from nemo_gym.config.checks import broken_interpolations, missing_values, unknown_options
from nemo_gym.config.defaults import fill_defaults
from nemo_gym.config.directives import apply_directives
from nemo_gym.config.handover import config_from_environment
from nemo_gym.config.instances import almost_server_problems, dangling_refs, find_instances, merge_dummy_model
from nemo_gym.config.overrides import CommandLine, apply_changes
from nemo_gym.config.secrets import mask_secrets
from nemo_gym.config.sources import (
    ConfigFiles,
    check_instance_conflicts,
    config_paths_in,
    load_config_files,
    load_env_file,
)
from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    AGENTS_TYPE,
    ALLOW_UNKNOWN_KEYS_KEY_NAME,
    CONFIG_PATHS_KEY_NAME,
    DEFAULT_HEAD_SERVER_PORT,
    DEFAULT_HOST_KEY_NAME,
    DISALLOWED_PORTS_KEY_NAME,
    DRY_RUN_KEY_NAME,
    ENTRYPOINT_KEY_NAME,
    HEAD_SERVER_DEPS_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    HF_TOKEN_KEY_NAME,
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    NEMO_GYM_LOG_DIR_KEY_NAME,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    PIP_INSTALL_VERBOSE_KEY_NAME,
    POLICY_API_KEY_KEY_NAME,
    POLICY_BASE_URL_KEY_NAME,
    POLICY_MODEL_KEY_NAME,
    POLICY_MODEL_NAME_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
    PYTHON_VERSION_KEY_NAME,
    RAY_HEAD_NODE_ADDRESS_KEY_NAME,
    RESPONSE_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    SKIP_VERIFICATION_KEY_NAME,
    SKIP_VERIFICATION_REWARD_KEY_NAME,
    TASK_INDEX_KEY_NAME,
    USE_ABSOLUTE_IP_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_PIP_SET_PYTHON_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
)
from nemo_gym.schemas.server_config import ServerInstanceConfig

__all__ = [
    "AGENT_REF_KEY_NAME",
    "CONFIG_PATHS_KEY_NAME",
    "DEFAULT_HEAD_SERVER_PORT",
    "DEFAULT_HOST_KEY_NAME",
    "DISALLOWED_PORTS_KEY_NAME",
    "DRY_RUN_KEY_NAME",
    "ENTRYPOINT_KEY_NAME",
    "HEAD_SERVER_DEPS_KEY_NAME",
    "HEAD_SERVER_KEY_NAME",
    "HF_TOKEN_KEY_NAME",
    "NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME",
    "NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME",
    "NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME",
    "NEMO_GYM_LOG_DIR_KEY_NAME",
    "NEMO_GYM_RESERVED_TOP_LEVEL_KEYS",
    "PIP_INSTALL_VERBOSE_KEY_NAME",
    "POLICY_API_KEY_KEY_NAME",
    "POLICY_BASE_URL_KEY_NAME",
    "POLICY_MODEL_KEY_NAME",
    "POLICY_MODEL_NAME_KEY_NAME",
    "PORT_RANGE_HIGH_KEY_NAME",
    "PORT_RANGE_LOW_KEY_NAME",
    "PYTHON_VERSION_KEY_NAME",
    "RAY_HEAD_NODE_ADDRESS_KEY_NAME",
    "RESPONSES_CREATE_PARAMS_KEY_NAME",
    "RESPONSE_KEY_NAME",
    "ROLLOUT_INDEX_KEY_NAME",
    "SKIP_VENV_IF_PRESENT_KEY_NAME",
    "TASK_INDEX_KEY_NAME",
    "USE_ABSOLUTE_IP_KEY_NAME",
    "UV_CACHE_DIR_KEY_NAME",
    "UV_PIP_SET_PYTHON_KEY_NAME",
    "UV_VENV_DIR_KEY_NAME",
    "DictConfig",
    "GlobalConfigDictParser",
    "GlobalConfigDictParserConfig",
    "OmegaConf",
    "find_config_problems",
    "find_open_port",
    "get_first_server_config_dict",
    "get_global_config_dict",
    "get_hf_token",
    "maybe_get_global_config_dict",
    "set_global_config_dict",
]


class GlobalConfigDictParserConfig(BaseModel):
    """What a configuration is read from."""

    model_config = ConfigDict(arbitrary_types_allowed=True, use_attribute_docstrings=True)

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
            POLICY_MODEL_KEY_NAME: {"responses_api_models": {"dummy_model": {"entrypoint": "app.py"}}},
        }
    )
    """Base for commands that need no model, so that configs which refer to one still resolve."""


class GlobalConfigDictParser:
    """Turns the sources of a configuration into one complete, checked config."""

    def parse(self, parser_config: GlobalConfigDictParserConfig | None = None) -> DictConfig:
        """The complete config, or one error naming everything that is wrong with it."""
        settings = parser_config or GlobalConfigDictParserConfig()
        config, problems = self.read(settings)
        if problems:
            raise _combined(problems)
        if settings.hide_secrets:
            self._recursively_hide_secrets(config)
        return config

    def parse_no_environment(self, initial_global_config_dict: DictConfig | None = None) -> DictConfig:
        """The config of a program alone: no command line, no env file."""
        return self.parse(
            GlobalConfigDictParserConfig(
                initial_global_config_dict=initial_global_config_dict,
                skip_load_from_cli=True,
                skip_load_from_dotenv=True,
            )
        )

    def read(self, settings: GlobalConfigDictParserConfig) -> tuple[DictConfig, list[ConfigError]]:
        """The config as far as it can be made out, and everything that is wrong with it."""
        command_line = CommandLine() if settings.skip_load_from_cli else settings.command_line or CommandLine()
        try:
            env = OmegaConf.create({}) if settings.skip_load_from_dotenv else load_env_file(settings.dotenv_path)
            initial = settings.initial_global_config_dict or OmegaConf.create({})
            files = load_config_files(_config_paths(env, initial, command_line))
            if files.problems:
                return OmegaConf.create({}), files.problems
            merged = _merge(files, env, initial, command_line)
            problems = check_instance_conflicts(files.files)
            if not merged.get(ALLOW_UNKNOWN_KEYS_KEY_NAME) and settings.command_line is not None:
                defined = {
                    str(key) for source in (env, initial, *(file.config for file in files.files)) for key in source
                }
                tree = OmegaConf.to_container(merged, resolve=False)
                problems += unknown_options(
                    command_line.changes, cast("dict[str, Any]", tree), command_line.known_options | defined
                )
            config, unresolved = self._resolve(merged)
            problems += unresolved or self._complete(config, offline=settings.offline)
        except ConfigError as error:
            return OmegaConf.create({}), [error]
        return config, problems

    def _resolve(self, merged: DictConfig) -> tuple[DictConfig, list[ConfigError]]:
        tree = apply_directives(cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=False)))
        merge_dummy_model(tree)
        config = OmegaConf.create(tree)
        missing = missing_values(tree)
        return config, missing or broken_interpolations(config)

    def _complete(self, config: DictConfig, *, offline: bool) -> list[ConfigError]:
        instances, almost = find_instances(config)
        problems = [
            *almost_server_problems(almost, config),
            *dangling_refs(instances),
            *ports.duplicate_ports(config, instances),
        ]
        if problems:
            return problems
        fill_defaults(config)
        ports.assign_addresses(config, instances, _find_open_port_using_range, offline=offline)
        _hand_down_skip_verification(config, instances)
        return []

    def filter_for_server_instance_configs(self, global_config_dict: DictConfig) -> list[ServerInstanceConfig]:
        """The server instances of a config, in its order."""
        return find_instances(global_config_dict)[0]

    def _recursively_hide_secrets(self, dict_config: DictConfig) -> None:
        with open_dict(dict_config):
            mask_secrets(dict_config)


def _config_paths(env: DictConfig, initial: DictConfig, command_line: CommandLine) -> list[str]:
    chosen = OmegaConf.create({})
    for source in (env, initial):
        if source.get(CONFIG_PATHS_KEY_NAME) is not None:
            chosen[CONFIG_PATHS_KEY_NAME] = source[CONFIG_PATHS_KEY_NAME]
    apply_changes(chosen, (change for change in command_line.changes if change.top_level_key == CONFIG_PATHS_KEY_NAME))
    return config_paths_in(chosen, "the command line or env.yaml")


def _merge(files: ConfigFiles, env: DictConfig, initial: DictConfig, command_line: CommandLine) -> DictConfig:
    merged = cast(DictConfig, OmegaConf.merge(*(file.config for file in files.files), env, initial))
    OmegaConf.set_struct(merged, None)
    OmegaConf.set_readonly(merged, None)
    apply_changes(merged, command_line.changes)
    if files.given:
        merged[CONFIG_PATHS_KEY_NAME] = files.given
    return merged


def _hand_down_skip_verification(config: DictConfig, instances: list[ServerInstanceConfig]) -> None:
    for key in (SKIP_VERIFICATION_KEY_NAME, SKIP_VERIFICATION_REWARD_KEY_NAME):
        for instance in instances:
            block = instance.get_inner_run_server_config_dict()
            if key in config and instance.SERVER_TYPE == AGENTS_TYPE and key not in block:
                block[key] = config[key]


def _combined(problems: list[ConfigError]) -> ConfigError:
    """All problems as one error of the first one's type."""
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1))
    return type(problems[0])(f"{len(problems)} problems in the configuration:\n{listed}")


def find_config_problems(parser_config: GlobalConfigDictParserConfig) -> list[ConfigError]:
    """Everything that is wrong with a configuration, raising nothing."""
    return GlobalConfigDictParser().read(parser_config)[1]


_GLOBAL_CONFIG_DICT: DictConfig | None = None


def get_global_config_dict(
    global_config_dict_parser_config: GlobalConfigDictParserConfig | None = None,
    global_config_dict_parser_cls: type[GlobalConfigDictParser] = GlobalConfigDictParser,
) -> DictConfig:
    """This process's config: the one already known, else what a launcher handed over, else parsed now."""
    known = maybe_get_global_config_dict()
    if known is not None:
        return known
    return set_global_config_dict(global_config_dict_parser_config, global_config_dict_parser_cls)


def maybe_get_global_config_dict() -> DictConfig | None:
    """This process's config if it is already known or was handed over by a launcher."""
    global _GLOBAL_CONFIG_DICT  # noqa: PLW0603
    if _GLOBAL_CONFIG_DICT is None:
        _GLOBAL_CONFIG_DICT = config_from_environment(os.environ)
    return _GLOBAL_CONFIG_DICT


def set_global_config_dict(
    global_config_dict_parser_config: GlobalConfigDictParserConfig | None = None,
    global_config_dict_parser_cls: type[GlobalConfigDictParser] = GlobalConfigDictParser,
) -> DictConfig:
    """Parse, and make the result this process's config."""
    global _GLOBAL_CONFIG_DICT  # noqa: PLW0603
    _GLOBAL_CONFIG_DICT = global_config_dict_parser_cls().parse(global_config_dict_parser_config)
    return _GLOBAL_CONFIG_DICT


def get_first_server_config_dict(global_config_dict: DictConfig, top_level_path: str) -> DictConfig:
    """The innermost block of a server instance: the first value's first value."""
    implementations = next(iter(global_config_dict[top_level_path].values()))
    return cast(DictConfig, next(iter(implementations.values())))


def get_hf_token() -> str | None:
    """The hub's access token, if one is configured."""
    return cast("str | None", get_global_config_dict().get(HF_TOKEN_KEY_NAME))


def _find_open_port_using_range(
    disallowed_ports: list[int], port_range_low: int, port_range_high: int, max_retries: int = 50
) -> int:
    return ports.find_open_port(disallowed_ports, port_range_low, port_range_high, max_retries)


def find_open_port(disallowed_ports: list[int] | None = None, max_retries: int = 50) -> int:
    """A free port in the range this process's config allows."""
    config = get_global_config_dict()
    low = config.get(PORT_RANGE_LOW_KEY_NAME, ports.DEFAULT_PORT_RANGE[0])
    high = config.get(PORT_RANGE_HIGH_KEY_NAME, ports.DEFAULT_PORT_RANGE[1])
    return _find_open_port_using_range(disallowed_ports or [], low, high, max_retries)
