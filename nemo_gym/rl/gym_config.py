"""From a trainer's settings to the configuration of the servers it trains on."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from typing_extensions import TypedDict

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
from nemo_gym.keys import (
    HEAD_SERVER_KEY_NAME,
    POLICY_API_KEY_KEY_NAME,
    POLICY_BASE_URL_KEY_NAME,
    POLICY_MODEL_NAME_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
    RAY_HEAD_NODE_ADDRESS_KEY_NAME,
)

NAN_RUNS_KEY = "rollout_max_attempts_to_avoid_lp_nan"
_CONNECTIONS_PER_HOST = 16_384
_CONNECTIONS = 65_536


class NemoGymConfig(TypedDict, total=False):
    """Settings of a `NemoGym`."""

    model_name: str
    """Becomes `policy_model_name`."""
    base_urls: list[str]
    """Where the policy answers; becomes `policy_base_url`."""
    initial_global_config_dict: Any
    """Everything else that `ng_run` would be told: `config_paths`, server blocks, settings."""
    head_server: dict[str, Any]
    """`host` and `port` of the head server of a run to attach to; nothing is started then. Of the settings above,
    those of the HTTP client and `auth_token` still count."""
    port_range_low: int
    port_range_high: int
    invalid_tool_call_patterns: list[str] | None
    thinking_tags: list[str] | None
    rollout_max_attempts_to_avoid_lp_nan: int
    """How often a row may be run until its log-probs are numbers; 1 when unset."""


def head_server_of(cfg: NemoGymConfig) -> BaseServerConfig | None:
    """The head server to attach to; None when servers are to be started."""
    head = cfg.get("head_server")
    return None if head is None else BaseServerConfig(host=head["host"], port=head["port"])


def adopt_settings(cfg: NemoGymConfig) -> None:
    """Make what the trainer gave the config of this process, if it has none: clients look there for the run's token."""
    get_global_config_dict(_parser_config(OmegaConf.create(_server_settings(cfg))))


def max_nan_runs_of(cfg: NemoGymConfig) -> int:
    """How often a row with NaN log-probs is run; also read from among the settings of the servers."""
    runs: Any = cfg.get(NAN_RUNS_KEY, _initial(cfg).get(NAN_RUNS_KEY, 1))
    is_sound = isinstance(runs, int) and runs >= 1
    assert is_sound, f"{NAN_RUNS_KEY} is {runs!r}; it must be a whole number >= 1"
    count: int = runs
    return count


def parser_config_of(cfg: NemoGymConfig) -> GlobalConfigDictParserConfig:
    """What `RunHelper.start` wants: a configuration, and not to look at this process's arguments."""
    return _parser_config(global_config_of(cfg))


def global_config_of(cfg: NemoGymConfig) -> DictConfig:
    """The configuration of the servers: what the trainer gave, and the policy it trains."""
    config = _server_settings(cfg)
    for source, key in (("model_name", POLICY_MODEL_NAME_KEY_NAME), ("base_urls", POLICY_BASE_URL_KEY_NAME)):
        if source not in cfg:
            raise ConfigError(
                f"NemoGym needs {source!r} to start servers; to attach to running ones give 'head_server'"
            )
        config[key] = cfg[source]  # type: ignore[literal-required]
    config[POLICY_API_KEY_KEY_NAME] = "dummy_key"
    for key in (PORT_RANGE_LOW_KEY_NAME, PORT_RANGE_HIGH_KEY_NAME):
        if key in cfg:
            config[key] = cfg[key]  # type: ignore[literal-required]
    config.setdefault("global_aiohttp_connector_limit_per_host", _CONNECTIONS_PER_HOST)
    config.setdefault("global_aiohttp_connector_limit", _CONNECTIONS)
    config.setdefault(HEAD_SERVER_KEY_NAME, {"port": 0})
    address = _ray_address()
    if address is not None:
        config.setdefault(RAY_HEAD_NODE_ADDRESS_KEY_NAME, address)
    return OmegaConf.create(config)


def _parser_config(config: DictConfig) -> GlobalConfigDictParserConfig:
    return GlobalConfigDictParserConfig(
        dotenv_path=Path("nemo_gym_env.yaml"), initial_global_config_dict=config, skip_load_from_cli=True
    )


def _server_settings(cfg: NemoGymConfig) -> dict[str, Any]:
    return {key: value for key, value in _initial(cfg).items() if key != NAN_RUNS_KEY}


def _initial(cfg: NemoGymConfig) -> Mapping[str, Any]:
    given = cfg.get("initial_global_config_dict") or {}
    plain: Any = OmegaConf.to_container(given, resolve=False) if OmegaConf.is_config(given) else given
    return plain  # type: ignore[no-any-return]


def _ray_address() -> str | None:
    """The cluster this process belongs to, if it does; Ray is neither imported nor started to find out."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address
