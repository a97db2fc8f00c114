"""Every test here starts in an empty folder, in a process without a configuration, and leaves no logging behind."""

import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nemo_gym.global_config
from nemo_gym.keys import (
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
    NEMO_GYM_DEBUG_ENV_VAR_NAME,
    NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME,
)
from nemo_gym.log import LOGGER_NAME
from tests.programs import run_program

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", None)
    monkeypatch.chdir(tmp_path)
    for name in (
        NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
        NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
        NEMO_GYM_DEBUG_ENV_VAR_NAME,
        NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME,
        "COLUMNS",
        "NO_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger(LOGGER_NAME)
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:], logger.level = handlers, level


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run a command in the test's folder, to its end."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_program(name, *arguments, folder=tmp_path)

    return run
