"""The server's side: a bounded number of worker processes that are killed when they get stuck.

Processes are started when they are first needed and used again for every later request. There are never more at
work than processors, and requests wait for one in turn (`cores`). One that uses up its processor time is gone, and the
next request gets a new one. One that dies otherwise is replaced once for the same request; if that dies, too, there is
no answer. Whether that is the request's doing depends on how they died: a process that crashed did so over the
request, one that was killed was killed by somebody, most often a kernel without memory.

What counts as too long is the processor's time, not the clock's: on a machine that is busy with other things
the same request must get the same answer. The clock only ends a wait that leads nowhere, which is the
machine's failure and nobody's verdict.

Regular expressions that come with data are matched in them: a pattern such as `(a+)+b` can take longer than the
universe on a text of a hundred letters, and nothing but the end of its process stops it. Functions of authors are
called in them, so that a slow one keeps neither the server nor the other processors waiting.
"""

import asyncio
import contextlib
import functools
import inspect
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, TypeVar, TypeVarTuple

from starlette.exceptions import HTTPException

from nemo_gym.errors import GymError
from nemo_gym.workers.cores import Cores, own_cores
from nemo_gym.workers.worker import READY, dumped, loaded

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("worker.py")
START_TIMEOUT_S = 120.0
_TRIES = 2
_CLOCK_FACTOR, _CLOCK_GRACE_S = 10, 60.0
"""How much slower than alone on its processor a worker may be, and how much longer it may wait to be put to work."""
_OWN_END_S = 1.0
PATTERN_TIMEOUT_S = 10.0
_NOBODY = "nobody waits for the answer any more"
_KILLS = (-signal.SIGKILL, -signal.SIGTERM)
_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class WorkerError(GymError, RuntimeError):
    """Workers gave no answer."""


class WorkerStartError(WorkerError):
    """A worker cannot be started."""


class WorkerDeathError(WorkerError):
    """Workers died over one request, each of them: it is the request that kills them."""


class WorkerKilledError(WorkerError):
    """Workers were killed over one request, by somebody or for want of memory: that says nothing about the request."""


class WorkerFunctionError(WorkerError):
    """A function failed in a worker with an error that could not be brought here."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker used up the processor time that a request may take: it is the request that takes too long."""


class WorkerStalledError(WorkerError, TimeoutError):
    """A worker gave no answer although it had processor time left: the machine is overloaded, or it was stopped."""


class WorkerPool:
    """Has requests answered in at most `max_workers` processes that run `program`, as many as processors if unset.

    Each may take `cpu_limit_s` of the processor's time and, if the machine has better things to do, `clock_limit_s`.
    Neither counts the time for which a request waits for its turn. A request that is cancelled ends its process.
    """

    def __init__(
        self,
        name: str,
        program: Path,
        max_workers: int | None,
        cpu_limit_s: float,
        clock_limit_s: float | None = None,
        *,
        arguments: Callable[[], Sequence[str]] = list,
        cores: Cores | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            name: What the processes are called in messages.
            program: What they run; it calls `serve`.
            max_workers: How many there may be.
            cpu_limit_s: The processor time of one request.
            clock_limit_s: The time of one request by the clock; unset: ten times that and a minute.
            arguments: Of the program.
            cores: The processors; those that all pools of this process share, unless a test has its own.
        """
        self._name = name
        self._cpu_limit_s = cpu_limit_s
        self._clock_limit_s = clock_limit_s
        self._cores = cores or own_cores()
        self._most = max_workers or self._cores.size
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix=name)
        self._workers = _Workers(name, program, arguments)
        weakref.finalize(self, _Workers.close, self._workers)  # also when the interpreter ends

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of a worker.

        Raises:
            WorkerTimeoutError: it takes too long.
            WorkerDeathError: the workers died over it.
            WorkerError: they were killed, stalled, cannot be started, or are closed.
        """
        return await self.ask_within(self._cpu_limit_s, request)

    async def ask_within(self, cpu_limit_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        """The same, for a request with a limit of its own."""
        job = _Job(request, cpu_limit_s, self._clock_limit_s or _CLOCK_FACTOR * cpu_limit_s + _CLOCK_GRACE_S)
        try:
            return await self._cores.run(self._threads, self._most, functools.partial(self._ask, job))
        except asyncio.CancelledError:
            job.give_up()
            raise

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

    def _ask(self, job: "_Job") -> dict[str, Any]:
        was_killed = False
        for _ in range(_TRIES):
            worker = self._workers.take()
            if not job.is_begun_by(worker):
                self._workers.give_back(worker)
                raise WorkerError(_NOBODY)
            try:
                answer = job.answer(worker)
            except TimeoutError as error:
                self._workers.discard(worker)
                raise WorkerStalledError(
                    f"a {self._name} process gave no answer within {job.clock_limit_s:g} s, in which it did not get "
                    f"{job.cpu_limit_s:g} s of the processor; the machine is overloaded, or stopped it"
                ) from error
            except (OSError, EOFError) as error:
                code = worker.wait_for_own_end()
                self._workers.discard(worker)
                if job.is_given_up:
                    raise WorkerError(_NOBODY) from error
                if code == -signal.SIGPROF:  # the limit that `worker.serve` sets
                    raise WorkerTimeoutError(
                        f"a {self._name} process used up its {job.cpu_limit_s:g} s of processor time"
                    ) from error
                logger.warning("a %s process died at its work (exit code %s): %r", self._name, code, error)
                was_killed = was_killed or code in _KILLS
                continue
            self._workers.give_back(worker)
            answered: dict[str, Any] = json.loads(answer)
            return answered
        if was_killed:
            raise WorkerKilledError(
                f"{_TRIES} {self._name} processes were lost over one request, and not by their own doing: they were "
                "killed, most often because this machine has not enough memory"
            )
        raise WorkerDeathError(f"{_TRIES} {self._name} processes died over one request")


class _Job:
    """One request, of which the process that works on it is known, so that it can be given up."""

    def __init__(self, request: Mapping[str, Any], cpu_limit_s: float, clock_limit_s: float) -> None:
        self.cpu_limit_s, self.clock_limit_s = cpu_limit_s, clock_limit_s
        self.is_given_up = False
        self._line = json.dumps({**request, "cpu_limit_s": cpu_limit_s}).encode() + b"\n"
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def is_begun_by(self, worker: "_Worker") -> bool:
        """Whether it is still wanted; from now on giving it up ends this process."""
        with self._lock:
            self._worker = None if self.is_given_up else worker
        return self._worker is not None

    def answer(self, worker: "_Worker") -> bytes:
        try:
            return worker.ask(self._line, self.clock_limit_s)
        finally:
            with self._lock:
                self._worker = None

    def give_up(self) -> None:
        """End the process that works on it, if one does, so that its processor is free."""
        with self._lock:
            self.is_given_up = True
            if self._worker is not None:
                self._worker.end()


class _Workers:
    """The processes that exist, and those that have nothing to do."""

    def __init__(self, name: str, program: Path, arguments: Callable[[], Sequence[str]]) -> None:
        self.is_open = True
        self._name = name
        self._program = program
        self._arguments = arguments
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
            worker = _Worker(self._program, self._arguments())
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

    def __init__(self, program: Path, arguments: Sequence[str]) -> None:
        self._program = program
        command = [sys.executable, "-P", str(program), *arguments]
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

    def end(self) -> None:
        """End the process; who waits for its answer is told, and waits for its end."""
        self._process.kill()

    def kill(self) -> None:
        """End the process and wait for its end, so that no zombie stays."""
        self._process.kill()
        self._process.wait()

    def close_pipes(self) -> None:
        self._answers.close()
        with contextlib.suppress(OSError):  # for what was not sent yet
            self._requests.close()

    def wait_for_own_end(self) -> int | None:
        """How it has ended by itself, after its last answer; None: it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_OWN_END_S)
        return None

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

    def __init__(self, timeout_s: float = PATTERN_TIMEOUT_S, processes: int | None = None) -> None:
        """Use at most so many processes, as many as processors if unset."""
        self._pool = WorkerPool("pattern", _PROGRAM, processes, timeout_s)
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
            WorkerError: there is no telling, since the machine is overloaded, killed them, or the server stops.
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


async def in_worker(
    function: Callable[[*_Arguments], _Result], *arguments: *_Arguments, timeout_s: float = 10.0
) -> _Result:
    """What `function` returns, called in another process: a slow one keeps neither the event loop nor others waiting.

    As many are called at a time as there are processors; what waits takes turns, one of each environment and session.

    Args:
        function: One at the top of a module, or a `functools.partial` of one; it is imported there, and called again
            and again in processes that stay. It must not be a coroutine function.
        arguments: Whatever can be pickled; so must be what it returns.
        timeout_s: Processor time that one call may take; waiting for a processor does not count.

    Raises:
        TypeError: the function or an argument cannot be sent to another process.
        WorkerTimeoutError: it takes too long.
        WorkerDeathError: processes crashed over it.
        WorkerError: they were killed, stalled or cannot be started: nobody can say what it would have returned.
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is a coroutine function, which an event loop has to run; give a plain one")
    try:
        call = dumped((function, arguments))
    except Exception as error:
        raise TypeError(
            f"{function!r} cannot be called in another process ({error}): give a function at the top of a module, and "
            "arguments that pickle takes"
        ) from error
    answer = await _functions().ask_within(timeout_s, {"call": call})
    if "returned" in answer:
        result: _Result = loaded(answer["returned"])
        return result
    raise _raised(**answer)


def _raised(raised: str, traceback: str) -> Exception:
    """What a function raised; where it did is in the notes."""
    try:
        error: Exception = loaded(raised)
    except Exception:  # noqa: BLE001 - an error of the author's that cannot be made again here
        return WorkerFunctionError(traceback.strip())
    error.add_note(f"In a worker:\n{traceback}")
    return error


@functools.cache
def _functions() -> WorkerPool:
    """The processes in which functions are called, for all environments of this process."""
    return WorkerPool("function", _PROGRAM, None, PATTERN_TIMEOUT_S, arguments=_surroundings)


def _surroundings() -> list[str]:
    """Where modules are found here, and what the main one is."""
    return [json.dumps([*filter(None, sys.path)]), str(getattr(sys.modules["__main__"], "__file__", None) or "")]
