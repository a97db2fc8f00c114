"""Sandboxes that are Apptainer instances, by way of the `apptainer` command."""
