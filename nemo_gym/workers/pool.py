"""The server's side: a bounded number of worker processes that are killed when they get stuck.

Processes are started when they are first needed and used again for every later request. One that does
not answer in time is killed, and the next request gets a new one. One that dies is replaced once for
the same request; if that dies, too, there is no answer.
"""

import asyncio
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from nemo_gym.errors import GymError
from nemo_gym.workers.loop import READY

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
_TRIES = 2
_CPU_GRACE_S = 5.0


class WorkerError(GymError, RuntimeError):
    """Workers gave no answer."""


class WorkerStartError(WorkerError):
    """A worker cannot be started."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker took too long and was killed."""


class WorkerPool:
    """Has requests answered in at most `max_workers` processes that run `program`, each within `timeout_s`."""

    def __init__(self, name: str, program: Path, max_workers: int, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix=name)
        self._workers = _Workers(name, program)
        weakref.finalize(self, _Workers.close, self._workers)  # also when the interpreter ends

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of a worker.

        Raises:
            WorkerTimeoutError: it took too long.
            WorkerError: the workers died over this request, cannot be started, or are closed.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ask, request)

    def open(self) -> None:
        """Allow work again after `close`."""
        self._workers.is_open = True

    def close(self) -> None:
        """End all processes; what they were working on fails."""
        self._workers.close()

    @property
    def pids(self) -> set[int]:
        """The processes there are."""
        return self._workers.pids

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        line = json.dumps({**request, "cpu_limit_s": self._timeout_s + _CPU_GRACE_S}).encode() + b"\n"
        for _ in range(_TRIES):
            worker = self._workers.take()
            try:
                answer = worker.ask(line, self._timeout_s)
            except TimeoutError as error:
                self._workers.discard(worker)
                raise WorkerTimeoutError(
                    f"a {self._name} process took longer than {self._timeout_s:g} s and was killed"
                ) from error
            except (OSError, EOFError) as error:
                self._workers.discard(worker)
                logger.warning("a %s process died at its work (%s): %r", self._name, worker.last_words(), error)
                continue
            self._workers.give_back(worker)
            answered: dict[str, Any] = json.loads(answer)
            return answered
        raise WorkerError(f"{_TRIES} {self._name} processes died over one request")


class _Workers:
    """The processes that exist, and those that have nothing to do."""

    def __init__(self, name: str, program: Path) -> None:
        self.is_open = True
        self._name = name
        self._program = program
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()
        self._idle: list[_Worker] = []

    @property
    def pids(self) -> set[int]:
        with self._lock:
            return {worker.pid for worker in self._all}

    def take(self) -> "_Worker":
        """An idle process, else a new one."""
        with self._lock:
            if not self.is_open:
                raise WorkerError("the server is stopping")
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self._program)
            self._all.add(worker)
        try:
            worker.wait_until_ready(self._name)
        except BaseException:
            self.discard(worker)
            raise
        return worker

    def give_back(self, worker: "_Worker") -> None:
        with self._lock:
            if worker in self._all:
                self._idle.append(worker)

    def discard(self, worker: "_Worker") -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()
        worker.close_pipes()

    def close(self) -> None:
        with self._lock:
            self.is_open = False
            workers, idle = self._all, self._idle
            self._all, self._idle = set(), []
        for worker in workers:
            worker.kill()
        for worker in idle:  # the pipes of the others belong to the threads that read from them
            worker.close_pipes()


class _Worker:
    """One process, used by one thread at a time."""

    def __init__(self, program: Path) -> None:
        self._program = program
        command = [sys.executable, "-P", str(program)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, name: str) -> None:
        try:
            line = self._read_line(START_TIMEOUT_S)
        except (TimeoutError, OSError, EOFError) as error:
            raise WorkerStartError(
                f"a {name} process cannot be started ({self.last_words()}): {error!r}. The log says why"
            ) from error
        if line != READY.encode():
            raise WorkerStartError(f"{self._program.name} should begin with {READY!r}, it began with {line[:100]!r}")

    def ask(self, request: bytes, timeout_s: float) -> bytes:
        self._requests.write(request)
        self._requests.flush()
        return self._read_line(timeout_s)

    def kill(self) -> None:
        """End the process and wait for its end, so that no zombie stays."""
        self._process.kill()
        self._process.wait()

    def close_pipes(self) -> None:
        self._answers.close()
        with contextlib.suppress(OSError):  # for what was not sent yet
            self._requests.close()

    def last_words(self) -> str:
        return f"exit code {self._process.poll()}"

    def _read_line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        read = b""
        while not read.endswith(b"\n"):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            chunk = os.read(self._answers.fileno(), 65_536)
            if not chunk:
                raise EOFError("the process has ended")
            read += chunk
        return read[:-1]
