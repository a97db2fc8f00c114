"""Weights & Biases: one run per collection, with the metrics and, if wanted, every rollout.

It cannot hold up a run for ever: opening and closing have an end.
"""

import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig

from nemo_gym.config_types import WANDBConfig
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import get_wandb_run
from nemo_gym.trackers.base import ROLLOUT_COLUMN, TRACKERS, TrackedRun, TrackerRun, opened

logger = logging.getLogger(__name__)

ROLLOUTS_TABLE = "Rollouts"
_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 600.0
_WHERE_KEYS_ARE = (
    " (or pass +wandb_api_key=<key> or set WANDB_API_KEY; with WANDB_MODE=offline W&B writes files and needs no key)"
)


class WandbRun(TrackerRun):
    """An open run; logging to it never raises."""

    title = TRACKERS["wandb"].title

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def active(cls) -> "WandbRun | None":
        """The run that is open in this process, whoever opened it."""
        run = get_wandb_run()
        return None if run is None else cls(run)

    @classmethod
    def open(cls, settings: WANDBConfig, run: TrackedRun) -> "WandbRun":
        """Open a run; its files go below the folder of results.

        Without a key in `settings`, W&B takes that of `WANDB_API_KEY` or of `wandb login`; offline it needs none.

        Raises:
            ConfigError: W&B refuses to open a run, because it finds no key for instance.
        """
        logger.info("Opening the Weights & Biases run %s/%s", settings.wandb_project, settings.wandb_name)
        run.folder.mkdir(parents=True, exist_ok=True)
        with _process_without_terminal(run.command):
            import wandb

            given = {"api_key": settings.wandb_api_key} if settings.wandb_api_key else {}
            try:
                made = wandb.init(
                    project=settings.wandb_project,
                    name=settings.wandb_name,
                    dir=run.folder,
                    config=dict(run.config),
                    settings=wandb.Settings(**given, console="off", silent=True, **_timeouts()),
                )
            except wandb.errors.UsageError as error:
                raise ConfigError(f"{error}{'' if given else _WHERE_KEYS_ARE}") from error
        return cls(made)

    def _log_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        self._run.log(dict(values), **({} if step is None else {"step": step}))

    def _log_rollouts(self, lines: Iterable[bytes]) -> None:
        import wandb

        table = wandb.Table(columns=[ROLLOUT_COLUMN], data=[[line.decode()] for line in lines])
        self._run.log({ROLLOUTS_TABLE: table})

    def _finish(self, *, failed: bool) -> None:
        self._run.finish()


def active_run() -> WandbRun | None:
    """The run that is open in this process, whoever opened it."""
    return WandbRun.active()


@contextmanager
def wandb_run(config: DictConfig, command: Sequence[str] = ()) -> Iterator[TrackerRun | None]:
    """The W&B run that `config` asks for, open while inside; None when it asks for none or it cannot be opened.

    A run that is open in this process already is used instead, and left open. For W&B alone; `tracking` opens all
    trackers that are configured.
    """
    active = active_run()
    if active is not None:
        yield active
        return
    with opened("wandb", config, command) as run:
        yield run


@contextmanager
def _process_without_terminal(arguments: Sequence[str]) -> Iterator[None]:
    """Give W&B a command line to record, and no terminal on which it would ask for a key and wait.

    It takes both from `sys` and offers no other way.
    """
    before = sys.argv, sys.stdin
    sys.argv, sys.stdin = list(arguments) or sys.argv[:1], io.StringIO()
    try:
        yield
    finally:
        sys.argv, sys.stdin = before


def _timeouts() -> dict[str, Any]:
    """What W&B would wait for longer, or for ever, unless its own environment variables say so."""
    bounds = {"init_timeout": _INIT_TIMEOUT_S, "finish_timeout": _FINISH_TIMEOUT_S, "finish_timeout_raises": True}
    return {name: value for name, value in bounds.items() if f"WANDB_{name.upper()}" not in os.environ}
