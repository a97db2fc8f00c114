"""Container programs as processes: how their commands are run, and the book by which nothing outlives its run.

`docker` and `apptainer` are used through their command lines alone. Every command has an end: after its time it is
killed, and what it said until then is kept.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from nemo_gym.process_inputs import config_file, inherited_environment, run_id
from nemo_gym.sandbox import reaper
from nemo_gym.sandbox.providers.base import RUNTIME_RETURN_CODE, SANDBOX, SandboxExecResult

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
"""Of each stream of a command; what comes after is read and dropped."""
_DRAIN_S = 2.0
_CANNOT_BE_STARTED = 126
"""What a shell returns then."""
_INSIDE = (
    "executable file not found",
    "no such file or directory",
    "not a directory",
    "permission denied",
    "exec format error",
)
_Settings = TypeVar("_Settings")


class UnfitCommandError(OSError):
    """Nobody could start this command: it has a zero byte or half a character, or is too long."""


@dataclass(frozen=True)
class Ended:
    """A command of a container program that has ended, or was ended."""

    stdout: bytes
    stderr: bytes
    code: int
    is_late: bool = False
    """Whether its time was over."""

    @property
    def text(self) -> str:
        """What it said went wrong, in one line."""
        return reaper.reason((self.stderr or self.stdout).decode(errors="replace")) or f"exit code {self.code}"


class Program:
    """One container program, of which a bounded number of commands run at a time."""

    def __init__(self, name: str, concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError(f"`exec.concurrency` of the sandbox provider must be at least 1, not {concurrency!r}")
        self._name = name
        self._slots = asyncio.Semaphore(concurrency)

    @property
    def path(self) -> str:
        """Where it is.

        Raises:
            FileNotFoundError: it is not installed.
        """
        found = shutil.which(self._name)
        if found is None:
            raise FileNotFoundError(
                f"{self._name!r} is not on the PATH; install it, or choose another sandbox provider"
            )
        return str(Path(found).absolute())

    async def run(
        self,
        arguments: Sequence[str],
        timeout_s: float | None,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run one command to its end, or until its time is over; `env` is added to its variables.

        Raises:
            UnfitCommandError: it cannot be started as it is.
            OSError: it cannot be started.
        """
        async with self._slots:
            loop = asyncio.get_running_loop()
            try:
                transport, client = await loop.subprocess_exec(
                    lambda: _Client(loop),
                    self.path,
                    *arguments,
                    stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**inherited_environment(), **(env or {})},
                )  # in this process's group: when that is killed, nothing may go on making containers
            except ValueError as error:  # models write such things
                raise UnfitCommandError(f"the command cannot be started: {error}") from error
            except OSError as error:
                if error.errno != errno.E2BIG:
                    raise
                raise UnfitCommandError(f"the command cannot be started: {error.strerror}") from error
            if stdin is not None:
                _feed(transport, stdin)
            is_late = False
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(client.ended)
            except TimeoutError:
                is_late = True
            finally:
                if not client.ended.done():
                    with contextlib.suppress(ProcessLookupError):
                        transport.kill()
                await asyncio.wait([client.ended])
                await asyncio.wait([client.silent], timeout=_DRAIN_S)  # who still holds its streams is not waited for
                code = transport.get_returncode()
                transport.close()
        return Ended(bytes(client.outputs[1]), bytes(client.outputs[2]), 1 if code is None else code, is_late)


class _Client(asyncio.SubprocessProtocol):
    """Keeps what a command says, and tells when it has ended and when its streams have.

    Those are two things: what it has started may hold them open.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outputs = {1: bytearray(), 2: bytearray()}
        self.ended: asyncio.Future[None] = loop.create_future()
        self.silent: asyncio.Future[None] = loop.create_future()
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        output = self.outputs[fd]
        output += bytes(data[: MAX_OUTPUT_BYTES - len(output)])  # type: ignore[arg-type]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open and not self.silent.done():
            self.silent.set_result(None)

    def process_exited(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _feed(transport: asyncio.SubprocessTransport, data: bytes) -> None:
    pipe = transport.get_pipe_transport(0)
    assert isinstance(pipe, asyncio.WriteTransport)
    pipe.write(data)
    pipe.close()  # once it has been written


def failure(message: str, error_type: str = SANDBOX, partial: Ended | None = None) -> SandboxExecResult:
    """The result of a command that could not be run to its end, with what it said until then."""
    stdout = partial.stdout.decode(errors="replace") if partial else ""
    stderr = partial.stderr.decode(errors="replace") if partial else ""
    return SandboxExecResult(stdout, f"{stderr}\n{message}" if stderr else message, RUNTIME_RETURN_CODE, error_type)


def not_started(message: str) -> SandboxExecResult:
    """The result of a command that nobody could start, in a sandbox that works: it has failed, as it would in a shell.

    Else a model could have its rollout taken for one that the machinery has spoilt.
    """
    return SandboxExecResult("", message, _CANNOT_BE_STARTED)


def not_begun(ended: Ended, complaints: tuple[str, ...]) -> SandboxExecResult | None:
    """The result of a command that did not begin although the container runs; None if the program is to blame.

    What is inside is to blame if the program, whose `complaints` begin like this, does not complain, or says that it
    found no folder or shell: there was one when the sandbox was made. What stands in for the shell then may still
    complain in the program's words.
    """
    said = ended.text.lower()
    if not said.startswith(complaints):
        return result(ended)
    return not_started(ended.text) if any(reason in said for reason in _INSIDE) else None


def begun(ended: Ended, mark: str) -> Ended | None:
    """The same without the line by which `SHELL` says that it begins; None if it did not get that far.

    So no command can pass for a failure of the container program, whatever it prints.
    """
    before, found, rest = ended.stderr.partition(f"{mark}\n".encode())
    return replace(ended, stderr=before + rest) if found else None


def result(ended: Ended) -> SandboxExecResult:
    """The result of a command that has ended by itself."""
    stdout, stderr = (each.decode(errors="replace") for each in (ended.stdout, ended.stderr))
    return SandboxExecResult(stdout, stderr, 128 - ended.code if ended.code < 0 else ended.code)


def printed(path: str) -> str:
    """A shell command that prints a file, but nothing that might not end: a device, a pipe."""
    name = shlex.quote(path)
    return f"if [ -e {name} ] && [ ! -f {name} ]; then echo it is no plain file >&2; exit 1; fi; cat -- {name}"


def copy_plain_file(source: Path, target: Path, name: str) -> None:
    """Copy what came out of a sandbox, if it is a file with something in it to read: what is inside chose what it is.

    A link would be followed on this machine, a pipe would be waited for, a device would be one of this machine.

    Raises:
        RuntimeError: it is one of these, or a folder; `name` is what it is called inside.
    """
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RuntimeError(f"{name} cannot be copied out of the sandbox: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RuntimeError(f"{name} cannot be copied out of the sandbox: it is no plain file")
    with os.fdopen(descriptor, "rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing)


def settings_of(kind: type[_Settings], given: Mapping[str, Any] | None, where: str) -> _Settings:
    """A block of a provider's config.

    Raises:
        ValueError: it is no mapping, or has a key that nothing reads.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"`{where}` must be a mapping, not {given!r}")
    values = dict(given or {})
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"`{where}` has no {', '.join(unknown)}; there are {', '.join(known)}")
    return kind(**values)


MARK = "NEMO_GYM_EXEC"
"""A variable that everything has that a command starts, of another value for every command."""
SHELL = (
    f"printf '%s\\n' \"${MARK}\" >&2; "
    'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
)
"""What a command is run by, inside: it says that it begins, and becomes the best shell there is."""
KILLER = """
mark=$1; tries=0
while [ "$tries" -lt 40 ]; do
  found=" "; others=
  for folder in /proc/[0-9]*; do
    is=; parent=
    while IFS= read -r line || [ -n "$line" ]; do
      case "$line" in *"$mark"*) is=1; break;; esac
    done 2>/dev/null < "$folder/environ"
    [ -n "$is" ] && found="$found${folder#/proc/} " && continue
    while read -r key value rest; do
      [ "$key" = PPid: ] && parent=$value && break
    done 2>/dev/null < "$folder/status"
    others="$others ${folder#/proc/}:$parent"
  done
  [ "$found" = " " ] && exit 0
  grown=1
  while [ -n "$grown" ]; do
    grown=
    for pair in $others; do
      case "$found" in
        *" ${pair%%:*} "*) ;;
        *" ${pair#*:} "*) found="$found${pair%%:*} "; grown=1;;
      esac
    done
  done
  kill -9 $found 2>/dev/null
  tries=$((tries + 1))
done
exit 1
"""
"""A shell script that kills every process with a mark in its environment, and what they started, until none is left.

To end the client of a container program does not end the command inside the container. It takes nothing but a shell,
whose `read` drops the zeros between variables.
"""


class RunBook:
    """The run that containers belong to, and where it is noted that there are some."""

    def __init__(self) -> None:
        launched_with = config_file()
        self._pid = os.getpid()
        self._noted: set[str] = set()
        self._watch: subprocess.Popen[bytes] | None = None
        if launched_with is not None and launched_with.exists():
            unique = launched_with.stem.rpartition("_")[2] or "run"
            self._book = reaper.book_beside(str(launched_with))
            label = f"{run_id() or 'run'}.{unique}"
        else:
            descriptor, self._book = tempfile.mkstemp(prefix="nemo-gym-", suffix=".sandboxes")
            os.close(descriptor)
            label = f"{run_id() or 'program'}.{self._pid}.{secrets.token_hex(4)}"
            self._watch = _start_watch(self._book)
        self.label = re.sub(r"[^A-Za-z0-9_.-]", "-", label)
        """What everything of this run is labelled with."""

    @property
    def is_this_process(self) -> bool:
        """Whether it was made here, not by the process that this one was forked from."""
        return self._pid == os.getpid()

    def note(self, runtime: str, program: str, folder: str = "") -> None:
        """Note, before the first is made, that a program makes containers for this run.

        Args:
            runtime: `docker` or `apptainer`, whose commands it takes.
            program: Its path.
            folder: Where it keeps folders, named after the run, that are to be removed, too.
        """
        line = json.dumps({"runtime": runtime, "program": program, "label": self.label, "folder": folder})
        if line not in self._noted:
            with open(self._book, "a", encoding="utf-8") as book:  # noqa: PTH123
                book.write(line + "\n")
            self._noted.add(line)


def _start_watch(book: str) -> subprocess.Popen[bytes]:
    """A process that removes what is left when this one is gone, however it goes."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, book, "watch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


_BOOKS: list[RunBook] = []


def run_book() -> RunBook:
    """The book of the run that this process belongs to."""
    if not _BOOKS or not _BOOKS[-1].is_this_process:
        _BOOKS.append(RunBook())
    return _BOOKS[-1]
