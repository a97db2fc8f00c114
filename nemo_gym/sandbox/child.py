"""The child that does one piece of work: what it begins with, its limits, and how its result gets out.

Of what a process inherits, all that an earlier program could have changed is set anew. The rest no program can change,
since system calls that name another process are refused: nice and scheduling, the process group, limits of others.
"""

import atexit
import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from json import dumps  # by name: what is run may replace json.dumps
from os import _exit
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import seccomp
from nemo_gym.sandbox.seccomp import PR_SET_PDEATHSIG, prctl

Work = Callable[[Any], Any]
_MEBIBYTE = 1024 * 1024
_OPEN_FILES = 64
_QUEUED_SIGNALS = 128
BEGUN = b"!"


@dataclass(frozen=True)
class Limits:
    """How much one piece of work may use."""

    wall_s: float
    """Time on the clock, after which it is killed."""
    cpu_s: int
    """Time on a processor, after which it is killed."""
    memory_mb: int = 1024
    """Memory on top of what the libraries already use."""
    file_mb: int = 16
    """Size of a file it writes."""


@dataclass(frozen=True)
class Streams:
    """File descriptors of a child: what it reads, where it writes what it says and what it returns, and a socket."""

    stdin: int
    stdout: int
    stderr: int
    result: int
    begins: int
    """A socket on which it tells that the work begins, with the descriptor on which it will ask for threads."""


@dataclass(frozen=True)
class Surroundings:
    """What every child begins with."""

    folder: Path
    """Where it is, and where alone it can write."""
    processors: frozenset[int]
    """Those it may run on; all when empty."""
    alone: bool
    """Whether the kernel is to deny it processes of its own."""


def work_and_exit(
    work: Work, payload: Any, limits: Limits, streams: Streams, base_memory: int, around: Surroundings
) -> None:
    """Do the work in this process, which ends with it: 0 when it returned, 1 when it raised.

    Args:
        work: What to do.
        payload: What to do it with.
        limits: What it may use.
        streams: Its descriptors.
        base_memory: What the libraries use already, in bytes.
        around: What it begins with.
    """
    status = 1
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _begin_afresh(around)
        result, begins = _take_over(streams)
        set_limits(limits, base_memory)
        _tell_that_it_begins(begins, seccomp.forbid_processes(os.getpid()) if around.alone else None)
        atexit._clear()
        value = work(payload)
        _finish_program()
        with open(result, "wb") as out:  # noqa: PTH123 - a descriptor
            out.write(dumps(value).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it raises is its result
        traceback.print_exc()
    finally:
        try:
            _flush()
        finally:  # whatever it has put in place of its streams
            _exit(status)


def _begin_afresh(around: Surroundings) -> None:
    """Set what a process inherits, and what no limit or filter concerns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o077)
    os.chdir(around.folder)
    if around.processors:
        with contextlib.suppress(OSError):  # the system has taken them away since
            os.sched_setaffinity(0, around.processors)


def _tell_that_it_begins(begins: int, asks: int | None) -> None:
    with socket.socket(fileno=begins) as telling:
        if asks is None:
            telling.send(BEGUN)
        else:
            socket.send_fds(telling, [BEGUN], [asks])
            os.close(asks)


def set_limits(limits: Limits, base_memory: int) -> None:
    """Bound what this process may use from now on."""
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES)
    _limit(resource.RLIMIT_FSIZE, limits.file_mb * _MEBIBYTE, limits.file_mb * _MEBIBYTE)
    _limit(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1)
    memory = base_memory + limits.memory_mb * _MEBIBYTE
    _limit(resource.RLIMIT_AS, memory, memory)
    if sys.platform == "linux":  # these are counted for all processes of a user together
        _limit(resource.RLIMIT_SIGPENDING, _QUEUED_SIGNALS, _QUEUED_SIGNALS)
        _limit(resource.RLIMIT_MSGQUEUE, 0, 0)


def _limit(kind: int, soft: int, hard: int) -> None:
    _, allowed = resource.getrlimit(kind)
    if allowed != resource.RLIM_INFINITY:
        soft, hard = min(soft, allowed), min(hard, allowed)
    try:
        resource.setrlimit(kind, (soft, hard))
    except (ValueError, OSError):
        if sys.platform == "linux":  # elsewhere not every limit can be set
            raise


def _take_over(streams: Streams) -> tuple[int, int]:
    """Make the streams this process's own and close all else; returns those of the result and of its beginning."""
    given = (streams.stdin, streams.stdout, streams.stderr, streams.result, streams.begins)
    for target, source in enumerate(given):
        os.dup2(source, target + 100)
    for target in range(len(given)):
        os.dup2(target + 100, target)
    os.closerange(len(given), 4096)
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    return 3, 4


def _finish_program() -> None:
    """What an interpreter does at the end of a program: wait for its threads, run its exit handlers."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
