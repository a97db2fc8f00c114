"""Ports for programs that a test starts later."""

import contextlib
import os
import random
import socket

_FIRST, _LAST, _WORKERS = 21_000, 32_000, 8
_BETWEEN = 992
"""How many there are before these which runs do not choose by themselves."""
_given: set[int] = set()


def free_range(count: int) -> int:
    """The first of so many in a row, up to 60, that nobody has and no other test is given."""
    own = _BETWEEN // _WORKERS
    first = _FIRST - _BETWEEN + _worker() * own
    for low in random.SystemRandom().sample(range(first, first + own - count), 20):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(low, low + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return low
    raise AssertionError("no row of ports is free")


def _worker() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS


def free_port() -> int:
    """One that nobody listens on, and that neither the system nor another test is given in the meantime."""
    own = set(range(_FIRST + _worker(), _LAST, _WORKERS))
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
