"""PUBLIC: collected rollouts as SFT, DPO and chat data sets; the work is done in `nemo_gym.runs.export`."""

from nemo_gym.runs.export import ExportSummary, export_rollouts
from nemo_gym.schemas.cli_config import ExportConfig

__all__ = ["ExportConfig", "ExportSummary", "export_rollouts"]
