"""Sandboxes that are confined processes of this machine: its programs, none of its files, no network.

They need no image, no daemon and no privileges, and are ready within a fraction of a second. Where the system cannot
confine processes that start others, there are none: this provider then refuses, whatever else might be done.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nemo_gym.paths import PARENT_DIR
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.confine import USER_NAME
from nemo_gym.sandbox.keeper import MEMORY
from nemo_gym.sandbox.memory import MemoryGroup
from nemo_gym.sandbox.process import SandboxError, SandboxUnavailableError, clean_environment
from nemo_gym.sandbox.providers.base import (
    TIMEOUT,
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)
from nemo_gym.sandbox.providers.programs import (
    MAX_OUTPUT_BYTES,
    Ended,
    copy_plain_file,
    failure,
    not_started,
    printed,
    result,
)

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from nemo_gym.sandbox.keeper import main; main()"
_READABLE = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random",
)  # fmt: skip
_START_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 30.0
_DRAIN_S = 0.5
_DEFAULT_TIMEOUT_S = 180.0
_COPY_TIMEOUT_S = 600.0
_GIBIBYTE_MB = 1024
_MEBIBYTE = 1024 * 1024
_CHUNK = 1 << 16
MEMORY_LIMITS = ("auto", "cgroup", "watch", "none")
_USERS = frozenset({USER_NAME, "1000"})


@dataclass
class Room:
    """One sandbox, from outside."""

    spec: SandboxSpec
    process: subprocess.Popen[bytes]
    orders: socket.socket
    root: Path
    folder: str
    """Where one can write, as it is called inside."""
    processors: list[int]
    loop: asyncio.AbstractEventLoop
    group: MemoryGroup | None = None
    """What bounds the memory of its processes; None where its first process does."""
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    waiting: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)
    is_gone: bool = False

    def listen(self) -> None:
        """In a thread: hand every answer to whoever waits for it, until there are no more."""
        with contextlib.suppress(wire.ConnectionLostError, OSError, ValueError):
            while True:
                answer = wire.receive(self.orders.fileno())
                self._to_loop(partial(self._answered, answer))
        self._to_loop(self._lost)

    def _to_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(call)

    def _answered(self, answer: dict[str, Any]) -> None:
        waiting = self.waiting.pop(answer["id"], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _lost(self) -> None:
        self.is_gone = True
        for number in list(self.waiting):
            self._answered({"id": number, "problem": "the sandbox has ended"})

    async def send(self, order: dict[str, Any], descriptors: list[int]) -> None:
        """Give the keeper an order.

        Raises:
            OSError: it is gone; or it does not take orders.
        """
        async with self.sending:
            await asyncio.to_thread(self._send, order, descriptors)

    def _send(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if descriptors:
            socket.send_fds(self.orders, [b"!"], descriptors)
        else:
            self.orders.send(b"!")
        wire.send(self.orders.fileno(), order)

    def close(self) -> None:
        """Kill everything inside and remove what it stood on; a second call does nothing."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            self.orders.shutdown(socket.SHUT_RDWR)
        self.orders.close()
        with contextlib.suppress(OSError):
            self.root.rmdir()
        if self.group is not None:
            self.group.remove()


class LocalProvider:
    """Sandboxes that are confined processes of this machine."""

    name = "local"

    def __init__(
        self,
        folder_mb: int = 256,
        memory_mb: int = 1024,
        processes: int = 256,
        readable: list[str] | None = None,
        memory_limit_by: str = "auto",
    ) -> None:
        """Start nothing yet.

        Args:
            folder_mb: The size of the folder to write to, which is kept in memory; a spec's `disk_gib` goes first.
            memory_mb: What all processes inside may use together; a spec's `memory_mib` goes first.
            processes: How many there may be.
            readable: Folders and files of this machine that are to be seen inside, besides its programs.
            memory_limit_by: What holds them to `memory_mb`: a control group (`cgroup`), the sandbox's first process,
                which adds up what they use (`watch`), the better of the two that this system has (`auto`), or nothing
                (`none`).
        """
        for name, value in (("folder_mb", folder_mb), ("memory_mb", memory_mb), ("processes", processes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` of the sandbox provider local must be a positive number, not {value!r}")
        if memory_limit_by not in MEMORY_LIMITS:
            raise ValueError(
                f"`memory_limit_by` of the sandbox provider local must be one of {', '.join(MEMORY_LIMITS)}, not "
                f"{memory_limit_by!r}"
            )
        self._memory_limit_by = memory_limit_by
        self._folder_mb = folder_mb
        self._memory_mb = memory_mb
        self._processes = processes
        self._readable = [*_READABLE, *(readable or [])]

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start and confine the first process of a sandbox.

        Raises:
            SandboxUnavailableError: this system cannot confine processes as needed.
            SandboxCreateError: the spec wants what confined processes do not have.
        """
        _check(spec)
        loop = asyncio.get_running_loop()
        is_unwanted = threading.Event()
        opening = asyncio.create_task(asyncio.to_thread(self._open, spec, loop, is_unwanted))
        try:
            room = await asyncio.shield(opening)
        except asyncio.CancelledError:
            is_unwanted.set()
            opening.add_done_callback(_close_unwanted)
            raise
        threading.Thread(target=room.listen, name="sandbox answers", daemon=True).start()
        handle = SandboxHandle(room.root.name, self.name, room)
        try:
            await self._make_workdir(handle)
        except BaseException:
            await asyncio.shield(self.close(handle))
            raise
        return handle

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
        stdin: bytes | None = None,
    ) -> SandboxExecResult:
        """Run a shell command; one that takes too long is killed, with all that it started."""
        if user is not None and str(user) not in _USERS:
            return failure(f"a local sandbox has one user, {USER_NAME}; commands cannot be run as {user!r}")
        outputs = [bytearray(), bytearray()]
        sinks = [_bounded(output) for output in outputs]
        limit_s = _DEFAULT_TIMEOUT_S if timeout_s is None else float(timeout_s)
        answer = await self._run(handle.raw, command, cwd, env, stdin or b"", sinks, limit_s)
        ended = Ended(bytes(outputs[0]), bytes(outputs[1]), int(answer.get("code", 1)))
        if answer.get("is_late"):
            return failure(f"the command did not end within {limit_s:g} s and was killed", TIMEOUT, ended)
        if "unfit" in answer:
            return not_started(str(answer["unfit"]))
        if "problem" in answer:
            return failure(str(answer["problem"]), partial=ended)
        if answer.get("killed"):
            ended = Ended(ended.stdout, ended.stderr + f"\nkilled: {answer['killed']}\n".encode(), ended.code)
        return result(ended)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy one file into the sandbox.

        Raises:
            RuntimeError: it could not be copied.
        """
        data = await asyncio.to_thread(source_path.read_bytes)
        target = shlex.quote(_in_workdir(target_path, handle))
        script = f'mkdir -p -- "$(dirname -- {target})" && cat > {target}'
        done = await self.exec(handle, script, stdin=data, timeout_s=_COPY_TIMEOUT_S)
        if done.return_code:
            raise RuntimeError(f"{target_path} could not be written in the sandbox: {(done.stderr or '').strip()}")

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy one file out of the sandbox.

        Raises:
            RuntimeError: it could not be copied.
        """
        said = bytearray()
        with tempfile.TemporaryDirectory(prefix="nemo-gym-download-") as folder:
            passing = Path(folder) / "file"
            with passing.open("wb") as file:
                sinks: list[Callable[[bytes], Any]] = [file.write, _bounded(said)]
                script = printed(_in_workdir(source_path, handle))
                answer = await self._run(handle.raw, script, None, None, b"", sinks, _COPY_TIMEOUT_S)
            if answer.get("code") != 0:
                why = said.decode(errors="replace").strip() or answer.get("problem", "it takes too long")
                raise RuntimeError(f"{source_path} could not be read in the sandbox: {why}")
            await asyncio.to_thread(copy_plain_file, passing, target_path, source_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Whether its first process runs."""
        room: Room = handle.raw
        return SandboxStatus.STOPPED if room.is_gone or room.process.poll() is not None else SandboxStatus.RUNNING

    async def close(self, handle: SandboxHandle) -> None:
        """Kill everything inside; what was written is gone with it."""
        await asyncio.to_thread(handle.raw.close)

    async def aclose(self) -> None:
        """Nothing is held."""

    async def _make_workdir(self, handle: SandboxHandle) -> None:
        room: Room = handle.raw
        if room.spec.workdir:
            made = await self.exec(handle, f"mkdir -p -- {shlex.quote(room.spec.workdir)}")
            if made.return_code:
                raise SandboxCreateError(
                    f"the folder {room.spec.workdir} cannot be made in a local sandbox, where only {room.folder} and "
                    f"/tmp can be written to: {(made.stderr or '').strip()}"
                )

    def _open(self, spec: SandboxSpec, loop: asyncio.AbstractEventLoop, is_unwanted: threading.Event) -> Room:
        settings = self._settings(spec)
        with contextlib.ExitStack() as unless_started:
            group = self._memory_group(settings)
            if group is not None:
                unless_started.callback(group.remove)
            root = Path(tempfile.mkdtemp(prefix="nemo-gym-sandbox-")).resolve()
            unless_started.callback(root.rmdir)
            settings["root"] = str(root)
            ours, its = socket.socketpair()
            unless_started.callback(ours.close)
            process = _started(its, root, settings, group)
            unless_started.pop_all()
        room = Room(spec, process, ours, root, "", _processors(spec.limits.cpu), loop, group)
        try:
            hello = _introduced(room, settings)
            self._check_memory_limit(hello)
            if not hello["holds"]:
                problems = "; ".join(f"{layer}: {why}" for layer, why in hello["problems"].items())
                raise SandboxUnavailableError(
                    f"processes that start others cannot be confined here ({problems}). A local sandbox takes "
                    "unprivileged user namespaces and seccomp; use another sandbox provider, such as docker"
                )
        except BaseException:
            room.close()
            raise
        room.folder = hello["folder"]
        if is_unwanted.is_set():  # the event loop may be gone by now
            room.close()
        return room

    def _settings(self, spec: SandboxSpec) -> dict[str, Any]:
        """Return what the first process of a sandbox is told."""
        limits = spec.limits
        return {
            "readable": [path for path in dict.fromkeys(self._readable) if Path(path).exists()],
            "folder_mb": limits.disk_gib * _GIBIBYTE_MB if limits.disk_gib else self._folder_mb,
            "memory_mb": limits.memory_mib or self._memory_mb,
            "memory_limit_by": self._memory_limit_by,
            "processes": self._processes,
            "ttl_s": spec.ttl_s,
        }

    def _memory_group(self, settings: Mapping[str, Any]) -> MemoryGroup | None:
        """Make the control group of a sandbox, if this system lets us and it is wanted."""
        if self._memory_limit_by not in ("auto", "cgroup"):
            return None
        try:
            return MemoryGroup.make(settings["memory_mb"] * _MEBIBYTE, int(settings["folder_mb"]) * _MEBIBYTE)
        except OSError as error:
            if self._memory_limit_by == "cgroup":
                raise SandboxUnavailableError(_no_memory_limit(error)) from error
            return None

    def _check_memory_limit(self, hello: Mapping[str, Any]) -> None:
        problem = hello["problems"].get(MEMORY)
        if self._memory_limit_by == "cgroup" and hello["memory_bounded_by"] != "cgroup":
            problem = "processes may not be put into a control group"
        if problem:
            raise SandboxUnavailableError(_no_memory_limit(problem))

    async def _run(
        self,
        room: Room,
        command: str,
        cwd: str | None,
        env: dict[str, str] | None,
        stdin: bytes,
        sinks: list[Callable[[bytes], Any]],
        limit_s: float,
    ) -> dict[str, Any]:
        """Have the keeper start a command, and carry what it says; the keeper's answer, or why there is none."""
        number = next(room.numbers)
        order = {
            "id": number,
            "arguments": [_shell(), "-c", command],
            "cwd": os.path.join(room.folder, cwd or ""),  # noqa: PTH118 - an absolute `cwd` is taken as it is
            "env": {**_variables(room.folder), **_texts(room.spec.env), **_texts(env or {})},
            "processors": room.processors,
        }
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        room.waiting[number] = answered
        async with _Streams(stdin, sinks) as streams:
            try:
                if room.is_gone:
                    return {"problem": "the sandbox has ended"}
                await room.send(order, streams.its_ends)
                streams.close_its_ends()
                async with asyncio.timeout(limit_s):
                    return await asyncio.shield(answered)
            except TimeoutError:
                await self._kill(room, number, answered)
                return {"is_late": True}
            except OSError as error:
                return {"problem": f"the sandbox does not take commands: {error}"}
            except asyncio.CancelledError:
                await asyncio.shield(self._kill(room, number, answered))
                raise
            finally:
                room.waiting.pop(number, None)

    async def _kill(self, room: Room, number: int, answered: "asyncio.Future[dict[str, Any]]") -> None:
        """Have a command killed; if that does not work, everything is."""
        try:
            await room.send({"kill": number}, [])
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await asyncio.shield(answered)
        except (TimeoutError, OSError):
            await asyncio.to_thread(room.close)


class _Streams:
    """The pipes to a command: fed and heard while it runs, and a moment longer for what is still in them."""

    def __init__(self, stdin: bytes, sinks: list[Callable[[bytes], Any]]) -> None:
        self._stdin = stdin
        self._sinks = sinks
        self.its_ends: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "_Streams":
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.its_ends.append(reading)
        self._tasks.append(asyncio.create_task(_feed(writing, self._stdin)))
        for sink in self._sinks:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            self.its_ends.append(writing)
            self._tasks.append(asyncio.create_task(_hear(reading, sink)))
        return self

    def close_its_ends(self) -> None:
        """They are the command's now."""
        for descriptor in self.its_ends:
            os.close(descriptor)
        self.its_ends = []

    async def __aexit__(self, *_: object) -> None:
        self.close_its_ends()
        await asyncio.wait(self._tasks[1:], timeout=_DRAIN_S)  # whoever still holds them open is not waited for
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _hear(descriptor: int, sink: Callable[[bytes], Any]) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        while part := await reader.read(_CHUNK):
            sink(part)
    finally:
        transport.close()


async def _feed(descriptor: int, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb"))
    try:
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        with contextlib.suppress(OSError):  # it does not read
            for start in range(0, len(data), _CHUNK):
                writer.write(data[start : start + _CHUNK])
                await writer.drain()
    finally:
        transport.close()


def _started(
    orders: socket.socket, root: Path, settings: dict[str, Any], group: MemoryGroup | None
) -> "subprocess.Popen[bytes]":
    """Start the first process of a sandbox, and hand on what it needs of the control group."""
    with orders, contextlib.ExitStack() as opened:
        descriptors = opened.enter_context(group.opened()) if group else []
        settings["group"] = {"version": group.version, "descriptors": descriptors} if group else None
        return subprocess.Popen(
            [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", _BOOT, str(PARENT_DIR)],
            stdin=orders.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=clean_environment(root),
            start_new_session=True,
            pass_fds=descriptors,
        )


def _introduced(room: Room, settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        wire.send(room.orders.fileno(), settings)
        hello: dict[str, Any] = wire.receive(room.orders.fileno(), room.spec.ready_timeout_s or _START_TIMEOUT_S)
    except (wire.ConnectionLostError, wire.TooLateError, OSError) as error:
        raise SandboxError(f"the first process of a local sandbox did not start{_said(error)}") from error
    return hello


def _no_memory_limit(why: object) -> str:
    return (
        f"the memory of a local sandbox cannot be limited here ({why}); use another sandbox provider, such as docker, "
        "or set `memory_limit_by: auto`, or `none` to run commands without such a limit"
    )


def _in_workdir(path: str, handle: SandboxHandle) -> str:
    """A path inside that needs no working directory, which may have been removed."""
    return os.path.join(handle.raw.spec.workdir or "", path)  # noqa: PTH118 - an absolute path is taken as it is


def _bounded(output: bytearray) -> Callable[[bytes], None]:
    """Keeps what there is room for."""

    def take(part: bytes) -> None:
        output.extend(part[: MAX_OUTPUT_BYTES - len(output)])

    return take


def _check(spec: SandboxSpec) -> None:
    wanted: dict[str, Any] = {"image": spec.image, "ports": spec.ports, "gpu": spec.limits.gpu}
    wanted |= {"entrypoint": spec.entrypoint, "provider_options": spec.provider_options}
    if refused := [name for name, value in wanted.items() if value]:
        raise SandboxCreateError(
            f"a local sandbox has no {', '.join(refused)}: it runs this machine's programs without a network; leave "
            "that out of the sandbox's spec, or use another provider, such as docker"
        )


def _processors(cpu: float | None) -> list[int]:
    """Those that a sandbox may run on; all when empty."""
    if cpu is None:
        return []
    own = sorted(os.sched_getaffinity(0))
    return random.sample(own, min(len(own), max(1, math.ceil(cpu))))


def _shell() -> str:
    return "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


def _variables(folder: str) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": folder,
        "TMPDIR": "/tmp",
        "USER": USER_NAME,
        "LANG": "C.UTF-8",
    }


def _texts(env: Mapping[str, Any]) -> dict[str, str]:
    """Variables as a process takes them: a config has numbers, too."""
    return {name: str(value) for name, value in env.items()}


def _close_unwanted(opening: "asyncio.Task[Room]") -> None:
    """Whoever wanted the room has been cancelled; a thread goes on until it is open."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _said(error: Exception) -> str:
    return f" ({error})" if str(error) else ""
