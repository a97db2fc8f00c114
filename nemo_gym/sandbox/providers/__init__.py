"""Where sandboxes come from: what a provider must offer, the registry, and one folder for each that is built in."""

from nemo_gym.sandbox.providers.registry import create_provider

__all__ = ["create_provider"]
