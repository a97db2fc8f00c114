"""Sandboxes that are confined processes of this machine, without any other program."""
