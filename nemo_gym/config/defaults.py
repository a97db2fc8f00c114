"""Settings that have a value even when nobody gave one."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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


def fill_defaults(config: DictConfig) -> None:
    """Complete `config` in place; what the user set stays."""
    for key, default in {
        USE_ABSOLUTE_IP_KEY_NAME: False,
        PYTHON_VERSION_KEY_NAME: platform.python_version(),
        SKIP_VENV_IF_PRESENT_KEY_NAME: False,
        DRY_RUN_KEY_NAME: False,
        ALLOW_OPENAI_VERSION_SKEW_KEY_NAME: False,
        MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME: 600,
        RESULTS_DIR_KEY_NAME: str(RESULTS_DIR),
        CACHE_DIR_KEY_NAME: str(CACHE_DIR),
        UV_VENV_DIR_KEY_NAME: str(WORKING_DIR),
    }.items():
        config.setdefault(key, default)
    if HEAD_SERVER_DEPS_KEY_NAME not in config:
        config[HEAD_SERVER_DEPS_KEY_NAME] = _installed_pins()
    for key in (RESULTS_DIR_KEY_NAME, CACHE_DIR_KEY_NAME):
        config[key] = _absolute(key, config[key])
    config.setdefault(UV_CACHE_DIR_KEY_NAME, str(Path(config[CACHE_DIR_KEY_NAME]) / "uv"))


def _installed_pins() -> list[str]:
    """Exact versions of the packages that must agree between processes, where they are installed."""
    pins = []
    for distribution, requirement in {"ray": "ray[default]", "openai": "openai"}.items():
        try:
            pins.append(f"{requirement}=={version(distribution)}")
        except PackageNotFoundError:
            continue
    return pins


def _absolute(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{key} must be the path of a folder, not {value!r}")
    return str(Path(value).expanduser().absolute())
