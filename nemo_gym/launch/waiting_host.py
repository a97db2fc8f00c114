"""A host process that is started before anybody knows what it will serve, and loads its libraries meanwhile.

A command that starts servers takes half a second to read its configuration, and a host as long to load FastAPI and what
servers are made of. On two cores both can be done at once: the console script starts a host that waits, the launcher
tells it what it is to be, and a command that ends without needing it ends it. It reads its orders from a pipe, whose
other end only the launcher has, so it never outlives that.

Loaded before anything else, this module imports next to nothing.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from nemo_gym.paths import OWN_PACKAGE_FIRST
from nemo_gym.process_inputs import inherited_environment

_KILL_TIMEOUT_S = 5.0


class WaitingHost:
    """A process that becomes a host when it is told which."""

    def __init__(self) -> None:
        """Start it, in a group of its own."""
        orders, self._orders = os.pipe()
        self.events, events = os.pipe()
        """Where it will tell how its servers fare."""
        self._events_there = events
        environment = inherited_environment()
        found_first = [str(OWN_PACKAGE_FIRST), environment.get("PYTHONPATH")]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, found_first)), "PYTHONUNBUFFERED": "1"}
        program = [sys.executable, "-P", "-m", "nemo_gym.servers.host", "--orders-fd", str(orders)]
        try:
            self._process = subprocess.Popen(
                program,
                env=environment,
                pass_fds=(orders, events),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(orders)
            os.close(events)

    @property
    def is_there(self) -> bool:
        """Whether it still waits; one that has ended, for whatever reason, is put away."""
        if self._process.poll() is None:
            return True
        self.end()
        return False

    def become(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """The process, which now does what a host with these arguments does."""
        given = ["--events-fd", str(self._events_there), *arguments]
        orders = json.dumps({"arguments": given, "environment": dict(environment)}).encode()
        threading.Thread(target=self._tell, args=(orders,), name="orders of the host", daemon=True).start()
        return self._process

    def _tell(self, orders: bytes) -> None:
        """In a thread: a pipe takes so much, and the process reads when it has loaded everything."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._orders, "wb") as stream:
            stream.write(orders)

    def end(self) -> None:
        """It is not needed."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._orders)
        os.close(self.events)


_STARTED: ContextVar[list[WaitingHost] | None] = ContextVar("nemo_gym_waiting_host", default=None)
"""Of the command that runs; empty once it is taken."""


def start() -> None:
    """Start one for the command that runs; where that cannot be done, hosts are started when they are needed."""
    with contextlib.suppress(OSError):
        _STARTED.set([WaitingHost()])
        atexit.register(end)


def take() -> WaitingHost | None:
    """The one that waits, if there is one; it is the caller's from now on."""
    started = _STARTED.get()
    return started.pop() if started else None


def end() -> None:
    """End the one that waits, if nobody took it."""
    left = take()
    if left is not None:
        left.end()
