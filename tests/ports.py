"""Ports for programs that a test starts later."""

import os
import random
import socket

_FIRST, _LAST, _WORKERS = 21_000, 32_000, 8
_given: set[int] = set()


def free_port() -> int:
    """One that nobody listens on, and that neither the system nor another test is given in the meantime."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    own = set(range(_FIRST + worker, _LAST, _WORKERS))
    if len(own - _given) < len(own) / 2:
        _given.clear()  # those of long ago
    for port in random.SystemRandom().sample(sorted(own - _given), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise AssertionError("no port is free")
