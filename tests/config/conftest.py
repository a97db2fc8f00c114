"""Every test here starts in an empty folder, without variables a launcher sets, and with log records that arrive."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[dict[str, str]], None]


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NEMO_GYM_EXTRA_ROOTS", "NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_FILE", "NEMO_GYM_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("nemo_gym")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.NOTSET)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files, given as relative path and text, below the current folder."""

    def write_files(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    return write_files
