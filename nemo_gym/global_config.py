"""PUBLIC: one OmegaConf config is a process's single source of truth; this is how it comes about.

Precedence, low to high: config files < env.yaml < `initial_global_config_dict` < command line.
Nothing here reads argv: a command passes what it was given as `command_line`.
"""

import os
import sys
import threading
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config import ports
from nemo_gym.config.auth import auth_token_problems
from nemo_gym.config.checks import missing_values
from nemo_gym.config.conflicts import conflicting_definitions
from nemo_gym.config.defaults import fill_defaults
from nemo_gym.config.directives import apply_directives
from nemo_gym.config.files import ConfigFile
from nemo_gym.config.handover import config_from_environment
from nemo_gym.config.instances import (
    almost_server_problems,
    copy_aliases,
    dangling_refs,
    find_instances,
    merge_dummy_model,
)
from nemo_gym.config.interpolations import Resolved, resolve, to_config
from nemo_gym.config.ports import address_problems, assign_addresses
from nemo_gym.config.secrets import mask_message, mask_secrets
from nemo_gym.config.settings import GlobalConfigDictParserConfig
from nemo_gym.config.sources import read_sources
from nemo_gym.config.trees import Tree
from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    AGENTS_TYPE,
    ATTEMPT_INDEX_KEY_NAME,
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
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    SKILLS_REF_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    SKIP_VERIFICATION_KEY_NAME,
    SKIP_VERIFICATION_REWARD_KEY_NAME,
    TASK_INDEX_KEY_NAME,
    USE_ABSOLUTE_IP_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_PIP_SET_PYTHON_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
)
from nemo_gym.schemas.server_config import ServerInstanceConfig, server_types_in

__all__ = [
    "AGENT_REF_KEY_NAME",
    "ATTEMPT_INDEX_KEY_NAME",
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
    "ROLLOUT_ID_KEY_NAME",
    "ROLLOUT_INDEX_KEY_NAME",
    "SKILLS_REF_KEY_NAME",
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
    "get_wandb_run",
    "maybe_get_global_config_dict",
    "set_global_config_dict",
]


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
        """The config as far as it can be made out, and everything that is wrong with it, quoting no secret."""
        merged: Tree = {}
        try:
            sources = read_sources(settings)
            if sources.problems:
                return OmegaConf.create({}), sources.problems
            merged = sources.merged()
            problems = sources.unknown_options(merged)
            copy_aliases(merged)
            tree = apply_directives(merged)
            merge_dummy_model(tree)
            config = to_config(tree)
            resolved = resolve(config, tree)
            problems += [*missing_values(tree), *resolved.problems]
            instances, unfit = self._find_instances(config, resolved, sources.files)
            problems += [*unfit, *address_problems(resolved.tree, instances), *auth_token_problems(resolved.tree)]
            if not problems:
                fill_defaults(config)
                assign_addresses(config, instances, _find_open_port_using_range, offline=settings.offline)
                _hand_down_skip_verification(config, instances)
        except ConfigError as error:
            config, problems = OmegaConf.create({}), [error]
        for problem in problems:
            problem.args = (mask_message(str(problem), merged),)
        return config, problems

    def _find_instances(
        self, config: DictConfig, resolved: Resolved, files: list[ConfigFile]
    ) -> tuple[list[ServerInstanceConfig], list[ConfigError]]:
        conflicts = conflicting_definitions(files, resolved.tree)
        uncertain = {*resolved.unsettled, *conflicts}
        instances, almost = find_instances(config, resolved.tree, skip=uncertain, warn=True)
        problems = [*conflicts.values(), *almost_server_problems(almost, resolved.tree)]
        reported = uncertain | (almost.keys() if problems else set())
        may_exist = {(server_type, name) for name in reported for server_type in server_types_in(resolved.tree[name])}
        return instances, problems + dangling_refs(instances, resolved.tree, may_exist)

    def filter_for_server_instance_configs(self, global_config_dict: DictConfig) -> list[ServerInstanceConfig]:
        """The server instances of a config, in its order."""
        return find_instances(global_config_dict)[0]

    def _recursively_hide_secrets(self, dict_config: DictConfig) -> None:
        mask_secrets(dict_config)


def _hand_down_skip_verification(config: DictConfig, instances: list[ServerInstanceConfig]) -> None:
    for key in (SKIP_VERIFICATION_KEY_NAME, SKIP_VERIFICATION_REWARD_KEY_NAME):
        if config.get(key) is None:
            continue
        for instance in instances:
            block = instance.get_inner_run_server_config_dict()
            if instance.SERVER_TYPE == AGENTS_TYPE and key not in block:
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
_ONE_AT_A_TIME = threading.RLock()


def get_global_config_dict(
    global_config_dict_parser_config: GlobalConfigDictParserConfig | None = None,
    global_config_dict_parser_cls: type[GlobalConfigDictParser] = GlobalConfigDictParser,
) -> DictConfig:
    """This process's config: the one already known, else what a launcher handed over, else parsed now."""
    with _ONE_AT_A_TIME:
        known = maybe_get_global_config_dict()
        if known is not None:
            return known
        return set_global_config_dict(global_config_dict_parser_config, global_config_dict_parser_cls)


def maybe_get_global_config_dict() -> DictConfig | None:
    """This process's config if it is already known or was handed over by a launcher."""
    global _GLOBAL_CONFIG_DICT  # noqa: PLW0603
    with _ONE_AT_A_TIME:
        if _GLOBAL_CONFIG_DICT is None:
            _GLOBAL_CONFIG_DICT = config_from_environment(os.environ)
        return _GLOBAL_CONFIG_DICT


def set_global_config_dict(
    global_config_dict_parser_config: GlobalConfigDictParserConfig | None = None,
    global_config_dict_parser_cls: type[GlobalConfigDictParser] = GlobalConfigDictParser,
) -> DictConfig:
    """Parse, and make the result this process's config."""
    global _GLOBAL_CONFIG_DICT  # noqa: PLW0603
    with _ONE_AT_A_TIME:
        _GLOBAL_CONFIG_DICT = global_config_dict_parser_cls().parse(global_config_dict_parser_config)
        return _GLOBAL_CONFIG_DICT


def get_first_server_config_dict(global_config_dict: DictConfig, top_level_path: str) -> DictConfig:
    """The innermost block of a server instance; of any other block, the first value's first value."""
    block = global_config_dict[top_level_path]
    server_type, *_ = server_types_in(block) or block
    return cast(DictConfig, next(iter(block[server_type].values())))


def get_hf_token() -> str | None:
    """The hub's access token, if one is configured."""
    return cast("str | None", get_global_config_dict().get(HF_TOKEN_KEY_NAME))


def get_wandb_run() -> Any:
    """This process's W&B run; None when there is none, which includes that W&B was never imported."""
    return getattr(sys.modules.get("wandb"), "run", None)


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
