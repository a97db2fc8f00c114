"""The other side: a process that confines itself once and then forks a child for every call.

It imports what the work needs before it is confined, so that a child starts within milliseconds. It runs nothing
that came from a model: that is done by the children, which share neither memory nor descriptors with it.
"""

import contextlib
import importlib
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import wire
from nemo_gym.sandbox.child import Limits, Streams, Work, work_and_exit
from nemo_gym.sandbox.confine import SECCOMP, confine

Ending = dict[str, Any]

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_EXIT_POLL_S = 0.002


@dataclass
class _Output:
    """What has arrived on one stream of a child."""

    limit: int
    data: bytearray = field(default_factory=bytearray)
    is_cut: bool = False

    def add(self, part: bytes) -> None:
        room = self.limit - len(self.data)
        self.is_cut = self.is_cut or len(part) > room
        self.data += part[:room]

    def text(self) -> str:
        return self.data.decode(errors="replace")


def main() -> None:
    """Serve calls on standard input and output until the other side goes."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        _serve(requests, answers)
    except wire.ConnectionLostError:
        return


def _serve(requests: int, answers: int) -> None:
    settings = wire.receive(requests)
    sys.path[:0] = settings["roots"]
    module = importlib.import_module(settings["work"])
    base_memory = _address_space()
    confinement = confine(Path(settings["folder"]), settings["layers"], settings["folder_bytes"])
    tempfile.tempdir = str(confinement.folder)
    wire.send(answers, {"layers": confinement.layers, "holds": confinement.holds, "problems": confinement.problems})
    alone = SECCOMP in confinement.layers
    zygote = Zygote(module.run, getattr(module, "prepare", None), confinement.folder, base_memory, alone)
    while True:
        wire.send(answers, zygote.answer(wire.receive(requests)))


class Zygote:
    """Forks a child per call and tells how it ended."""

    def __init__(self, work: Work, prepare: Work | None, folder: Path, base_memory: int, alone: bool) -> None:
        self._work = work
        self._prepare = prepare
        self._folder = folder
        self._base_memory = base_memory
        self._alone = alone

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one piece of work in a child, within its limits, and tidy up after it."""
        if self._prepare is not None:
            self._prepare(request["payload"])
        answer = self._in_child(request)
        return {**answer, "is_clean": _empty(self._folder)}

    def _in_child(self, request: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(**request["limits"])
        outputs = {"stdout": _Output(MAX_OUTPUT_BYTES), "stderr": _Output(_MAX_ERROR_BYTES)}
        outputs["result"] = _Output(MAX_OUTPUT_BYTES)
        pipes = {name: os.pipe() for name in outputs}
        started = time.monotonic()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(request["stdin"].encode(errors="surrogatepass"))
            stdin.seek(0)
            writing = {name: pipe[1] for name, pipe in pipes.items()}
            pid = os.fork()
            if pid == 0:
                streams = Streams(stdin=stdin.fileno(), **writing)
                work_and_exit(self._work, request["payload"], limits, streams, self._base_memory, alone=self._alone)
        for descriptor in writing.values():
            os.close(descriptor)
        reading = {pipe[0]: outputs[name] for name, pipe in pipes.items()}
        end = _watch(pid, reading, outputs, started, limits)
        return {
            **end,
            "seconds": time.monotonic() - started,
            "stdout": outputs["stdout"].text(),
            "stderr": outputs["stderr"].text(),
            "result": outputs["result"].text() if end["end"] == "done" else None,
        }


def _watch(
    pid: int, reading: dict[int, _Output], outputs: dict[str, _Output], started: float, limits: Limits
) -> Ending:
    """Collect what a child says until it ends, says too much or runs out of time."""
    deadline = started + limits.wall_s
    why = _collect(reading, outputs, deadline)
    ended = None if why else _wait(pid, deadline)
    if ended is None:
        _kill(pid)
        return {"end": why or "timeout", "detail": ""}
    status, cpu_s = ended
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return {"end": "error" if code else "done", "detail": f"exit code {code}" if code else ""}
    name = signal.Signals(-code).name
    return {"end": "cpu_limit" if name == "SIGXCPU" or cpu_s > limits.cpu_s else "killed", "detail": name}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # not a group of its own yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _collect(reading: dict[int, _Output], outputs: dict[str, _Output], deadline: float) -> str | None:
    """Read every stream to its end; returns why the child must be killed, if it must."""
    with selectors.DefaultSelector() as selector:
        for descriptor in reading:
            selector.register(descriptor, selectors.EVENT_READ)
        try:
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return "timeout"
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    reading[key.fd].add(part)
                    if not part:
                        selector.unregister(key.fd)
                if outputs["stdout"].is_cut or outputs["result"].is_cut:
                    return "output_limit"
        finally:
            for descriptor in reading:
                os.close(descriptor)
    return None


def _wait(pid: int, deadline: float) -> tuple[int, float] | None:
    """How the child ended, and the processor time it took; None when it does not end in time."""
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            return None
        time.sleep(_EXIT_POLL_S)


def _empty(folder: Path) -> bool:
    """Remove what a child left behind; False when it cannot be removed."""
    try:
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, onerror=_open_and_retry)
            else:
                entry.unlink()
    except (OSError, RecursionError):
        return False
    return True


def _open_and_retry(function: Any, path: str, _: Any) -> None:
    """A folder made without permissions is removed all the same."""
    Path(path).chmod(0o700)
    if function is os.rmdir:
        Path(path).rmdir()
    else:
        shutil.rmtree(path)


def _address_space() -> int:
    """Bytes of address space this process has already."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")
