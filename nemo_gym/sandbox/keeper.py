"""The first process inside a local sandbox: it starts commands, kills them with all they started, and watches.

It is confined before it starts anything (`nemo_gym.sandbox.confine`), and nothing inside can end it: the kernel
protects the first process of a namespace from the others. When it ends, because its sandbox is closed or whoever asked
for it is gone, the kernel kills everything inside.
"""

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nemo_gym.sandbox import wire
from nemo_gym.sandbox.confine import FOLDER_INSIDE, NAMESPACES, SECCOMP, Confinement, confine_commands
from nemo_gym.sandbox.memory import JoinedGroup, MappedMemory, largest_socket_bytes
from nemo_gym.sandbox.seccomp import PR_SET_DUMPABLE, answer_question, ask_for_shared_memory, prctl, receive_question

_LOOK_EVERY_S = 0.1
_LOOK_AT_GROUP_EVERY_S = 0.02
_KILL_PASSES = 100
_OPEN_FILES, _OPEN_FILES_UNCOUNTED = 4096, 1024
_MEBIBYTE = 1024 * 1024
_UNFIT = b"!"
"""Before what a child tells of a command that nobody could start."""
STREAMS = 3
MEMORY = "memory"
NEEDED = (NAMESPACES, "processes", SECCOMP, "new namespaces", MEMORY)


@dataclass
class Running:
    """A command that has been started."""

    number: int
    pid: int
    started: int
    """When, in the kernel's ticks."""
    why_killed: str = ""


class Process(NamedTuple):
    """What `/proc` tells of a process inside."""

    pid: int
    parent: int
    session: int
    started: int
    is_zombie: bool


class MemoryLimit:
    """The memory that all processes inside may use together, and what bounds it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.bytes = int(settings["memory_mb"]) * _MEBIBYTE
        self.bounded_by = str(settings["memory_limit_by"])
        self.group: JoinedGroup | None = None
        self._socket_bytes = largest_socket_bytes()  # while the machine's settings are in sight
        self._mapped: MappedMemory | None = None
        self.asked_at: list[int] = []
        """A descriptor with questions for shared mappings, where these are counted."""
        if settings["group"] is not None:
            group = JoinedGroup(settings["group"]["version"], settings["group"]["descriptors"])
            if group.can_be_joined():
                self.group = group
                self.bounded_by = "cgroup"

    def put_on(self) -> None:
        """Forbid what could not be counted, where no control group counts it.

        Raises:
            OSError: this system does not allow it.
        """
        if self.group is None and self.bounded_by != "none":
            self._mapped = MappedMemory(self._socket_bytes)
            self.asked_at.append(ask_for_shared_memory())
            self.bounded_by = "watch"

    def is_exceeded(self, inside: list[Process]) -> bool:
        """Return whether the processes inside use more, or have used so much more that the kernel has ended some."""
        if self.group is not None:
            return self.group.has_killed() or self.group.used_bytes(FOLDER_INSIDE) > self.bytes
        if self._mapped is None:
            return False
        return self._mapped.used_bytes((each.pid for each in inside), self.bytes) > self.bytes

    def answer(self) -> bool:
        """Answer a process that asks for a shared mapping; return whether it is time to look at what all use."""
        assert self._mapped is not None
        for listener in self.asked_at:
            with contextlib.suppress(OSError):  # it was interrupted, and asks again, or it is gone
                question = receive_question(listener)
                is_granted = self._mapped.grants(question, self.bytes)
                answer_question(listener, question, 0 if is_granted else errno.ENOMEM)
        return self._mapped.shared.may_hold > self.bytes

    @property
    def open_files(self) -> int:
        """Number of files that a process may have open; fewer where sockets sent to others are not counted."""
        return _OPEN_FILES if self._mapped is None else _OPEN_FILES_UNCOUNTED


class Keeper:
    """Everything that runs inside."""

    def __init__(self, orders: socket.socket, settings: dict[str, Any], memory: MemoryLimit) -> None:
        self._orders = orders
        self._memory = memory
        self._processes = int(settings["processes"])
        self._until = None if settings["ttl_s"] is None else time.monotonic() + float(settings["ttl_s"])
        self._running: dict[int, Running] = {}
        self._owners: dict[int, int] = {}
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Take orders until the other side goes or the time is over."""
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        orders = self._orders.fileno()
        while self._until is None or time.monotonic() < self._until:
            inside = self._look()
            waits = [_LOOK_EVERY_S] if inside or self._running else []
            waits += [] if self._until is None else [max(0.0, self._until - time.monotonic())]
            readable = self._wait_for([orders, self._woken], min(waits) if waits else None)
            if self._woken in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            if orders in readable:
                self._take_order()
            self._bury()

    def _wait_for(self, descriptors: list[int], timeout_s: float | None) -> list[int]:
        """Wait for something to read, and see to the memory meanwhile as far as that is quickly done."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            is_watched = left_s is not None and self._memory.group is not None
            step_s = min(left_s or 0.0, _LOOK_AT_GROUP_EVERY_S) if is_watched else left_s
            readable, _, _ = select.select([*descriptors, *self._memory.asked_at], [], [], step_s)
            if set(readable) & set(self._memory.asked_at):
                is_time_to_look = self._memory.answer()
                readable = [each for each in readable if each in descriptors]
                if readable or is_time_to_look or left_s == 0:
                    return readable
                continue
            if readable or not is_watched or step_s == left_s:
                return readable
            self._check_memory([])

    def _take_order(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._orders, 1, STREAMS)
        if not message:
            raise wire.ConnectionLostError
        order = wire.receive(self._orders.fileno())
        if "kill" in order:
            self._kill(int(order["kill"]))
            return
        try:
            self._start(order, descriptors)
        except OSError as error:
            self._tell({"id": order["id"], "problem": f"no process could be started: {error.strerror}"})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, order: dict[str, Any], streams: list[int]) -> None:
        try:
            folder = os.open(order["cwd"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            self._tell({"id": order["id"], "unfit": f"{order['cwd']}: {error.strerror}"})
            return
        hears, tells = os.pipe2(os.O_CLOEXEC)
        with os.fdopen(hears, "rb") as told:
            try:
                pid = os.fork()
                if pid == 0:
                    _become(order, folder, streams, tells, self._memory)
            finally:
                os.close(folder)
                os.close(tells)
            why = told.read()  # its end is closed as it becomes the command
        if why:
            kind = "unfit" if why.startswith(_UNFIT) else "problem"
            message = f"the command cannot be started: {why.removeprefix(_UNFIT).decode()}"
            self._tell({"id": order["id"], kind: message})
            return
        found = _process(pid)
        self._owners[pid] = order["id"]
        self._running[order["id"]] = Running(order["id"], pid, found.started if found else 0)

    def _look(self) -> list[Process]:
        """Note whose every process is, and end everything if it is too much; those that are there."""
        inside = _inside()
        known: dict[int, int] = {}
        for process in inside:
            owner = self._owners.get(process.pid, self._owners.get(process.parent, self._owners.get(process.session)))
            if owner is not None:
                known[process.pid] = owner
        self._owners = known
        if len(inside) > self._processes:
            self._end_all(f"more than {self._processes} processes")
        else:
            self._check_memory(inside)
        return inside

    def _check_memory(self, inside: list[Process]) -> None:
        if self._memory.is_exceeded(inside):
            self._end_all(f"more than {self._memory.bytes // _MEBIBYTE} MiB of memory")

    def _end_all(self, why: str) -> None:
        for each in self._running.values():
            each.why_killed = why
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def _kill(self, number: int) -> None:
        """Kill a command with everything it started: what is known to be its, and what nobody knows the owner of.

        The latter only if it is younger than the command; so what earlier commands left in the background stays.
        """
        command = self._running.get(number)
        if command is None:
            return
        for _ in range(_KILL_PASSES):
            victims = [each.pid for each in self._look() if self._is_of(each, command) and not each.is_zombie]
            if not victims:
                return
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._bury()

    def _is_of(self, process: Process, command: Running) -> bool:
        owner = self._owners.get(process.pid)
        return owner == command.number or (owner is None and process.started >= command.started)

    def _bury(self) -> None:
        if self._memory.group is not None:
            self._check_memory([])  # before a command is said to have ended by itself
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for number, command in list(self._running.items()):
                if command.pid == pid:
                    del self._running[number]
                    code = -signal.SIGKILL if command.why_killed else os.waitstatus_to_exitcode(status)
                    self._tell({"id": number, "code": 128 - code if code < 0 else code, "killed": command.why_killed})

    def _tell(self, answer: dict[str, Any]) -> None:
        wire.send(self._orders.fileno(), answer)


def _become(order: dict[str, Any], folder: int, streams: list[int], tells: int, memory: MemoryLimit) -> None:
    """In the child: become the command, or tell why that cannot be."""
    try:
        if memory.group is not None:
            memory.group.join()
        os.setsid()
        os.fchdir(folder)
        for target, source in enumerate(streams):
            os.dup2(source, target + 100)
        for target in range(STREAMS):
            os.dup2(target + 100, target)
        os.closerange(STREAMS, tells)
        os.closerange(tells + 1, _OPEN_FILES)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _set_limits(memory, order["processors"])
        os.execve(order["arguments"][0], order["arguments"], order["env"])
    except BaseException as error:  # noqa: BLE001 - whatever it is, this is no second keeper
        is_unfit = isinstance(error, ValueError) or getattr(error, "errno", None) == errno.E2BIG
        os.write(tells, (_UNFIT if is_unfit else b"") + str(error).encode(errors="replace"))
    finally:
        os._exit(126)


def _set_limits(memory: MemoryLimit, processors: list[int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory.bytes, memory.bytes))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = memory.open_files if most == resource.RLIM_INFINITY else min(most, memory.open_files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if processors:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, processors)


def _inside() -> list[Process]:
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    return [found for pid in pids if pid != 1 and (found := _process(pid)) is not None]


def _process(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] == "Z")


def _told(confinement: Confinement, memory: MemoryLimit) -> dict[str, Any]:
    holds = all(layer in confinement.layers for layer in NEEDED)
    told = {"holds": holds, "problems": confinement.problems, "folder": str(FOLDER_INSIDE)}
    return {**told, "memory_bounded_by": memory.bounded_by}


def main() -> None:
    """Confine this process, say what came of it, and serve, orders on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    try:
        settings = wire.receive(orders.fileno())
        readable = [Path(path) for path in settings["readable"]]
        memory = MemoryLimit(settings)
        confinement = confine_commands(Path(settings["root"]), readable, int(settings["folder_mb"]) * _MEBIBYTE)
        if NAMESPACES in confinement.layers:
            prctl(PR_SET_DUMPABLE, 0)  # nothing inside may look into this process
            confinement.attempt(MEMORY, memory.put_on)
        answer = _told(confinement, memory)
        wire.send(orders.fileno(), answer)
        if answer["holds"]:
            Keeper(orders, settings, memory).serve()
    except (wire.ConnectionLostError, OSError):
        sys.exit(1)
