"""The child that does one piece of work: its limits, its streams, and how its result gets out."""

import atexit
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from json import dumps  # by name: what is run may replace json.dumps
from typing import Any

from nemo_gym.sandbox import seccomp
from nemo_gym.sandbox.kernel import PR_SET_PDEATHSIG, prctl

Work = Callable[[Any], Any]
_MEBIBYTE = 1024 * 1024
_OPEN_FILES = 64


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
    """File descriptors of a child: what it reads, and where it writes what it says and what it returns."""

    stdin: int
    stdout: int
    stderr: int
    result: int


def work_and_exit(work: Work, payload: Any, limits: Limits, streams: Streams, base_memory: int, alone: bool) -> None:
    """Do the work in this process, which ends with it: 0 when it returned, 1 when it raised.

    Args:
        work: What to do.
        payload: What to do it with.
        limits: What it may use.
        streams: Its descriptors.
        base_memory: What the libraries use already, in bytes.
        alone: Whether the kernel is to deny it processes of its own.
    """
    status = 1
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        result = _take_over(streams)
        set_limits(limits, base_memory)
        if alone:
            seccomp.forbid_processes(os.getpid())
        atexit._clear()
        value = work(payload)
        _finish_program()
        with open(result, "wb") as out:  # noqa: PTH123 - a descriptor
            out.write(dumps(value).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it raises is its result
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def set_limits(limits: Limits, base_memory: int) -> None:
    """Bound what this process may use from now on."""
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES)
    _limit(resource.RLIMIT_FSIZE, limits.file_mb * _MEBIBYTE, limits.file_mb * _MEBIBYTE)
    _limit(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1)
    memory = base_memory + limits.memory_mb * _MEBIBYTE
    _limit(resource.RLIMIT_AS, memory, memory)


def _limit(kind: int, soft: int, hard: int) -> None:
    _, allowed = resource.getrlimit(kind)
    if allowed != resource.RLIM_INFINITY:
        soft, hard = min(soft, allowed), min(hard, allowed)
    try:
        resource.setrlimit(kind, (soft, hard))
    except (ValueError, OSError):
        if sys.platform == "linux":  # elsewhere not every limit can be set
            raise


def _take_over(streams: Streams) -> int:
    """Make the streams this process's own and close all else; returns the descriptor for the result."""
    for target, source in enumerate((streams.stdin, streams.stdout, streams.stderr, streams.result)):
        os.dup2(source, target + 100)
    for target in range(4):
        os.dup2(target + 100, target)
    os.closerange(4, 4096)
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return 3


def _finish_program() -> None:
    """What an interpreter does at the end of a program: wait for its threads, run its exit handlers."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
