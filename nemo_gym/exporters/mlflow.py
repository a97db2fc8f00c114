"""PUBLIC: MLflow by the names of the original; `nemo_gym.trackers.mlflow` does the work."""

from nemo_gym.exporters.base import TrackerExporter

__all__ = ["MLflowExporter"]


class MLflowExporter(TrackerExporter):
    """An MLflow run."""

    name = "mlflow"
