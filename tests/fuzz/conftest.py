"""How bad the input is, and how much of it there is.

The ordinary suite makes up few inputs, always the same ones. More, and others:

    pytest tests/fuzz --fuzz-examples 500 --fuzz-seed 7
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
from hypothesis import HealthCheck, settings

from nemo_gym import global_config
from nemo_gym.cli.command import Command
from nemo_gym.log import LOGGER_NAME

FEW = 20
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test of this folder the amount and the seed that were asked for."""
    examples, seed = config.getoption("--fuzz-examples"), config.getoption("--fuzz-seed")
    chosen = settings(
        max_examples=examples or FEW,
        derandomize=seed is None,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    here = [item for item in items if isinstance(item, pytest.Function) and item.path.is_relative_to(FOLDER)]
    for function in {item.obj for item in here if hypothesis.is_hypothesis_test(item.obj)}:
        chosen(function)
        if seed is not None:
            hypothesis.seed(seed)(function)


class Done(NamedTuple):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run a command in this process, in a folder of its own; what is not a user's mistake is raised."""
    monkeypatch.chdir(tmp_path)
    for name in ("NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_FILE", "NEMO_GYM_EXTRA_ROOTS"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger(LOGGER_NAME)
    handlers, level = list(logger.handlers), logger.level

    def run_command(command: Command, *arguments: str) -> Done:  # type: ignore[type-arg]
        global_config._GLOBAL_CONFIG_DICT = None
        out, err = io.StringIO(), io.StringIO()
        exit_code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command.run(list(arguments))
            except SystemExit as ended:
                exit_code = int(ended.code or 0)
        return Done(exit_code, out.getvalue(), err.getvalue())

    yield run_command
    global_config._GLOBAL_CONFIG_DICT = None
    logger.handlers[:], logger.level = handlers, level
