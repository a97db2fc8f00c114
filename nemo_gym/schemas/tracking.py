"""Settings of experiment trackers."""

from pydantic import BaseModel, ConfigDict

from nemo_gym.keys import MASK


class WANDBConfig(BaseModel):
    """Weights & Biases: a run is opened only when all three are set."""

    model_config = ConfigDict(defer_build=True)

    wandb_project: str | None = None
    wandb_name: str | None = None
    wandb_api_key: str | None = None

    @property
    def is_available(self) -> bool:
        """Whether a run can be opened; a masked key is no key."""
        return bool(self.wandb_project and self.wandb_name and self.wandb_api_key) and self.wandb_api_key != MASK
