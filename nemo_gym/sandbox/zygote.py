"""The process that confines itself once and then forks a child for every call.

It imports what the work needs before it is confined, so that a child starts within milliseconds. It runs nothing
that came from a model: that is done by the children, which share neither memory nor descriptors with it.

Each child is watched from here: what it says, which threads it starts, whether it takes too much, how it ends.
"""

import contextlib
import errno
import fcntl
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from nemo_gym.sandbox import seccomp, wire
from nemo_gym.sandbox.child import BEGUN, Limits, Streams, Surroundings, Work, work_and_exit
from nemo_gym.sandbox.confine import NAMESPACES, SECCOMP, Confinement, confine

MAX_THREADS = 512
_EXIT_POLL_S = 0.002
_LOOK_EVERY_S = 0.05
MAX_OUTPUT_BYTES = 8 * 1024 * 1024
MAX_FILES = 4096
"""In its folder; the same as with namespaces."""
_MAX_ERROR_BYTES = 64 * 1024
_FORK_TRIES = 40
_FORK_AGAIN_S = 0.25


@dataclass
class Output:
    """What has arrived on one stream of a child."""

    limit: int
    is_bounded: bool = True
    """Whether a child that says more is ended; else the rest is not kept."""
    data: bytearray = field(default_factory=bytearray)
    is_cut: bool = False

    def add(self, part: bytes) -> None:
        """Keep what there is room for."""
        room = self.limit - len(self.data)
        self.is_cut = self.is_cut or len(part) > room
        self.data += part[:room]

    def text(self) -> str:
        """All of it, whatever the bytes."""
        return self.data.decode(errors="replace")


class Threads:
    """Answers a child that asks whether it may start a thread, by the kernel's user notifications.

    It also asks to end one, which is always granted, so that those that live can be counted.
    """

    def __init__(self) -> None:
        self._started = 0
        self._ended: set[int] = set()

    def answer(self, listener: int) -> bool:
        """Answer one question; False when there will be no more."""
        if not seccomp.has_question(listener):
            return False  # the last of them has ended; to receive would be to wait for ever
        with contextlib.suppress(OSError):  # it was interrupted, and asks again, or it is gone
            question = seccomp.receive_question(listener)
            is_granted = self._is_granted(question.thread, question.number)
            seccomp.answer_question(listener, question, 0 if is_granted else errno.EAGAIN)
        return True

    def _is_granted(self, thread: int, number: int) -> bool:
        if number == seccomp.number_of(seccomp.EXIT):
            self._ended.add(thread)  # once, however often it asks
            return True
        if self._started - len(self._ended) >= MAX_THREADS:
            return False
        self._started += 1
        return True


class Watch:
    """One child, from its start to its end."""

    def __init__(self, pid: int, begins: socket.socket, outputs: dict[int, Output], limits: Limits) -> None:
        self._pid = pid
        self._begins = begins
        self._outputs = outputs
        self._limits = limits
        self._threads = Threads()
        self._talking = len(outputs)
        self._has_begun = False
        self._ended: tuple[int, float] | None = None
        self._selector = selectors.DefaultSelector()

    def until_it_ends(self, deadline: float, is_too_much: Callable[[], bool] | None) -> dict[str, Any]:
        """Collect what it says until it ends, or must be ended; returns why and how.

        Args:
            deadline: When its time is over.
            is_too_much: Whether its folder holds more than it may; None where the system sees to that.
        """
        with self._selector:
            for descriptor, output in self._outputs.items():
                self._selector.register(descriptor, selectors.EVENT_READ, partial(self._hear, output))
            self._selector.register(self._begins.detach(), selectors.EVENT_READ, self._begin)
            try:
                why = self._attend(deadline, is_too_much)
            finally:
                for key in list(self._selector.get_map().values()):
                    os.close(key.fd)
        if self._ended is None:
            _kill(self._pid)
        if not self._has_begun:
            return {"end": "not_begun", "detail": why or ""}
        if why is None and is_too_much is not None and is_too_much():
            why = "folder_limit"
        return {"end": why, "detail": ""} if why or self._ended is None else _ending(*self._ended, self._limits.cpu_s)

    def _attend(self, deadline: float, is_too_much: Callable[[], bool] | None) -> str | None:
        """Serve it until it has ended; returns why it must be killed, if it must."""
        look_at = time.monotonic() + _LOOK_EVERY_S
        while True:
            if not self._talking and self._has_ended():
                return None
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if is_too_much is not None and now >= look_at:
                if is_too_much():
                    return "folder_limit"
                look_at = time.monotonic() + _LOOK_EVERY_S
            waits = [deadline - now, *([] if is_too_much is None else [look_at - now])]
            for key, _ in self._selector.select(max(0.0, min(waits)) if self._talking else _EXIT_POLL_S):
                if not key.data(key.fd):
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            if any(output.is_cut and output.is_bounded for output in self._outputs.values()):
                return "output_limit"

    def _hear(self, output: Output, descriptor: int) -> bool:
        part = os.read(descriptor, 1 << 16)
        output.add(part)
        self._talking -= not part
        return bool(part)

    def _begin(self, descriptor: int) -> bool:
        """It begins with the work: from now on, whatever happens is the work's doing."""
        with socket.socket(fileno=os.dup(descriptor)) as begins:
            message, listeners, _, _ = socket.recv_fds(begins, len(BEGUN), 1)
        self._has_begun = message == BEGUN
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._threads.answer)
        return False

    def _has_ended(self) -> bool:
        pid, status, usage = os.wait4(self._pid, os.WNOHANG)
        if pid:
            self._ended = status, usage.ru_utime + usage.ru_stime
        return bool(pid)


def _ending(status: int, used_s: float, cpu_s: int) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return {"end": "error" if code else "done", "detail": f"exit code {code}" if code else ""}
    known = -code in {int(it) for it in signal.Signals}  # most real-time signals have no name
    name = signal.Signals(-code).name if known else f"signal {-code}"
    return {"end": "cpu_limit" if name == "SIGXCPU" or used_s > cpu_s else "killed", "detail": name}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # not a group of its own yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    """Serve calls on standard input and output until the other side goes."""
    _ignore_signals()
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        _serve(requests, answers)
    except wire.ConnectionLostError:
        return


def _ignore_signals() -> None:
    """Whoever started this ends it, by going or by SIGKILL; no other signal does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _serve(requests: int, answers: int) -> None:
    settings = wire.receive(requests)
    sys.path[:0] = settings["roots"]
    module = importlib.import_module(settings["work"])
    confinement = confine(Path(settings["folder"]), settings["layers"], settings["folder_bytes"])
    tempfile.tempdir = str(confinement.folder)
    wire.send(answers, {"layers": confinement.layers, "holds": confinement.holds, "problems": confinement.problems})
    zygote = Zygote(module.run, getattr(module, "prepare", None), confinement, settings["folder_bytes"])
    while True:
        wire.send(answers, zygote.answer(wire.receive(requests)))


class Zygote:
    """Forks a child per call and tells how it ended."""

    def __init__(self, work: Work, prepare: Work | None, confinement: Confinement, folder_bytes: int) -> None:
        self._work = work
        self._prepare = prepare
        self._confinement = confinement
        self._folder = confinement.folder
        processors = os.sched_getaffinity(0) if sys.platform == "linux" else ()
        self._around = Surroundings(self._folder, frozenset(processors), alone=SECCOMP in confinement.layers)
        is_too_much = partial(_holds_more_than, self._folder, folder_bytes)
        self._is_too_much = None if NAMESPACES in confinement.layers else is_too_much

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one piece of work in a child, within its limits, and tidy up after it."""
        if self._prepare is not None:
            self._prepare(request["payload"])
        answer = self._in_child(request)
        is_clean = answer["end"] != "folder_limit" and _empty(self._folder)  # nobody waits until so much is removed
        return {**answer, "is_clean": is_clean}

    def _in_child(self, request: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(**request["limits"])
        outputs = {"stdout": Output(MAX_OUTPUT_BYTES), "stderr": Output(_MAX_ERROR_BYTES, is_bounded=False)}
        outputs["result"] = Output(MAX_OUTPUT_BYTES)
        started = time.monotonic()
        pipes = {name: os.pipe() for name in outputs}
        writing = {name: pipe[1] for name, pipe in pipes.items()}
        with ExitStack() as given:
            stdin = given.enter_context(_input_file(request["stdin"]))
            begins, its_side = socket.socketpair()
            given.enter_context(its_side)
            for descriptor in writing.values():
                given.callback(os.close, descriptor)
            base_memory = self._confinement.address_space()
            pid = _fork()
            if pid == 0:
                streams = Streams(stdin=stdin.fileno(), begins=its_side.fileno(), **writing)
                work_and_exit(self._work, request["payload"], limits, streams, base_memory, self._around)
        watch = Watch(pid, begins, {pipe[0]: outputs[name] for name, pipe in pipes.items()}, limits)
        end = watch.until_it_ends(started + limits.wall_s, self._is_too_much)
        return {
            **end,
            "seconds": time.monotonic() - started,
            "stdout": outputs["stdout"].text(),
            "stderr": outputs["stderr"].text(),
            "result": outputs["result"].text() if end["end"] == "done" else None,
        }


def _fork() -> int:
    """Fork, also while others keep the system from starting processes for a moment.

    Raises:
        OSError: the moment does not pass.
    """
    for _ in range(_FORK_TRIES - 1):
        try:
            return os.fork()
        except OSError:
            time.sleep(_FORK_AGAIN_S)
    return os.fork()


@contextmanager
def _input_file(text: str) -> Iterator[IO[bytes]]:
    """A file with what a child is to read, in memory where the system has that: its folder may be full."""
    if sys.platform == "linux":
        opened: IO[bytes] = os.fdopen(os.memfd_create("stdin", os.MFD_ALLOW_SEALING), "r+b")
    else:
        opened = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    with opened as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        if sys.platform == "linux":
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield file


def _holds_more_than(folder: Path, limit: int) -> bool:
    """Whether a child has put more bytes or files into its folder than it may; seen by looking at all of them."""
    held, files, folders = 0, 0, [folder]
    try:
        while folders:
            for entry in _entries(folders.pop()):
                files += 1
                held += entry.stat(follow_symlinks=False).st_blocks * 512
                if held > limit or files > MAX_FILES:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
    except FileNotFoundError:  # it has just removed something
        return False
    except OSError:  # a path too long to be looked at
        return True
    return False


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        folder.chmod(0o700)
        with os.scandir(folder) as entries:
            return list(entries)


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
