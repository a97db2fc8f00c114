"""Weights & Biases: one run per collection, with the metrics and, if wanted, every rollout.

A tracker that fails is reported and never stops a run: the results are on disk.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.secrets import mask_secrets
from nemo_gym.config_types import WANDBConfig
from nemo_gym.keys import RESULTS_DIR_KEY_NAME
from nemo_gym.paths import RESULTS_DIR

logger = logging.getLogger(__name__)

ROLLOUTS_TABLE = "Rollouts"
ROLLOUT_COLUMN = "Rollout"


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

        self._try("the rollouts", upload)

    def finish(self) -> None:
        """Send what is left and close the run."""
        self._try("the end of the run", self._run.finish)

    def _try(self, what: str, send: Any) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything; the results are on disk
            logger.warning("Weights & Biases did not take %s: %s", what, error)


@contextmanager
def wandb_run(config: DictConfig) -> Iterator[WandbRun | None]:
    """The run that `config` asks for, open while inside; None when it asks for none or it cannot be opened."""
    run = _open(config)
    try:
        yield run
    finally:
        if run is not None:
            run.finish()


def _open(config: DictConfig) -> WandbRun | None:
    settings = WANDBConfig.model_validate({key: config.get(key) for key in WANDBConfig.model_fields})
    if not settings.is_available:
        return None
    masked = copy.deepcopy(config)
    mask_secrets(masked)
    shown: Any = OmegaConf.to_container(masked, resolve=False)
    folder = Path(config.get(RESULTS_DIR_KEY_NAME) or RESULTS_DIR) / "wandb"
    try:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_name,
            dir=folder,
            config=shown,
            settings=wandb.Settings(api_key=settings.wandb_api_key, console="off", silent=True),
        )
    except Exception as error:  # noqa: BLE001 - as above
        logger.warning("Weights & Biases is configured but no run could be opened: %s", error)
        return None
    logger.info("Weights & Biases run %s/%s is open", settings.wandb_project, settings.wandb_name)
    return WandbRun(run)
