"""Weights & Biases: one run per collection, with the metrics and, if wanted, every rollout.

A tracker that fails is reported and never stops a run: the results are on disk. It cannot hold one up for
ever either: opening and closing its run have an end.
"""

import copy
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.secrets import mask_secrets
from nemo_gym.config_types import WANDBConfig
from nemo_gym.global_config import get_wandb_run
from nemo_gym.keys import RESULTS_DIR_KEY_NAME
from nemo_gym.paths import RESULTS_DIR

logger = logging.getLogger(__name__)

ROLLOUTS_TABLE = "Rollouts"
ROLLOUT_COLUMN = "Rollout"
_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 600.0


class WandbRun:
    """An open run; logging to it never raises."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: Mapping[str, Any]) -> None:
        """Log flat values."""
        self._try("the metrics", lambda: self._run.log(dict(values)))

    def log_rollouts(self, lines: Iterable[bytes]) -> None:
        """Log every rollout, one line of JSON each, as a table."""

        def upload() -> None:
            import wandb

            table = wandb.Table(columns=[ROLLOUT_COLUMN], data=[[line.decode()] for line in lines])
            self._run.log({ROLLOUTS_TABLE: table})

        logger.info("Uploading the rollouts to Weights & Biases")
        self._try("the rollouts", upload)

    def finish(self) -> None:
        """Send what is left and close the run."""
        self._try("the end of the run", self._run.finish)

    def _try(self, what: str, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything; the results are on disk
            logger.warning("Weights & Biases did not take %s: %s", what, _first_line(error))


def active_run() -> WandbRun | None:
    """The run that is open in this process, whoever opened it."""
    run = get_wandb_run()
    return None if run is None else WandbRun(run)


@contextmanager
def wandb_run(config: DictConfig, command: Sequence[str] = ()) -> Iterator[WandbRun | None]:
    """The run that `config` asks for, open while inside; None when it asks for none or it cannot be opened.

    `command` is what is recorded as the command line; the real one may hold secrets. A run that this process opened
    before is used instead, and left open.
    """
    active = active_run()
    if active is not None:
        yield active
        return
    with _command_line(command):
        run = _open(config)
    try:
        yield run
    finally:
        if run is not None:
            run.finish()


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """W&B takes the command line from `sys.argv` and offers no other way."""
    before = sys.argv
    sys.argv = list(arguments) or before[:1]
    try:
        yield
    finally:
        sys.argv = before


def _open(config: DictConfig) -> WandbRun | None:
    settings = WANDBConfig.model_validate({key: config.get(key) for key in WANDBConfig.model_fields})
    if not settings.is_available:
        return None
    masked = copy.deepcopy(config)
    mask_secrets(masked)
    shown: Any = OmegaConf.to_container(masked, resolve=False)
    folder = Path(config.get(RESULTS_DIR_KEY_NAME) or RESULTS_DIR)
    logger.info("Opening the Weights & Biases run %s/%s", settings.wandb_project, settings.wandb_name)
    try:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_name,
            dir=folder,
            config=shown,
            settings=wandb.Settings(api_key=settings.wandb_api_key, console="off", silent=True, **_timeouts()),
        )
    except Exception as error:  # noqa: BLE001 - as above
        logger.warning(
            "Weights & Biases is configured but no run could be opened, so nothing is uploaded: %s", _first_line(error)
        )
        return None
    return WandbRun(run)


def _timeouts() -> dict[str, Any]:
    """What W&B would wait for longer, or for ever, unless its own environment variables say so."""
    bounds = {"init_timeout": _INIT_TIMEOUT_S, "finish_timeout": _FINISH_TIMEOUT_S, "finish_timeout_raises": True}
    return {name: value for name, value in bounds.items() if f"WANDB_{name.upper()}" not in os.environ}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
