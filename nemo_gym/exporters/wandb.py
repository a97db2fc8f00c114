"""PUBLIC: Weights & Biases by the names of the original; `nemo_gym.trackers.wandb` does the work."""

from nemo_gym.exporters.base import TrackerExporter
from nemo_gym.trackers.base import ROLLOUT_COLUMN
from nemo_gym.trackers.wandb import ROLLOUTS_TABLE, WandbRun, active_run, wandb_run

__all__ = ["ROLLOUTS_TABLE", "ROLLOUT_COLUMN", "WandbExporter", "WandbRun", "active_run", "wandb_run"]


class WandbExporter(TrackerExporter):
    """A W&B run, with its files in `<results_dir>/wandb`."""

    name = "wandb"
