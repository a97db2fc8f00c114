"""Every test here starts in an empty folder, without settings from outside, and sees what is logged."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.keys import MAX_ROLLOUT_ATTEMPTS_ENV_VAR_NAME, NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME
from nemo_gym.log import LOGGER_NAME


@pytest.fixture(autouse=True)
def _clean_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME, raising=False)
    monkeypatch.delenv(MAX_ROLLOUT_ATTEMPTS_ENV_VAR_NAME, raising=False)
    logger = logging.getLogger(LOGGER_NAME)
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)
