"""Ends the processes of a run when the process that started them is gone, however it went.

A launcher that is killed with SIGKILL cannot stop anything any more. Of the usual answers,
`PR_SET_PDEATHSIG` is Linux only, must be set between fork and exec, and fires when the *thread*
that forked ends; watching the parent from inside a server needs the server's cooperation, which a
server that hangs in an import does not give. So a run has one more, tiny process: it holds the
reading end of a pipe whose writing end only the launcher has. End of file, or another parent
process, means that the launcher is gone; then every process group it was told of is stopped.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from nemo_gym.launch import warden_process

_GRACE_S = 3.0


class Warden:
    """Tells the warden process what to stop if this process dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", warden_process.__file__, str(os.getpid()), str(_GRACE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The warden's process."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """Stop this process group if the launcher dies."""
        self._tell(f"watch {group}")

    def forget(self, group: int) -> None:
        """The group is gone; its number may come to mean something else."""
        self._tell(f"forget {group}")

    def remove(self, file: Path) -> None:
        """Delete this file if the launcher dies."""
        self._tell(f"remove {file}")

    def reap(self, book: Path) -> None:
        """Remove the containers that this book of `nemo_gym.sandbox.reaper` speaks of if the launcher dies."""
        self._tell(f"reap {book}")

    def close(self) -> None:
        """End the warden; what it still watches is stopped, what it was to remove is removed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, message: str) -> None:
        assert self._process.stdin is not None
        # A run works without its warden; only a SIGKILL of the launcher would then leave servers behind.
        with contextlib.suppress(OSError, ValueError):
            os.write(self._process.stdin.fileno(), f"{message}\n".encode())
