"""One isolated process, as the server sees it: started, asked, killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_gym.errors import GymError
from nemo_gym.paths import PARENT_DIR
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.child import Limits

End = Literal["done", "error", "timeout", "cpu_limit", "killed", "output_limit"]

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from nemo_gym.sandbox.zygote import main; main()"
_START_TIMEOUT_S = 120.0
_GRACE_S = 30.0
_FOLDER_BYTES = 64 * 1024 * 1024


class SandboxError(GymError, RuntimeError):
    """The isolated process itself failed: that says nothing about the work it was given."""


@dataclass(frozen=True)
class Outcome:
    """How one piece of work ended."""

    end: End
    """`done`: it returned. `error`: it raised. The others: it was stopped from outside."""
    value: Any
    """What it returned; None when it ended itself before it returned."""
    stdout: str
    stderr: str
    seconds: float
    detail: str
    """The signal or exit code, if any."""


@dataclass(frozen=True)
class Work:
    """What isolated processes do: a module with `run(payload)`, which is called in a child of its own.

    If it has `prepare(payload)`, that is called before, in the process whose memory every later child starts with. It
    must not run anything a model wrote.
    """

    module: str
    roots: tuple[Path, ...] = (PARENT_DIR,)
    """Folders to import it from."""


class IsolatedProcess:
    """A process that does work after work, each in a child of its own. It belongs to one thread at a time."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        """The layers of isolation that hold."""
        self.holds = False
        """Whether they amount to a sandbox."""
        self.problems: dict[str, str] = {}
        """Why the other layers do not hold."""
        self.is_clean = True
        """Whether nothing is left of earlier work; else this process must not be used again."""
        self._folder = Path(tempfile.mkdtemp(prefix="nemo-gym-sandbox-")).resolve()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", _BOOT, str(PARENT_DIR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._folder,
            env=_clean_environment(self._folder),
            start_new_session=True,
            bufsize=0,
        )

    def isolate(self, work: Work, layers: Sequence[str]) -> None:
        """Tell it what it is for, and have it put on the layers of isolation that the system offers.

        Raises:
            SandboxError: the process failed.
        """
        settings = {
            "work": work.module,
            "roots": [str(root) for root in work.roots],
            "layers": list(layers),
            "folder": str(self._folder),
            "folder_bytes": _FOLDER_BYTES,
        }
        hello = self._ask(settings, _START_TIMEOUT_S)
        self.layers, self.holds, self.problems = hello["layers"], hello["holds"], hello["problems"]

    def call(self, payload: Any, limits: Limits, stdin: str = "") -> Outcome:
        """Have one piece of work done.

        Raises:
            SandboxError: the process failed.
        """
        request = {"payload": payload, "stdin": stdin, "limits": asdict(limits)}
        answer = self._ask(request, limits.wall_s + _GRACE_S)
        self.is_clean = answer.pop("is_clean")
        value = _value(answer.pop("result"))
        return Outcome(**answer, value=value)

    def kill(self) -> None:
        """Kill it with everything it started; whoever waits for its answer gets a `SandboxError`. For any thread."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and remove its folder; a second call does nothing."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()
        if self._folder.exists():  # not shutil.rmtree: what was run may have nested folders too deep for it
            subprocess.run(["rm", "-rf", "--", self._folder], check=False, capture_output=True)

    def _ask(self, request: Any, timeout_s: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            wire.send(self._process.stdin.fileno(), request)
            return wire.receive(self._process.stdout.fileno(), timeout_s)
        except wire.TooLateError:
            message = f"an isolated process did not answer within {timeout_s:g} s; is the machine overloaded?"
        except (wire.ConnectionLostError, OSError, ValueError) as error:
            message = f"an isolated process ended unexpectedly{_reason(error)}{self._last_words()}"
        raise SandboxError(message)

    def _last_words(self) -> str:
        self.kill()
        code = self._process.wait()
        self._log.seek(0)
        text = self._log.read()[-2000:].decode(errors="replace").strip()
        return f" (exit code {code}){': ' + text if text else ''}"


def _value(result: str | None) -> Any:
    """What the work returned. It may have written there itself, so anything is possible."""
    try:
        return None if result is None else json.loads(result)
    except (ValueError, RecursionError):
        return None


def _reason(error: Exception) -> str:
    return "" if isinstance(error, wire.ConnectionLostError) else f" ({error})"


def _clean_environment(folder: Path) -> dict[str, str]:
    """None of this process's variables: they may hold keys."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
