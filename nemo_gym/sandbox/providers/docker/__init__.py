"""Sandboxes that are Docker containers, by way of the `docker` command."""
