"""Talking to servers: by configured name, over HTTP or in memory; everything public is in `nemo_gym.server_utils`."""
