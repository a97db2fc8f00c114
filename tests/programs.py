"""Commands of ours as processes of their own, forked from one that has everything imported: they start at once.

`Program` writes to files, `Piped` has the face of `subprocess.Popen`, `run_program` that of `subprocess.run`.
"""

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

import psutil

_PROGRAM = """
import os, resource, runpy, signal, sys, tempfile

from nemo_gym.cli.command import command_named
from nemo_gym.cli.commands import gym

for stream, target in ((1, OUT), (2, ERR)):
    is_file = isinstance(target, str)
    os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if is_file else target.fileno(), stream)
signal.signal(signal.SIGINT, signal.default_int_handler)
if LARGEST_FILE:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, resource.RLIM_INFINITY))
os.environ.clear()
os.environ.update(ENVIRONMENT)
tempfile.tempdir = None
os.chdir(FOLDER)
program, *arguments = COMMAND
sys.argv = [f"/usr/bin/{program}", *arguments]
if COMMAND[:2] == ["python", "-m"]:
    sys.argv = ["python", *arguments[2:]]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
elif program == "python":
    sys.argv = arguments
    sys.path.insert(0, "")
    runpy.run_path(arguments[0], run_name="__main__")
else:
    command = gym.main if program in ("gym", "ng") else command_named(program)
    command()
"""
_PRELOADED = [
    "nemo_gym.cli.commands.collecting",
    "nemo_gym.cli.config",
    "nemo_gym.launch.end_to_end",
    "nemo_gym.cli.show",
    "nemo_gym.rollout_collection",
    "nemo_gym.servers.head",
    "hydra.core.override_parser.overrides_parser",
    "rich.table",
    "tqdm",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
]
"""With what they import only when they come to it, such as the parser of options."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOADED)
WAIT_S = 120.0


def still_running(process: psutil.Process) -> list[psutil.Process]:
    """What a process has started and is at work; what has ended and waits to be noticed is not."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def ensure_running() -> None:
    """Start the process that programs are forked from, so that nobody takes it for one that a test has left behind."""
    forkserver.ensure_running()


def _started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None, **more: Any
) -> ForkServerProcess:
    given = {
        "__name__": "program",
        "COMMAND": list(command),
        "ENVIRONMENT": dict(os.environ if environment is None else environment),
        "FOLDER": str(folder),
        **more,
    }
    process: ForkServerProcess = _CONTEXT.Process(target=exec, args=(_PROGRAM, given))
    process.start()
    return process


class Program:
    """One command, running: `ng_<name>`, `gym`, `python -m <module>` or `python <file>`, with its arguments."""

    def __init__(
        self,
        *command: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        largest_file: int = 0,
        name: str | None = None,
    ) -> None:
        folder = folder or Path.cwd()
        stem = name or command[0]
        self.stdout_path, self.stderr_path = folder / f"{stem}.out", folder / f"{stem}.err"
        for path in (self.stdout_path, self.stderr_path):
            path.unlink(missing_ok=True)  # of an earlier one, whose words would be taken for this one's
        self.command: Sequence[str] = command
        self._process = _started(
            command,
            folder,
            environment,
            OUT=str(self.stdout_path),
            ERR=str(self.stderr_path),
            LARGEST_FILE=largest_file,
        )

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text() if self.stdout_path.exists() else ""

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text() if self.stderr_path.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; minus a signal's number when one killed it."""
        self._process.join(WAIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"{self.command[0]} did not end within {WAIT_S:g} s:\n{self.stderr}")
        return self._process.exitcode

    def stop(self) -> None:
        """Leave nothing behind."""
        self._process.kill()
        self._process.join(WAIT_S)


class Piped:
    """One command, running, that is read from and waited for as if `subprocess.Popen` had started it."""

    def __init__(
        self,
        *command: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        in_one: bool = False,
    ) -> None:
        """With `in_one`, what goes to stderr comes out of `stdout`, too."""
        self.args = list(command)
        out, out_end = _CONTEXT.Pipe(duplex=False)
        err, err_end = _CONTEXT.Pipe(duplex=False)
        ends = {"OUT": out_end, "ERR": out_end if in_one else err_end, "LARGEST_FILE": 0}
        self._process = _started(command, folder or Path.cwd(), environment, **ends)
        self.stdout: IO[str] = os.fdopen(os.dup(out.fileno()), encoding="utf-8")
        self.stderr: IO[str] = os.fdopen(os.dup(err.fileno()), encoding="utf-8")
        for end in (out, out_end, err, err_end):
            end.close()
        if in_one:
            self.stderr.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(WAIT_S if timeout is None else timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, WAIT_S if timeout is None else timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it still has to say, once it has ended."""
        said: dict[str, str] = {}
        streams = {"out": self.stdout, "err": self.stderr}
        readers = [
            threading.Thread(target=lambda name=name, stream=stream: said.update({name: stream.read()}), daemon=True)
            for name, stream in streams.items()
            if not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(WAIT_S)
        for stream in streams.values():
            stream.close()
        return said.get("out", ""), said.get("err", "")


def run_program(
    *command: str, folder: Path | None = None, environment: Mapping[str, str] | None = None, timeout: float = WAIT_S
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    program = Piped(*command, folder=folder, environment=environment)
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
    assert program.returncode is not None
    return subprocess.CompletedProcess(list(command), program.returncode, out, err)
