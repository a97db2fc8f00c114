"""The server's side: a bounded number of worker processes that are killed when they get stuck.

Processes are started when they are first needed and used again for every later request. One that uses up
its processor time is gone, and the next request gets a new one. One that dies otherwise is replaced once for
the same request; if that dies, too, there is no answer.

What counts as too long is the processor's time, not the clock's: on a machine that is busy with other things
the same request must get the same answer. The clock only ends a wait that leads nowhere, which is the
machine's failure and nobody's verdict.

Regular expressions that come with data are matched in them: a pattern such as `(a+)+b` can take longer than the
universe on a text of a hundred letters, and nothing but the end of its process stops it.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

from starlette.exceptions import HTTPException

from nemo_gym.errors import GymError
from nemo_gym.workers.loop import READY

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
_TRIES = 2
_CLOCK_FACTOR, _CLOCK_GRACE_S = 10, 60.0
"""How much slower than alone on its processor a worker may be, and how much longer it may wait to be put to work."""
PATTERN_TIMEOUT_S = 10.0
_PROCESSES = 2


class WorkerError(GymError, RuntimeError):
    """Workers gave no answer."""


class WorkerStartError(WorkerError):
    """A worker cannot be started."""


class WorkerDeathError(WorkerError):
    """Workers died over one request, each of them: it is the request that kills them."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker used up the processor time that a request may take: it is the request that takes too long."""


class WorkerStalledError(WorkerError, TimeoutError):
    """A worker gave no answer although it had processor time left: the machine is overloaded, or it was stopped."""


class WorkerPool:
    """Has requests answered in at most `max_workers` processes that run `program`.

    Each may take `cpu_limit_s` of the processor's time and, if the machine has better things to do, `clock_limit_s`.
    """

    def __init__(
        self, name: str, program: Path, max_workers: int, cpu_limit_s: float, clock_limit_s: float | None = None
    ) -> None:
        self._name = name
        self._cpu_limit_s = cpu_limit_s
        self._clock_limit_s = clock_limit_s or _CLOCK_FACTOR * cpu_limit_s + _CLOCK_GRACE_S
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix=name)
        self._workers = _Workers(name, program)
        weakref.finalize(self, _Workers.close, self._workers)  # also when the interpreter ends

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of a worker.

        Raises:
            WorkerTimeoutError: it takes too long.
            WorkerDeathError: the workers died over it.
            WorkerError: they stalled, cannot be started, or are closed.
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
        line = json.dumps({**request, "cpu_limit_s": self._cpu_limit_s}).encode() + b"\n"
        for _ in range(_TRIES):
            worker = self._workers.take()
            try:
                answer = worker.ask(line, self._clock_limit_s)
            except TimeoutError as error:
                self._workers.discard(worker)
                raise WorkerStalledError(
                    f"a {self._name} process gave no answer within {self._clock_limit_s:g} s, in which it did not get "
                    f"{self._cpu_limit_s:g} s of the processor; the machine is overloaded, or stopped it"
                ) from error
            except (OSError, EOFError) as error:
                self._workers.discard(worker)
                if worker.ran_out_of_time:
                    raise WorkerTimeoutError(
                        f"a {self._name} process used up its {self._cpu_limit_s:g} s of processor time"
                    ) from error
                logger.warning("a %s process died at its work (%s): %r", self._name, worker.last_words(), error)
                continue
            self._workers.give_back(worker)
            answered: dict[str, Any] = json.loads(answer)
            return answered
        raise WorkerDeathError(f"{_TRIES} {self._name} processes died over one request")


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

    @property
    def ran_out_of_time(self) -> bool:
        """Whether it has ended by the limit that `loop.serve` sets."""
        return self._process.poll() == -signal.SIGPROF

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


class PatternTimeoutError(HTTPException, TimeoutError):
    """A regular expression was given up on a text: it took too long, or more than a process can do.

    As the answer of a server: status 422, the row is at fault.
    """

    def __init__(self, detail: str) -> None:
        super().__init__(HTTPStatus.UNPROCESSABLE_ENTITY, detail)


class PatternMatcher:
    """Looks for patterns in texts, each time in at most `timeout_s` of the processor's time."""

    def __init__(self, timeout_s: float = PATTERN_TIMEOUT_S, processes: int = _PROCESSES) -> None:
        self._pool = WorkerPool("pattern", Path(__file__).with_name("pattern_worker.py"), processes, timeout_s)
        self.open, self.close = self._pool.open, self._pool.close

    @property
    def pids(self) -> set[int]:
        """The processes there are."""
        return self._pool.pids

    async def last_match(self, pattern: str, text: str, flags: int = 0) -> list[str | None] | None:
        """The last match and its groups; None without a match.

        Raises:
            re.error: it is no regular expression.
            PatternTimeoutError: it takes too long, or more than a process can do.
            WorkerError: there is no telling, since the machine is overloaded or the server stops.
        """
        re.compile(pattern, flags)
        try:
            answer = await self._pool.ask(pattern=pattern, text=text, flags=int(flags))
        except (WorkerTimeoutError, WorkerDeathError) as error:
            raise PatternTimeoutError(
                f"the regular expression {pattern!r} was given up on a text of {len(text)} characters ({error}); write "
                "it without repetitions inside repetitions"
            ) from error
        found: list[str | None] | None = answer["found"]
        return found


def captured(found: list[str | None]) -> str:
    """The first group of a match that is not empty, else all of it."""
    whole, *groups = found
    return next((group for group in groups if group), whole) or ""
