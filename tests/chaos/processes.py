"""Commands as processes of their own: started, watched and, whatever happens, gone in the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LOOK_EVERY_S = 0.02
PATIENCE_S = 90.0
"""For what has no bound of its own: starting up on a machine that others use, too."""


class HungError(AssertionError):
    """Something did not end, or did not come about, in time."""


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Without settings from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "WANDB"))}
    return {**kept, **(extra or {})}


def program(name: str) -> str:
    """The path of one of our commands."""
    return str(Path(sys.executable).with_name(name))


class Command:
    """One command; its output goes to files."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.stdout_path, self.stderr_path = folder / f"{name}.out", folder / f"{name}.err"
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self._process = subprocess.Popen(
                arguments,
                cwd=folder,
                env=clean_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=before,
                start_new_session=True,  # else the kernel lets stopped ones go on when the shell above us ends
            )
        self.pid = self._process.pid
        self.ended_s = 0.0
        """When it was first seen to have ended."""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        if self._process.poll() is None:
            return True
        self.ended_s = self.ended_s or time.monotonic()
        return False

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def printed(self) -> str:
        """All of its output."""
        return "".join(path.read_text(errors="replace") for path in (self.stdout_path, self.stderr_path))

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it runs."""
        if self.is_running:
            os.kill(self.pid, number)

    def wait(self, bound_s: float = PATIENCE_S) -> int:
        """Its exit code; it is an error when it does not end by itself within the bound."""
        deadline_s = time.monotonic() + bound_s
        while self.is_running:
            if time.monotonic() > deadline_s:
                self.stop()
                raise HungError(f"{self.name} did not end within {bound_s:g} s:\n{self.printed[-3000:]}")
            self.look()
            time.sleep(LOOK_EVERY_S)
        self.look()
        return int(self._process.returncode)

    def wait_until(self, condition: Callable[[], bool], bound_s: float = PATIENCE_S) -> bool:
        """Wait for something while it runs; False when it ended before that."""
        deadline_s = time.monotonic() + bound_s
        while not condition():
            if not self.is_running:
                return condition()
            if time.monotonic() > deadline_s:
                raise HungError(f"{self.name}: waited {bound_s:g} s in vain:\n{self.printed[-3000:]}")
            self.look()
            time.sleep(LOOK_EVERY_S)
        return True

    def look(self) -> None:
        """Called every now and then while it is waited for."""

    def stop(self) -> None:
        """End it, kindly first: what it started must end, too."""
        for number, patience_s in ((signal.SIGCONT, 0.0), (signal.SIGTERM, 12.0), (signal.SIGKILL, 5.0)):
            if self._process.poll() is not None:
                return
            self._process.send_signal(number)
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
