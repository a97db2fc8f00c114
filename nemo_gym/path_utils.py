"""PUBLIC: names of the files beside a rollouts file."""

from pathlib import Path

from nemo_gym.runs.files import RolloutPaths

__all__ = ["aggregate_metrics_path_for", "failures_path_for", "materialized_path_for"]


def aggregate_metrics_path_for(output_fpath: str | Path) -> Path:
    """Return the path of the metrics of a rollouts file."""
    return RolloutPaths(Path(output_fpath)).aggregate_metrics


def failures_path_for(output_fpath: str | Path) -> Path:
    """The failures sidecar of a rollouts file."""
    return RolloutPaths(Path(output_fpath)).failures


def materialized_path_for(output_fpath: str | Path) -> Path:
    """Return the path of the rows that a rollouts file was made of."""
    return RolloutPaths(Path(output_fpath)).materialized_inputs
