"""Every test here starts in an empty folder, without settings from outside; what it starts is gone when it ends."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

from nemo_gym import global_config
from nemo_gym.cli.command import command_named
from nemo_gym.collect.failures import RetryPauses
from nemo_gym.http.session import use_client_settings
from nemo_gym.log import LOGGER_NAME
from nemo_gym.rollout_collection import RolloutCollectionHelper
from tests.collection.fakes import FakeRun, serve

main = command_named("collect_rollouts")


class Done(NamedTuple):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


Collect = Callable[..., Done]


@pytest.fixture(autouse=True)
def _clean_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("NEMO_GYM", "WANDB")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    logger = logging.getLogger(LOGGER_NAME)
    handlers, level = list(logger.handlers), logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.handlers[:], logger.level = handlers, level
    use_client_settings(None)


@pytest.fixture
def fake_run() -> Iterator[FakeRun]:
    """A head server with the agents `alpha` and `beta`."""
    with serve(FakeRun("alpha", "beta")) as run:
        yield run


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts that a test can wait for."""
    monkeypatch.setattr(RolloutCollectionHelper, "retry_pauses", RetryPauses(first_s=0.01, longest_s=0.02))


@pytest.fixture
def head_config(fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's config names the fake head server."""
    config = OmegaConf.create({"head_server": {"host": "127.0.0.1", "port": fake_run.port}})
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", config)


@pytest.fixture
def collect(fake_run: FakeRun, quick_retries: None, capsys: pytest.CaptureFixture[str]) -> Collect:
    """Run `ng_collect_rollouts` in this process on in.jsonl and out.jsonl, for agent `alpha` unless rows say other."""

    def run(*options: str) -> Done:
        defaults = [
            f"+head_server.port={fake_run.port}",
            "+agent_name=alpha",
            "+input_jsonl_fpath=in.jsonl",
            "+output_jsonl_fpath=out.jsonl",
        ]
        exit_code = 0
        try:
            main.run([*defaults, *options])
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
        printed = capsys.readouterr()
        return Done(exit_code, printed.out, printed.err)

    return run
