"""A pool of processes that compare answers with math-verify and can be killed when one gets stuck.

Processes are started when they are first needed and used again for every later answer. One that does
not answer in time is killed, and the next answer gets a new one. One that dies is replaced once for
the same answer; if that dies, too, there is no verdict, and the rollout fails rather than score 0.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

from nemo_gym.errors import GymError
from resources_servers.math_with_judge.library_worker import READY

logger = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("library_worker.py")
START_TIMEOUT_S = 120.0
_TRIES = 2
_CPU_GRACE_S = 5.0


class LibraryVerifierError(GymError, RuntimeError):
    """math-verify gave no verdict, for reasons that are not the answer's."""


class LibraryVerdict(NamedTuple):
    """What math-verify says about an answer."""

    reward: float
    extracted_answer: str | None
    timed_out: bool = False
    """It took too long, and therefore counts as not equal."""


class LibraryPool:
    """Compares answers in at most `max_workers` processes, each answer within `timeout_s`."""

    def __init__(self, max_workers: int, timeout_s: float, program: Path = WORKER) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="math-verify")
        self._workers = _Workers(program)
        weakref.finalize(self, _Workers.close, self._workers)  # also when the interpreter ends

    async def grade(self, expected: str, generated: str) -> LibraryVerdict:
        """Compare `expected`, a formula, with the answer in the text `generated`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._grade, expected, generated)

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

    def _grade(self, expected: str, generated: str) -> LibraryVerdict:
        cpu_limit_s = self._timeout_s + _CPU_GRACE_S
        request = {"expected": expected, "generated": generated, "cpu_limit_s": cpu_limit_s}
        for _ in range(_TRIES):
            worker = self._workers.take()
            try:
                answer = worker.ask(json.dumps(request).encode() + b"\n", self._timeout_s)
            except TimeoutError:
                self._workers.discard(worker)
                return LibraryVerdict(0.0, None, timed_out=True)
            except (OSError, EOFError) as error:
                self._workers.discard(worker)
                logger.warning("a math-verify process died at its work (%s): %r", worker.last_words(), error)
                continue
            self._workers.give_back(worker)
            return LibraryVerdict(**json.loads(answer))
        raise LibraryVerifierError(f"{_TRIES} math-verify processes died over one answer: {generated[-200:]!r}")


class _Workers:
    """The processes that exist, and those that have nothing to do."""

    def __init__(self, program: Path) -> None:
        self.is_open = True
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
                raise LibraryVerifierError("the server is stopping")
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self._program)
            self._all.add(worker)
        try:
            worker.wait_until_ready()
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
        command = [sys.executable, "-P", str(program)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        try:
            line = self._read_line(START_TIMEOUT_S)
        except (TimeoutError, OSError, EOFError) as error:
            raise LibraryVerifierError(
                f"math-verify could not be loaded ({self.last_words()}): {error!r}. The log says why; "
                f"`{sys.executable} -m pip install math-verify` installs it"
            ) from error
        if line != READY.encode():
            raise LibraryVerifierError(f"{WORKER.name} should begin with {READY!r}, it began with {line[:100]!r}")

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
