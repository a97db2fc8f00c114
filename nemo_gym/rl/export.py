"""PUBLIC: collected rollouts as SFT, DPO and chat data sets; the work is done in `nemo_gym.rollouts.export`."""

from nemo_gym.rollouts.export import ExportSummary, export_rollouts
from nemo_gym.schemas.export_config import ExportConfig

__all__ = ["ExportConfig", "ExportSummary", "export_rollouts"]
