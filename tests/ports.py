"""Ports for programs that a test starts later."""

import random
import socket


def free_port() -> int:
    """One that nobody listens on, and that the system gives to no connection in the meantime."""
    for port in random.sample(range(21_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
