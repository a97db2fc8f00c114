"""How much memory the processes of a sandbox use together, and what bounds it.

A control group counts whatever the kernel hands out: private and shared memory, files in memory, buffers of pipes.
It is made outside of the sandbox, beside or below the control group of this process, if the system lets us write there.
Elsewhere the first process of the sandbox adds up what the others have mapped (`MappedMemory`), and seccomp denies the
memory that this sum would miss and has shared mappings asked for (`seccomp.ask_for_shared_memory`).
"""

import contextlib
import mmap
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nemo_gym.sandbox.seccomp import MAP_ANONYMOUS, MAP_HUGETLB, Question

_NAME = "nemo-gym-sandbox"
_NAME_OF_GROUP = re.compile(rf"{_NAME}-(\d+)-\w+")
_BESIDES_BYTES = 64 * 1024 * 1024
"""What the kernel may keep for processes and files besides their contents."""
_REMOVE_WITHIN_S = 5.0
_REMOVE_AGAIN_S = 0.005
_PRIVATE = ("RssAnon:", "VmSwap:", "HugetlbPages:", "VmPTE:")
_PIPE_BYTES = 8192
"""What the kernel grants a pipe of a user whose pipes hold 64 MB together."""
_PROC = Path("/proc")
_USUAL_SOCKET_BYTES = 212_992


class _Version(NamedTuple):
    """The names of the same things in both versions of control groups."""

    limit: str
    counters: tuple[str, ...]
    """Of `memory.stat`: private and shared memory, files in memory included, but no files that are only cached."""
    kills_file: str
    kills: str


_V1 = _Version("memory.limit_in_bytes", ("total_rss", "total_shmem", "total_swap"), "memory.oom_control", "oom_kill")
_V2 = _Version("memory.max", ("anon", "shmem"), "memory.events", "oom")
_VERSIONS = {1: _V1, 2: _V2}
_STAT, _MEMBERS = "memory.stat", "cgroup.procs"


@dataclass(frozen=True)
class MemoryGroup:
    """A control group for the processes of one sandbox, seen by whoever made it."""

    folder: Path
    version: int

    @classmethod
    def make(cls, memory_bytes: int, folder_bytes: int, system: Path = Path("/")) -> "MemoryGroup":
        """Make one whose processes may use so much memory and, in a file system in memory, so much for files.

        The kernel does not tell files in memory from other shared memory when it ends processes, so the limit is the
        sum; that processes use no more than `memory_bytes` is for the one who looks at `JoinedGroup.used_bytes`.

        Raises:
            OSError: this system has no control group that we may write to.
        """
        errors: list[OSError] = []
        for version, parent in _parents(system):
            try:
                _remove_forgotten(parent)
                group = cls(parent / f"{_NAME}-{os.getpid()}-{secrets.token_hex(4)}", version)
                group.folder.mkdir()
            except OSError as error:
                errors.append(error)
                continue
            try:
                group._set_limits(memory_bytes + folder_bytes + _BESIDES_BYTES)
            except OSError as error:
                errors.append(error)
                group.remove()
                continue
            return group
        raise errors[0] if errors else OSError("no control group that we may write to limits memory")

    def _set_limits(self, limit: int) -> None:
        (self.folder / _VERSIONS[self.version].limit).write_text(str(limit))
        if self.version == 2:
            if not _write_if_there(self.folder / "memory.swap.max", "0") and _has_swap():
                raise OSError("control groups of this system do not limit swap")
            _write_if_there(self.folder / "memory.oom.group", "1")
        else:
            _write_if_there(self.folder / "memory.swappiness", "0")
            _write_if_there(self.folder / "memory.memsw.limit_in_bytes", str(limit))

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[int]]:
        """Open what `JoinedGroup` takes, for a process that cannot see the group's folder."""
        names = ((_MEMBERS, os.O_WRONLY), (_STAT, os.O_RDONLY), (_VERSIONS[self.version].kills_file, os.O_RDONLY))
        with contextlib.ExitStack() as stack:
            descriptors = []
            for name, flags in names:
                descriptors.append(os.open(self.folder / name, flags | os.O_CLOEXEC))
                stack.callback(os.close, descriptors[-1])
            yield descriptors

    def remove(self) -> None:
        """Remove it as soon as its last process has ended, which is waited for; a second call does nothing."""
        deadline = time.monotonic() + _REMOVE_WITHIN_S
        while True:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() >= deadline:
                    return  # whoever makes the next one removes it
                time.sleep(_REMOVE_AGAIN_S)
            else:
                return


class JoinedGroup:
    """The control group of a sandbox, seen by the sandbox's first process, which is not in it."""

    def __init__(self, version: int, descriptors: list[int]) -> None:
        """Take over what `MemoryGroup.opened` has opened."""
        self._version = _VERSIONS[version]
        self._members, self._stat, self._kills_file = descriptors
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._kills_seen = self._kills()

    def join(self) -> None:
        """Put the calling process and its later children into the group.

        Raises:
            OSError: the system does not allow it.
        """
        os.write(self._members, b"0")

    def can_be_joined(self) -> bool:
        """Return whether a child of this process may join the group."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self.join()
                code = 0
            finally:
                os._exit(code)
        return os.waitpid(pid, 0)[1] == 0

    def used_bytes(self, folder: Path) -> int:
        """Return the memory that its processes use, without the files below `folder`, a file system in memory."""
        counters = _counters_in(os.pread(self._stat, 1 << 16, 0))
        files = os.statvfs(folder)
        in_files = (files.f_blocks - files.f_bfree) * files.f_bsize
        return sum(counters.get(name, 0) for name in self._version.counters) - in_files

    def has_killed(self) -> bool:
        """Return whether the kernel has ended processes of the group since the last time, for want of memory."""
        kills = self._kills()
        is_new = kills > self._kills_seen
        self._kills_seen = kills
        return is_new

    def _kills(self) -> int:
        return _counters_in(os.pread(self._kills_file, 1 << 12, 0)).get(self._version.kills, 0)


def device_of_shared_memory() -> str:
    """Return the device, as `/proc/<pid>/maps` has it, of all shared memory that is no file of a mounted file system.

    Raises:
        OSError: the kernel does not tell.
    """
    before = _shared_mappings()
    with mmap.mmap(-1, mmap.PAGESIZE):
        devices = {device for device, _ in _shared_mappings() - before}
    if len(devices) != 1:
        raise OSError("/proc/self/maps does not tell which mappings are shared memory")
    return devices.pop()


def _shared_mappings() -> set[tuple[str, str]]:
    """Find the device and the inode of every shared mapping of this process."""
    lines = ((line.split(maxsplit=5)) for line in (_PROC / "self/maps").read_text(errors="replace").splitlines())
    return {(words[3], words[4]) for words in lines if words[1].endswith("s")}


def largest_socket_bytes() -> int:
    """Return how much may wait in one socket until it is read."""
    sizes = []
    for name, factor in (("wmem_default", 1), ("wmem_max", 2)):  # the kernel doubles what a program asks for
        try:
            sizes.append(factor * int((_PROC / "sys/net/core" / name).read_text()))
        except (OSError, ValueError):
            sizes.append(factor * _USUAL_SOCKET_BYTES)
    return max(sizes)


class SharedMemory:
    """The most that shared memory can hold, of which parts may no longer be mapped by any process.

    The kernel keeps all pages of shared memory as long as one of them is mapped. So memory counts with the length that
    was asked for, not only with what `/proc/<pid>/maps` shows. Which memory was asked for when is not known: what
    appears between two looks counts with the greatest lengths that were asked for meanwhile or shortly before.
    """

    def __init__(self) -> None:
        self._asked: list[int] = []
        """Lengths that were asked for since the last look."""
        self._late: list[int] = []
        """Lengths that were asked for before it, of memory that had not appeared."""
        self._greatest = 0
        self._appeared: list[tuple[list[int], set[str]]] = []
        """The lengths, the greatest first, and the inodes of memory that appeared between two looks."""
        self._counted = 0

    @property
    def may_hold(self) -> int:
        """Bytes that all of it may hold by now."""
        return self._counted + sum(self._asked)

    def ask(self, length: int, *, is_memory: bool) -> None:
        """Note the length of a mapping that is about to be made, of memory or, as far as could be seen, of a file."""
        self._greatest = max(self._greatest, length)
        if is_memory:
            self._asked.append(length)

    def look(self, mapped: Mapping[str, int]) -> int:
        """Return the most that the memory may hold of which so much is mapped, by inode."""
        self._appeared = [(lengths, left) for lengths, seen in self._appeared if (left := seen & mapped.keys())]
        new = mapped.keys() - {inode for _, seen in self._appeared for inode in seen}
        if new:
            lengths = sorted(self._asked + self._late, reverse=True)[: len(new)]
            self._appeared.append((lengths + [self._greatest] * (len(new) - len(lengths)), new))
        self._late = sorted(self._asked)[: max(0, len(self._asked) - len(new))]
        self._asked = []
        self._counted = sum(
            max(sum(lengths[: len(seen)]), sum(mapped[inode] for inode in seen)) for lengths, seen in self._appeared
        )
        return self._counted


class MappedMemory:
    """The memory of processes, added up without a control group."""

    def __init__(self, socket_bytes: int) -> None:
        """Take how much may wait in one socket, see `largest_socket_bytes`.

        Raises:
            OSError: the kernel does not tell which mappings are shared memory.
        """
        self._buffers = {"socket": socket_bytes, "pipe": _PIPE_BYTES}
        self._shared_device = device_of_shared_memory()
        self.shared = SharedMemory()

    def used_bytes(self, pids: Iterable[int], limit: int) -> int:
        """Return the memory that processes have: what is private, tables of pages included, and once each what they
        share.

        Shared memory counts whole, for the kernel keeps what no process has touched lately; sockets and pipes count
        with all that they can hold. Where a process cannot be looked into, all of its address space counts. A sum above
        `limit` may be incomplete.
        """
        shared: dict[str, int] = {}
        others: dict[str, int] = {}
        private, seen = 0, []
        for pid in pids:
            status = _status_of(pid)
            if status:
                seen.append((pid, status.get("VmSize:", 0)))
                private += sum(status.get(name, 0) for name in _PRIVATE)
        for pid, address_space in seen:
            if private + sum(shared.values()) + sum(others.values()) > limit:
                break
            try:
                _add_shared((_PROC / str(pid) / "maps").read_text(errors="replace"), self._shared_device, shared)
                _add_buffers(pid, self._buffers, others)
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            except OSError:
                others[f"process {pid}"] = address_space
        return private + sum(others.values()) + self.shared.look(shared)

    def grants(self, question: Question, limit: int) -> bool:
        """Return whether a process may have the shared mapping that it asks for, of memory or of a file."""
        _, length, _, flags, descriptor, _ = question.arguments
        is_memory = bool(flags & MAP_ANONYMOUS) or _is_dev_zero(question.thread, descriptor & 0xFFFFFFFF)
        if is_memory and (length > limit or flags & MAP_HUGETLB):
            return False
        self.shared.ask(length, is_memory=is_memory)
        return True


def _is_dev_zero(pid: int, descriptor: int) -> bool:
    """Return whether a file is `/dev/zero`, or cannot be looked at."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}") == "/dev/zero"  # noqa: PTH115 - each is a name, not a path
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _add_buffers(pid: int, sizes: Mapping[str, int], others: dict[str, int]) -> None:
    descriptors = f"/proc/{pid}/fd"
    for name in os.listdir(descriptors):  # noqa: PTH208 - each is a name, not a path
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(f"{descriptors}/{name}")  # noqa: PTH115
            size = sizes.get(target.partition(":")[0])
            if size is not None:
                others[target] = size


def _add_shared(maps: str, shared_device: str, shared: dict[str, int]) -> None:
    for line in maps.splitlines():
        if f" {shared_device} " not in line:
            continue
        addresses, _, offset, device, inode, *_ = line.split(maxsplit=5)
        if device == shared_device:
            first, _, last = addresses.partition("-")
            end = int(offset, 16) + int(last, 16) - int(first, 16)
            shared[inode] = max(shared.get(inode, 0), end)


def _status_of(pid: int) -> dict[str, int]:
    """Return bytes by name; nothing for a process that has ended."""
    return _status_lines(_PROC / str(pid) / "status")


def _status_lines(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {word[0]: int(word[1]) * 1024 for word in words if len(word) == 3 and word[2] == "kB"}


def _counters_in(data: bytes) -> dict[str, int]:
    words = (line.split() for line in data.decode().splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) == 2}


def _write_if_there(file: Path, text: str) -> bool:
    """Write a setting that not every kernel has; return whether this one has it."""
    try:
        with file.open("r+") as stream:
            stream.write(text)
    except FileNotFoundError:
        return False
    return True


def _has_swap() -> bool:
    return _status_lines(_PROC / "meminfo").get("SwapTotal:", 0) > 0


def _parents(system: Path) -> Iterator[tuple[int, Path]]:
    """Find the groups in which a new one may be made, with their version."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = system / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield 1, mounted / "memory" / path.lstrip("/")
        elif not controllers:
            root = mounted / "unified" if (mounted / "unified").exists() else mounted
            for parent in _delegating(root, root / path.lstrip("/")):
                yield 2, parent


def _delegating(root: Path, group: Path) -> Iterator[Path]:
    """Find the groups, from `group` upwards, whose new children limit memory.

    A group that has processes of its own cannot have such children, so one further up is needed. No group with a limit
    is left on the way.
    """
    while group.is_relative_to(root):
        if "memory" in _words_of(group / "cgroup.subtree_control"):
            yield group
        if _words_of(group / "memory.max") not in ([], ["max"]):
            return
        group = group.parent


def _words_of(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _remove_forgotten(parent: Path) -> None:
    """Remove groups of processes that were killed before they could do so."""
    for group in parent.glob(f"{_NAME}-*"):
        made_by = _NAME_OF_GROUP.fullmatch(group.name)
        if made_by and not (_PROC / made_by[1]).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
