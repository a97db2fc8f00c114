"""Settings that have a value even when nobody gave one."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    ALLOW_OPENAI_VERSION_SKEW_KEY_NAME,
    CACHE_DIR_KEY_NAME,
    DRY_RUN_KEY_NAME,
    HEAD_SERVER_DEPS_KEY_NAME,
    MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME,
    PYTHON_VERSION_KEY_NAME,
    RESULTS_DIR_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    USE_ABSOLUTE_IP_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
)
from nemo_gym.paths import CACHE_DIR, RESULTS_DIR, WORKING_DIR

_SWITCHES = (
    USE_ABSOLUTE_IP_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    DRY_RUN_KEY_NAME,
    ALLOW_OPENAI_VERSION_SKEW_KEY_NAME,
)
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def fill_defaults(config: DictConfig) -> None:
    """Complete `config` in place; what the user set stays."""
    for key in _SWITCHES:
        config[key] = truth_value(config, key)
    for key, default in (
        (PYTHON_VERSION_KEY_NAME, sys.version.split()[0]),
        (MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME, 600),
        (UV_VENV_DIR_KEY_NAME, str(WORKING_DIR)),
    ):
        if config.get(key) is None:
            config[key] = default
    if config.get(HEAD_SERVER_DEPS_KEY_NAME) is None:
        config[HEAD_SERVER_DEPS_KEY_NAME] = _installed_pins()
    for key, folder in ((RESULTS_DIR_KEY_NAME, RESULTS_DIR), (CACHE_DIR_KEY_NAME, CACHE_DIR)):
        given = config.get(key)
        config[key] = _absolute(key, folder if given is None else given)
    if config.get(UV_CACHE_DIR_KEY_NAME) is None:
        config[UV_CACHE_DIR_KEY_NAME] = str(Path(config[CACHE_DIR_KEY_NAME]) / "uv")


def truth_value(config: Mapping[Any, Any], key: str, *, default: bool = False) -> bool:
    """A switch as a truth value: `no` and what an environment variable says would be text otherwise, hence true."""
    value = config.get(key)
    if value is None:
        return default
    known = _TRUTH.get(str(value).strip().lower())
    if known is None:
        raise ConfigError(f"{key} is {value!r}; it is either true or false")
    return known


def _installed_pins() -> list[str]:
    """Exact versions of the packages that must agree between processes, where they are installed."""
    from importlib.metadata import PackageNotFoundError, version

    pins = []
    for distribution, requirement in {"ray": "ray[default]", "openai": "openai"}.items():
        try:
            pins.append(f"{requirement}=={version(distribution)}")
        except PackageNotFoundError:
            continue
    return pins


def _absolute(key: str, value: object) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ConfigError(f"{key} is {value!r}; it takes the path of a folder")
    return str(Path(value).expanduser().absolute())
