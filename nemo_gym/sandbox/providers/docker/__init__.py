"""Sandboxes that are Docker containers; `provider` holds the provider."""

from nemo_gym.sandbox.providers.docker.provider import DockerProvider

__all__ = ["DockerProvider"]
