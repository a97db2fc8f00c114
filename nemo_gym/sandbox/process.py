"""Isolated processes, as the server sees them: one is started, asked and killed; a bounded number is shared by calls.

Calls to them do not block the event loop. How much memory the machine has for them, and how often its kernel killed for
want of it, tells a failure of the machine from one of the program.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from nemo_gym.errors import ConfigError, GymError
from nemo_gym.paths import PARENT_DIR
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.child import Limits
from nemo_gym.sandbox.confine import LAYERS
from nemo_gym.workers.cores import Cores, own_cores

_MEBIBYTE = 1024 * 1024
_MACHINE, _KILLS = Path("/proc/meminfo"), Path("/proc/vmstat")
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES_OF_VERSION = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}
End = Literal["done", "error", "timeout", "cpu_limit", "killed", "output_limit", "folder_limit"]
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from nemo_gym.sandbox.zygote import main; main()"
_START_TIMEOUT_S = 120.0
_GRACE_S = 30.0
_FOLDER_BYTES = 64 * 1024 * 1024
_BESIDES_MB = _FOLDER_BYTES // (1024 * 1024) + 64
"""What work may take beyond its memory: its folder, and what the kernel keeps for it."""
_Result = TypeVar("_Result")


def kills() -> int:
    """How many processes the kernel has killed, on this machine and since it started, for want of memory."""
    return _counters(_KILLS).get("oom_kill", 0)


def available_mb() -> float:
    """Memory that this process and its children can still have: of the machine, and of the control groups they are in.

    0 where that is not known.
    """
    machine = _counters(_MACHINE).get("MemAvailable:", 0) / 1024
    return min([machine, *_left_in_groups()])


def _left_in_groups() -> Iterator[float]:
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            yield from _left_upwards(_GROUPS / "memory", path, 1)
        elif not controllers:
            unified = _GROUPS / "unified"
            yield from _left_upwards(unified if unified.exists() else _GROUPS, path, 2)


def _left_upwards(root: Path, path: str, version: int) -> Iterator[float]:
    """What is left below the limit of a group and of each group around it; files that are only cached do not count."""
    limit_file, usage_file, cached = _FILES_OF_VERSION[version]
    group = root / path.lstrip("/")
    while group.is_relative_to(root):
        try:
            limit = (group / limit_file).read_text().strip()
            if limit != "max":
                counters = _counters(group / "memory.stat")
                used = int((group / usage_file).read_text()) - sum(counters.get(name, 0) for name in cached)
                yield max(0.0, (int(limit) - used) / _MEBIBYTE)
        except (OSError, ValueError):
            pass  # this one has no limit, or is not shown inside a container
        group = group.parent


def _counters(file: Path) -> dict[str, int]:
    """Names and numbers, one pair per line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


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

    def __init__(self, room_mb: float = 0) -> None:
        """Start it.

        Args:
            room_mb: Memory that the machine has for the work of this process whatever other isolated processes do.
        """
        self._room_mb = room_mb
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
            env=clean_environment(self._folder),
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
            SandboxError: the process failed, or the machine had not the memory that the work was promised.
        """
        request = {"payload": payload, "stdin": stdin, "limits": asdict(limits)}
        kills_before = kills()
        answer = self._ask(request, limits.wall_s + _GRACE_S)
        self.is_clean = answer.pop("is_clean")
        value = _value(answer.pop("result"))
        if answer["end"] == "not_begun":
            raise SandboxError(f"work could not be begun: {_last_line(answer['stderr']) or answer['detail']}")
        outcome = Outcome(**answer, value=value)
        was_killed = outcome.end == "killed" and outcome.detail == "SIGKILL"
        if was_killed and has_room(limits.memory_mb, self._room_mb) and kills() > kills_before:
            raise SandboxError(
                "the kernel killed a program because others left it no memory; give this machine more, or less to do"
            )
        return outcome

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


def has_room(memory_mb: int, room_mb: float) -> bool:
    """Whether work with this limit can never be the reason that memory runs out."""
    return memory_mb + _BESIDES_MB <= room_mb


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _value(result: str | None) -> Any:
    """What the work returned. It may have written there itself, so anything is possible."""
    try:
        return None if result is None else json.loads(result)
    except (ValueError, RecursionError):
        return None


def _reason(error: Exception) -> str:
    return "" if isinstance(error, wire.ConnectionLostError) else f" ({error})"


def clean_environment(folder: Path) -> dict[str, str]:
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


class SandboxUnavailableError(ConfigError, RuntimeError):
    """This system does not offer enough to isolate a process."""


class _Processes:
    """Those that are running, and those of them that are free."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: list[IsolatedProcess] = []
        self.all: set[IsolatedProcess] = set()
        self.is_closed = False

    def close(self) -> None:
        """Close those that are free; kill the others, which their users then close."""
        with self.lock:
            self.is_closed = True
            free, self.free = self.free, []
            busy = self.all.difference(free)
        for process in busy:
            process.kill()
        for process in free:
            self.discard(process)

    def add(self, process: IsolatedProcess) -> None:
        with self.lock:
            if self.is_closed:
                raise SandboxError("the server is shutting down")
            self.all.add(process)

    def give_back(self, process: IsolatedProcess) -> None:
        with self.lock:
            is_usable = process.is_clean and not self.is_closed
            if is_usable:
                self.free.append(process)
        if not is_usable:
            self.discard(process)

    def discard(self, process: IsolatedProcess) -> None:
        with self.lock:
            self.all.discard(process)
        process.close()


class IsolatedPool:
    """Up to `size` isolated processes that are started when needed and used again.

    No more work at a time than there are processors, which all pools of a server process share; what waits takes turns,
    one of each environment and session. The pool belongs to no event loop, and ends its processes when it is closed or
    forgotten.
    """

    def __init__(
        self,
        work: Work,
        size: int | None,
        *,
        require_isolation: bool,
        layers: Sequence[str] = LAYERS,
        size_everywhere: int | None = None,
        cores: Cores | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            work: What the processes do.
            size: How many there may be; None: as many as processors.
            require_isolation: Whether a process that cannot be isolated is refused.
            layers: What to isolate them with.
            size_everywhere: How many there may be on this machine when other pools share the work.
            cores: The processors; those that all pools of this process share, unless a test has its own.
        """
        self._cores = cores or own_cores()
        self.size = size = size or self._cores.size
        """How many there may be."""
        self._room_mb = available_mb() / min(max(size, size_everywhere or size), self._cores.everywhere)
        self._work = work
        self._require_isolation = require_isolation
        self._layers = layers
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="isolated")
        self._processes = _Processes()
        weakref.finalize(self, self._processes.close)

    async def run(self, job: Callable[[IsolatedProcess], _Result]) -> _Result:
        """Do `job` with a process of its own, in a thread, as soon as one is free.

        Raises:
            SandboxError: the process failed.
            SandboxUnavailableError: a process cannot be isolated as required.
        """
        try:
            return await self._cores.run(self._executor, self.size, partial(self._with_process, job))
        except RuntimeError as error:
            if self._processes.is_closed and not isinstance(error, GymError):  # of threads that are no more
                raise SandboxError("the server is shutting down") from error
            raise

    def start(self) -> IsolatedProcess:
        """Start a process ahead of its first use, and see what isolates it.

        Raises:
            SandboxUnavailableError: it cannot be isolated as required.
        """
        return self._with_process(lambda process: process)

    def start_in_background(self) -> None:
        """Start a process ahead of its first use; whatever goes wrong shows when it is used."""
        self._executor.submit(self.start)

    def has_room_for(self, memory_mb: int) -> bool:
        """Whether the machine has this much memory for the work of every process."""
        return has_room(memory_mb, self._room_mb)

    def close(self) -> None:
        """End all processes; work in progress fails."""
        self._processes.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _with_process(self, job: Callable[[IsolatedProcess], _Result]) -> _Result:
        process = self._take()
        try:
            result = job(process)
        except BaseException:
            self._processes.discard(process)
            raise
        self._processes.give_back(process)
        return result

    def _take(self) -> IsolatedProcess:
        with self._processes.lock:
            if self._processes.free:
                return self._processes.free.pop()
        process = IsolatedProcess(self._room_mb)
        try:
            self._processes.add(process)
            process.isolate(self._work, self._layers)
            self._check(process)
        except BaseException:
            self._processes.discard(process)
            raise
        return process

    def _check(self, process: IsolatedProcess) -> None:
        if self._require_isolation and not process.holds:
            problems = "; ".join(f"{layer}: {why}" for layer, why in process.problems.items())
            raise SandboxUnavailableError(
                f"a process cannot be isolated here ({problems or 'no layer of isolation was asked for'}). It takes "
                "seccomp and either Landlock (Linux 5.13 and newer) or unprivileged user namespaces"
            )
