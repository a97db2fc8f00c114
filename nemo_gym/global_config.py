"""PUBLIC: one OmegaConf config is a process's single source of truth; this is how it comes about.

Precedence, low to high: config files < env.yaml < `initial_global_config_dict` < command line.
Nothing here reads argv: a command passes what it was given as `command_line`.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from nemo_gym.config import hosts
from nemo_gym.config.checks import (
    RaisingChecks,
    conflicting_definitions,
    missing_values,
    unknown_options,
    warn_of_differing_definitions,
)
from nemo_gym.config.files import ConfigFile, ConfigFiles, config_paths_in, load_config_files, load_env_file
from nemo_gym.config.handover import config_from_environment
from nemo_gym.config.hosts import address_problems, allowed_hosts_problems, assign_addresses
from nemo_gym.config.instances import (
    almost_server_problems,
    almost_server_warning,
    are_almost_servers_errors,
    blocks_not_started,
    copy_aliases,
    dangling_refs,
    fill_defaults,
    find_instances,
    hand_down_recording,
    hand_down_skip_verification,
    merge_dummy_model,
    misnamed_types,
    truth_value,
)
from nemo_gym.config.overrides import CommandLine, apply_changes, change_tree, parse_overrides
from nemo_gym.config.references import Resolved, apply_directives, plain_tree, resolve, to_config
from nemo_gym.config.secrets import auth_token_problems, mask_message, mask_secrets
from nemo_gym.config.trees import Tree, merge_trees
from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    ALLOW_OPENAI_VERSION_SKEW_KEY_NAME,
    ALLOW_UNKNOWN_KEYS_KEY_NAME,
    ATTEMPT_INDEX_KEY_NAME,
    CACHE_DIR_KEY_NAME,
    COMPONENT_NAME_KEY_NAME,
    CONFIG_PATHS_KEY_NAME,
    COPY_KEY_NAME,
    DEFAULT_HEAD_SERVER_PORT,
    DEFAULT_HOST_KEY_NAME,
    DELETE_KEY_KEY_NAME,
    DISALLOWED_PORTS_KEY_NAME,
    DRY_RUN_KEY_NAME,
    ENTRYPOINT_KEY_NAME,
    HEAD_SERVER_DEPS_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    HF_TOKEN_KEY_NAME,
    INHERIT_FROM_KEY_NAME,
    JSON_OUTPUT_KEY_NAME,
    MODEL_CALL_CAPTURE_DIR_KEY_NAME,
    MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME,
    MODELS_TYPE,
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    NEMO_GYM_LOG_DIR_KEY_NAME,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    OBSERVABILITY_ENABLED_KEY_NAME,
    PIP_INSTALL_VERBOSE_KEY_NAME,
    POLICY_API_KEY_KEY_NAME,
    POLICY_BASE_URL_KEY_NAME,
    POLICY_MODEL_KEY_NAME,
    POLICY_MODEL_NAME_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
    PYTHON_VERSION_KEY_NAME,
    QUERY_KEY_NAME,
    RAY_HEAD_NODE_ADDRESS_KEY_NAME,
    RESPONSE_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    RESULTS_DIR_KEY_NAME,
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    SERVER_TYPES,
    SKILLS_REF_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    TASK_INDEX_KEY_NAME,
    TOKEN_ID_CAPTURE_BLOCK,
    USE_ABSOLUTE_IP_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_PIP_SET_PYTHON_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
    UVICORN_TIMEOUT_WORKER_HEALTHCHECK,
    VERBOSE_KEY_NAME,
    WELL_KNOWN_TEXT_KEYS,
)
from nemo_gym.process_inputs import command_line, inherited_environment
from nemo_gym.schemas.server_config import ServerInstanceConfig, server_types_in

logger = logging.getLogger(__name__)

USE_ABSOLUTE_IP = USE_ABSOLUTE_IP_KEY_NAME
FurtherChecks: TypeAlias = Callable[[DictConfig, list[ServerInstanceConfig], list[ConfigFile]], list[ConfigError]]
"""Gets the config as far as it could be made out, the servers that can be told, and the files that were read."""
_GLOBAL_CONFIG_DICT: DictConfig | None = None
_ONE_AT_A_TIME = threading.RLock()


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
    starts_servers: bool = True
    """Whether the configured servers will be started; only then the environment variables they need must be set."""
    command_line: CommandLine | None = None
    """What the command was given; None for programs."""
    further_checks: FurtherChecks | None = None
    """Finds more that is wrong with the servers, so that all of it can be told at once."""

    NO_MODEL_GLOBAL_CONFIG_DICT: ClassVar[DictConfig] = OmegaConf.create(
        {
            POLICY_BASE_URL_KEY_NAME: "",
            POLICY_API_KEY_KEY_NAME: "",
            POLICY_MODEL_NAME_KEY_NAME: "",
            POLICY_MODEL_KEY_NAME: {MODELS_TYPE: {"dummy_model": {"entrypoint": "app.py"}}},
        }
    )
    """Base for commands that need no model, so that configs which refer to one still resolve."""


@dataclass
class Sources:
    """The sources of one configuration, read but not yet merged."""

    config_files: ConfigFiles
    env_file: ConfigFile | None
    initial: Tree
    command_line: CommandLine

    @property
    def problems(self) -> list[ConfigError]:
        """What was wrong with reading them."""
        return self.config_files.problems

    @property
    def files(self) -> list[ConfigFile]:
        """Every YAML file, lowest precedence first."""
        return self.config_files.files + ([self.env_file] if self.env_file else [])

    def merged(self) -> Tree:
        """All sources in one; `config_paths` names every file that was read."""
        warn_of_differing_definitions(self.config_files.files)
        tree = merge_trees([*(file.tree for file in self.files), self.initial])
        change_tree(tree, self.command_line.changes)
        if self.config_files.given:
            tree[CONFIG_PATHS_KEY_NAME] = self.config_files.given
        return tree

    def unknown_options(self, merged: Mapping[str, Any]) -> list[ConfigError]:
        """One error per option on the command line that nothing reads."""
        if truth_value(merged, ALLOW_UNKNOWN_KEYS_KEY_NAME):
            return []
        defined = {str(key) for source in (*(file.tree for file in self.files), self.initial) for key in source}
        return unknown_options(self.command_line.changes, merged, self.command_line.known_options | defined)


def read_sources(settings: GlobalConfigDictParserConfig) -> Sources:
    """Read whatever `settings` names."""
    command_line = (None if settings.skip_load_from_cli else settings.command_line) or CommandLine()
    env_file = None if settings.skip_load_from_dotenv else load_env_file(settings.dotenv_path)
    initial = plain_tree(settings.initial_global_config_dict)
    context = merge_trees([env_file.tree if env_file else {}, initial])
    where = "the config passed in" if CONFIG_PATHS_KEY_NAME in initial or not env_file else str(env_file.path)
    for change in command_line.changes:
        if change.top_level_key == CONFIG_PATHS_KEY_NAME:
            where = "the command line"
        elif change.delete:
            continue  # what is deleted may stand in a file not yet read
        change_tree(context, [change])
    files = load_config_files(config_paths_in(context, where), where, context)
    return Sources(files, env_file, initial, command_line)


__all__ = [
    "AGENT_REF_KEY_NAME",
    "ALLOW_OPENAI_VERSION_SKEW_KEY_NAME",
    "ATTEMPT_INDEX_KEY_NAME",
    "CACHE_DIR_KEY_NAME",
    "COMPONENT_NAME_KEY_NAME",
    "CONFIG_PATHS_KEY_NAME",
    "COPY_KEY_NAME",
    "DEFAULT_HEAD_SERVER_PORT",
    "DEFAULT_HOST_KEY_NAME",
    "DELETE_KEY_KEY_NAME",
    "DISALLOWED_PORTS_KEY_NAME",
    "DRY_RUN_KEY_NAME",
    "ENTRYPOINT_KEY_NAME",
    "HEAD_SERVER_DEPS_KEY_NAME",
    "HEAD_SERVER_KEY_NAME",
    "HF_TOKEN_KEY_NAME",
    "INHERIT_FROM_KEY_NAME",
    "JSON_OUTPUT_KEY_NAME",
    "MODEL_CALL_CAPTURE_DIR_KEY_NAME",
    "MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME",
    "NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME",
    "NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME",
    "NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME",
    "NEMO_GYM_LOG_DIR_KEY_NAME",
    "NEMO_GYM_RESERVED_TOP_LEVEL_KEYS",
    "OBSERVABILITY_ENABLED_KEY_NAME",
    "PIP_INSTALL_VERBOSE_KEY_NAME",
    "POLICY_API_KEY_KEY_NAME",
    "POLICY_BASE_URL_KEY_NAME",
    "POLICY_MODEL_KEY_NAME",
    "POLICY_MODEL_NAME_KEY_NAME",
    "PORT_RANGE_HIGH_KEY_NAME",
    "PORT_RANGE_LOW_KEY_NAME",
    "PYTHON_VERSION_KEY_NAME",
    "QUERY_KEY_NAME",
    "RAY_HEAD_NODE_ADDRESS_KEY_NAME",
    "RESPONSES_CREATE_PARAMS_KEY_NAME",
    "RESPONSE_KEY_NAME",
    "RESULTS_DIR_KEY_NAME",
    "ROLLOUT_ID_KEY_NAME",
    "ROLLOUT_INDEX_KEY_NAME",
    "SKILLS_REF_KEY_NAME",
    "SKIP_VENV_IF_PRESENT_KEY_NAME",
    "TASK_INDEX_KEY_NAME",
    "TOKEN_ID_CAPTURE_BLOCK",
    "USE_ABSOLUTE_IP",
    "USE_ABSOLUTE_IP_KEY_NAME",
    "UVICORN_TIMEOUT_WORKER_HEALTHCHECK",
    "UV_CACHE_DIR_KEY_NAME",
    "UV_PIP_SET_PYTHON_KEY_NAME",
    "UV_VENV_DIR_KEY_NAME",
    "VERBOSE_KEY_NAME",
    "DictConfig",
    "GlobalConfigDictParser",
    "GlobalConfigDictParserConfig",
    "OmegaConf",
    "find_config_problems",
    "find_open_port",
    "format_almost_server_warning",
    "get_first_server_config_dict",
    "get_global_config_dict",
    "get_hf_token",
    "get_wandb_run",
    "maybe_get_global_config_dict",
    "set_global_config_dict",
]


class GlobalConfigDictParser(RaisingChecks):
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
            unused = blocks_not_started(tree, starts_servers=settings.starts_servers)
            resolved = resolve(config, tree, unused=unused)
            problems += [*missing_values(tree), *resolved.problems]
            instances, unfit = self._find_instances(config, resolved, sources.files, warn=not problems)
            problems += [*unfit, *address_problems(resolved.tree, instances), *auth_token_problems(resolved.tree)]
            problems += allowed_hosts_problems(resolved.tree)
            if not problems:
                fill_defaults(config)
                assign_addresses(config, instances, _find_open_port_using_range, offline=settings.offline)
                hand_down_skip_verification(config, instances)
                problems += hand_down_recording(config, instances, looks_for_folders=not settings.offline)
            if settings.further_checks is not None:
                problems += settings.further_checks(config, instances, sources.files)
        except ConfigError as error:
            config, problems = OmegaConf.create({}), [error]
        for problem in problems:
            problem.args = (mask_message(str(problem), merged),)
        return config, problems

    def _find_instances(
        self, config: DictConfig, resolved: Resolved, files: list[ConfigFile], *, warn: bool
    ) -> tuple[list[ServerInstanceConfig], list[ConfigError]]:
        conflicts = conflicting_definitions(files, resolved.tree)
        uncertain = {*resolved.unsettled, *conflicts}
        instances, almost = find_instances(config, resolved.tree, skip=uncertain, warn=warn)
        misnamed = misnamed_types(resolved.tree, files) if are_almost_servers_errors(resolved.tree) else {}
        problems = [*conflicts.values(), *misnamed.values(), *almost_server_problems(almost, resolved.tree)]
        reported = uncertain | (almost.keys() if problems else set())
        may_exist = {(server_type, name) for name in reported for server_type in server_types_in(resolved.tree[name])}
        may_exist |= {(server_type, name) for name in misnamed for server_type in SERVER_TYPES}
        return instances, problems + dangling_refs(instances, resolved.tree, may_exist)

    def filter_for_server_instance_configs(self, global_config_dict: DictConfig) -> list[ServerInstanceConfig]:
        """The server instances of a config, in its order."""
        return find_instances(global_config_dict)[0]

    def parse_global_config_dict_from_cli(self) -> DictConfig:
        """What this process's `+key=value` arguments say; a call for help (`--help`) is passed over."""
        arguments = [argument for argument in command_line()[1:] if argument not in ("-h", "--help")]
        config = OmegaConf.create({})
        apply_changes(config, parse_overrides(arguments, WELL_KNOWN_TEXT_KEYS))
        return config

    def load_extra_config_paths(self, config_paths: list[str]) -> tuple[list[str], list[DictConfig]]:
        """The listed files and all they include: every path, and what the files say, in the order they are merged."""
        found = load_config_files(config_paths)
        if found.problems:
            raise _combined(found.problems)
        return found.given, [OmegaConf.create(file.tree) for file in found.files]

    def validate_and_populate_defaults(
        self,
        server_instance_configs: list[ServerInstanceConfig],
        default_host: str,
        port_range_low: int,
        port_range_high: int,
        initial_disallowed_ports: list[int] | None = None,
        skip_verification: bool | None = None,
        skip_verification_reward: float | None = None,
        probe_ports: bool = True,
    ) -> list[int]:
        """Check references among the servers and give each the host and port it lacks; every port not to be taken.

        Agents that say nothing of verification are given what is said here. Without probing, a server that has no
        port gets none.

        Raises:
            ServerRefNotFoundError: a server refers to one that is not there.
        """
        blocks = ((item.name, item.server_type_config_dict) for item in server_instance_configs)
        resolved = {name: OmegaConf.to_container(block, resolve=True) for name, block in blocks}
        dangling = dangling_refs(server_instance_configs, resolved)
        if dangling:
            raise _combined(dangling)
        taken = list(initial_disallowed_ports or ())
        for instance in server_instance_configs:
            block = instance.get_inner_run_server_config_dict()
            block["host"] = block.get("host") or default_host
            if probe_ports and not block.get("port"):
                block["port"] = _find_open_port_using_range(taken, port_range_low, port_range_high)
            taken += [block["port"]] if block.get("port") else []
        said = {"skip_verification": skip_verification, "skip_verification_reward": skip_verification_reward}
        hand_down_skip_verification(OmegaConf.create(said), server_instance_configs)
        return taken

    def detect_and_report_almost_servers(self, global_config_dict: DictConfig) -> list[tuple[str, ValidationError]]:
        """The blocks that were surely meant to be servers and are none, each with the reason, which is also logged."""
        almost = find_instances(global_config_dict)[1]
        for name, error in almost.items():
            logger.warning("%s", format_almost_server_warning(name, error))
        return list(almost.items())

    def _recursively_hide_secrets(self, dict_config: DictConfig) -> None:
        mask_secrets(dict_config)


def format_almost_server_warning(server_name: str, error: ValidationError) -> str:
    """Why a block that looks like a server is none, a line for each thing to correct."""
    return almost_server_warning(server_name, error)


def _combined(problems: list[ConfigError]) -> ConfigError:
    """All problems as one error of the first one's type."""
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1))
    return type(problems[0])(f"{len(problems)} problems in the configuration:\n{listed}")


def find_config_problems(parser_config: GlobalConfigDictParserConfig) -> list[ConfigError]:
    """Everything that is wrong with a configuration, raising nothing."""
    return GlobalConfigDictParser().read(parser_config)[1]


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
            _GLOBAL_CONFIG_DICT = config_from_environment(inherited_environment())
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


@contextmanager
def another_global_config_dict() -> Iterator[None]:
    """Whatever becomes this process's config inside: afterwards it is what it was."""
    global _GLOBAL_CONFIG_DICT  # noqa: PLW0603
    before = _GLOBAL_CONFIG_DICT
    try:
        yield
    finally:
        _GLOBAL_CONFIG_DICT = before


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
    return hosts.find_open_port(disallowed_ports, port_range_low, port_range_high, max_retries)


def find_open_port(disallowed_ports: list[int] | None = None, max_retries: int = 50) -> int:
    """A free port in the range this process's config allows."""
    config = get_global_config_dict()
    low = config.get(PORT_RANGE_LOW_KEY_NAME, hosts.DEFAULT_PORT_RANGE[0])
    high = config.get(PORT_RANGE_HIGH_KEY_NAME, hosts.DEFAULT_PORT_RANGE[1])
    return _find_open_port_using_range(disallowed_ports or [], low, high, max_retries)
