"""One child process: started without a shell in a process group of its own, its output read, its group stopped.

A group of its own means that Ctrl-C in the terminal reaches the launcher only, and that stopping the
child stops everything it started itself, such as uvicorn's workers.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nemo_gym.cli.warden import Warden

_LONGEST_LINE_BYTES = 64 * 1024
_DRAIN_TIMEOUT_S = 1.0
_KILL_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class CommandLine:
    """What to run, where and with which environment."""

    arguments: Sequence[str]
    folder: Path | None = None
    environment: Mapping[str, str] | None = None
    keep_descriptors: tuple[int, ...] = ()


class ChildProcess:
    """A process in a group of its own; every line it writes to stdout or stderr goes to `take_line`."""

    def __init__(self, command: CommandLine, take_line: Callable[[bytes], None], warden: Warden | None = None) -> None:
        self._warden = warden
        self._ended = threading.Lock()
        self._is_cleaned_up = False
        self._process = subprocess.Popen(
            command.arguments,
            cwd=command.folder,
            env=command.environment,
            pass_fds=command.keep_descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if warden is not None:
            warden.watch(self.pid)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=_read_lines, args=(self._process.stdout, take_line), name=f"output of {self.pid}", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process, which is also the number of its group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; a negative number is a signal. Whatever it left in its group is killed."""
        code = self._process.poll()
        if code is not None:
            self._clean_up()
        return code

    def send_signal(self, number: int) -> None:
        """Signal the whole group."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """End the whole group at once and wait until the process is gone."""
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
            self._clean_up()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.exit_code()

    def _clean_up(self) -> None:
        """Once the leader is gone: end the rest of its group and read what is still unread."""
        with self._ended:
            if self._is_cleaned_up:
                return
            self._is_cleaned_up = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            if self._warden is not None:
                self._warden.forget(self.pid)
            self._reader.join(_DRAIN_TIMEOUT_S)


def stop_all(children: Iterable[ChildProcess], grace_s: float) -> list[ChildProcess]:
    """Ask every group to end, kill what is left after `grace_s`; those that had to be killed.

    SIGTERM rather than SIGINT: a launcher in the background of a script has SIGINT ignored, and so have its children.
    """
    running = [child for child in children if child.exit_code() is None]
    for child in running:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while running and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        running = [child for child in running if child.exit_code() is None]
    for child in running:
        child.send_signal(signal.SIGKILL)
    for child in running:
        child.kill()
    return running


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}{hint})"


def _read_lines(stream: IO[bytes], take_line: Callable[[bytes], None]) -> None:
    with stream, contextlib.suppress(OSError, ValueError):
        for line in iter(lambda: stream.readline(_LONGEST_LINE_BYTES), b""):
            take_line(line)
