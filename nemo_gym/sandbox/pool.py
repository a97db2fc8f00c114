"""The server's side: a bounded number of isolated processes, and calls to them that do not block the event loop."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nemo_gym.errors import ConfigError
from nemo_gym.sandbox.confine import LAYERS
from nemo_gym.sandbox.process import IsolatedProcess, SandboxError, Work

_Result = TypeVar("_Result")


class SandboxUnavailableError(ConfigError, RuntimeError):
    """This system does not offer enough to isolate a process."""


class _Processes:
    """Those that are running, and those of them that are free."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: list[IsolatedProcess] = []
        self.all: set[IsolatedProcess] = set()
        self.is_closed = False

    def close(self) -> None:
        """Close those that are free; kill the others, which their users then close."""
        with self.lock:
            self.is_closed = True
            free, self.free = self.free, []
            busy = self.all.difference(free)
        for process in busy:
            process.kill()
        for process in free:
            self.discard(process)

    def add(self, process: IsolatedProcess) -> None:
        with self.lock:
            if self.is_closed:
                raise SandboxError("the server is shutting down")
            self.all.add(process)

    def give_back(self, process: IsolatedProcess) -> None:
        with self.lock:
            is_usable = process.is_clean and not self.is_closed
            if is_usable:
                self.free.append(process)
        if not is_usable:
            self.discard(process)

    def discard(self, process: IsolatedProcess) -> None:
        with self.lock:
            self.all.discard(process)
        process.close()


class IsolatedPool:
    """Up to `size` isolated processes that are started when needed and used again.

    It belongs to no event loop, and ends its processes when it is closed or forgotten.
    """

    def __init__(self, work: Work, size: int, *, require_isolation: bool, layers: Sequence[str] = LAYERS) -> None:
        self._work = work
        self._require_isolation = require_isolation
        self._layers = layers
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="isolated")
        self._processes = _Processes()
        weakref.finalize(self, self._processes.close)

    async def run(self, job: Callable[[IsolatedProcess], _Result]) -> _Result:
        """Do `job` with a process of its own, in a thread, as soon as one is free.

        Raises:
            SandboxError: the process failed.
            SandboxUnavailableError: a process cannot be isolated as required.
        """
        return await asyncio.wrap_future(self._executor.submit(self._with_process, job))

    def start(self) -> IsolatedProcess:
        """Start a process ahead of its first use, and see what isolates it.

        Raises:
            SandboxUnavailableError: it cannot be isolated as required.
        """
        return self._with_process(lambda process: process)

    def start_in_background(self) -> None:
        """Start a process ahead of its first use; whatever goes wrong shows when it is used."""
        self._executor.submit(self.start)

    def close(self) -> None:
        """End all processes; work in progress fails."""
        self._processes.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _with_process(self, job: Callable[[IsolatedProcess], _Result]) -> _Result:
        process = self._take()
        try:
            result = job(process)
        except BaseException:
            self._processes.discard(process)
            raise
        self._processes.give_back(process)
        return result

    def _take(self) -> IsolatedProcess:
        with self._processes.lock:
            if self._processes.free:
                return self._processes.free.pop()
        process = IsolatedProcess()
        try:
            self._processes.add(process)
            process.isolate(self._work, self._layers)
            self._check(process)
        except BaseException:
            self._processes.discard(process)
            raise
        return process

    def _check(self, process: IsolatedProcess) -> None:
        if self._require_isolation and not process.holds:
            problems = "; ".join(f"{layer}: {why}" for layer, why in process.problems.items())
            raise SandboxUnavailableError(
                f"a process cannot be isolated here ({problems or 'no layer of isolation was asked for'}). It takes "
                "seccomp and either Landlock (Linux 5.13 and newer) or unprivileged user namespaces"
            )
