"""Sandboxes that are Apptainer instances; `provider` holds the provider."""

from nemo_gym.sandbox.providers.apptainer.provider import ApptainerProvider

__all__ = ["ApptainerProvider"]
