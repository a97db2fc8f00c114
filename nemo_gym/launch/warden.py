"""Ends the processes of a run when the process that started them is gone, however it went.

A launcher that is killed with SIGKILL cannot stop anything any more. Of the usual answers,
`PR_SET_PDEATHSIG` is Linux only, must be set between fork and exec, and fires when the *thread*
that forked ends; watching the parent from inside a server needs the server's cooperation, which a
server that hangs in an import does not give. So a run has one more, tiny process: it holds the
reading end of a pipe whose writing end only the launcher has. End of file, or another parent
process, means that the launcher is gone; then every process group it was told of is stopped.

That process runs this file, as `python -I -S warden.py <launcher pid> <grace in s>`, and imports next to nothing, which
keeps it at a few MB and 20 ms. Orders on stdin, one per line: `watch <group>`, `forget <group>`, `remove <file>`,
`reap <book>` (of containers, for `nemo_gym/sandbox/reaper.py`).
"""

import os
import select
import signal
import sys
import time

if __name__ != "__main__":  # the process does without
    import contextlib
    import subprocess
    from pathlib import Path

_GRACE_S = 3.0
_CHECK_PARENT_EVERY_S = 1.0
_REAPER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "sandbox", "reaper.py")  # noqa: PTH100, PTH118, PTH120
_REAP_TIMEOUT_S = 180.0


class Warden:
    """Tells the warden process what to stop if this process dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(_GRACE_S)],
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

    def remove(self, file: "Path") -> None:
        """Delete this file if the launcher dies."""
        self._tell(f"remove {file}")

    def reap(self, book: "Path") -> None:
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


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _stop(groups: set[int], grace_s: float) -> None:
    alive = {group for group in groups if _signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {group for group in alive if _signal_group(group, 0)}
    for group in alive:
        _signal_group(group, signal.SIGKILL)


def _reap(book: str) -> None:
    """Have the containers of a run removed; there is a book only if it had some."""
    if not os.path.exists(book):  # noqa: PTH110
        return
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", _REAPER, book], os.environ)
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _wait_until_gone(launcher: int) -> tuple[set[int], set[str], set[str]]:
    """Take orders until the launcher is gone; what is then to be stopped, deleted and reaped."""
    groups: set[int] = set()
    files: set[str] = set()
    books: set[str] = set()
    unread = b""
    while True:
        readable, _, _ = select.select([0], [], [], _CHECK_PARENT_EVERY_S)
        received = os.read(0, 65536) if readable else b""
        *orders, unread = (unread + received).split(b"\n")
        for order in orders:
            verb, _, what = order.decode().partition(" ")
            if verb == "watch":
                groups.add(int(what))
            elif verb == "forget":
                groups.discard(int(what))
            elif verb == "remove":
                files.add(what)
            elif verb == "reap":
                books.add(what)
        if (readable and not received) or os.getppid() != launcher:
            return groups, files, books


def _main(launcher: int, grace_s: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups, files, books = _wait_until_gone(launcher)
    _stop(groups, grace_s)
    for book in books:
        _reap(book)
    for file in files:
        try:  # noqa: SIM105 - contextlib would double the start-up time
            os.unlink(file)  # noqa: PTH108 - so would pathlib
        except OSError:
            pass


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
