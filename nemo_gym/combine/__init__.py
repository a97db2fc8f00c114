"""Shards into one run: rollout files that were collected separately become one, with one metrics file."""
