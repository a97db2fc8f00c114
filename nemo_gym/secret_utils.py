"""PUBLIC: masking secrets."""

from omegaconf import DictConfig

from nemo_gym.config.secrets import mask_secrets

__all__ = ["recursively_hide_secrets"]


def recursively_hide_secrets(dict_config: DictConfig) -> None:
    """Mask every secret of a config, in place."""
    mask_secrets(dict_config)
