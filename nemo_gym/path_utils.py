"""PUBLIC: names of the files beside a rollouts file."""

from pathlib import Path

from nemo_gym.runs.files import RolloutPaths

__all__ = ["failures_path_for"]


def failures_path_for(output_fpath: str | Path) -> Path:
    """The failures sidecar of a rollouts file."""
    return RolloutPaths(Path(output_fpath)).failures
