"""The steps of rollout collection, each in a module of its own; `nemo_gym.rollout_collection` tells how they connect.

This package is a client: it never imports what it takes to be a server.
"""
