"""The layers that keep a process to itself, the order in which they are put on, and which of them this system allows.

Linux namespaces, entered without privileges, give it a file system that has only what is named, read-only, with one
bounded folder in memory to write to, a network without any connection, and process numbers of its own. Landlock,
which any process may use to restrict itself for ever, says which files may be opened. Each of the two keeps a
process away from files; seccomp keeps it away from the network, from other processes and from the rest of the
kernel. A process is confined when seccomp and at least one of the other two hold. Landlock may be of any version:
what only its newer ones deny (emptying files, devices, signals, abstract sockets), seccomp denies, too.
"""

import ctypes
import errno
import os
import platform
import signal
import stat
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym.sandbox import seccomp
from nemo_gym.sandbox.seccomp import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, call, drop_capabilities, prctl, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_ALL_OF_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_MAKE_DEVICES = 1 << 6 | 1 << 11  # character and block devices
_READ = _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_NEW_USER, _NEW_NET, _NEW_MOUNT, _NEW_IPC, _NEW_UTS, _NEW_PID = (
    0x10000000, 0x40000000, 0x00020000, 0x08000000, 0x04000000, 0x20000000,
)  # fmt: skip
_NOSUID, _NODEV, _NOEXEC, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_ATTRIBUTE_READ_ONLY, _ATTRIBUTE_NOSUID = 1, 2
_AT_CWD = -100
_USER_INSIDE = 1000
USER_NAME = "sandbox"
_OLD_PROC = ".proc-of-the-machine"
FOLDER_INSIDE = Path("/nemo-gym-sandbox")
NAMESPACES, LANDLOCK, SECCOMP = "namespaces", "landlock", "seccomp"
LAYERS = (NAMESPACES, LANDLOCK, SECCOMP)
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/usr/share/zoneinfo", "/etc/localtime")


def landlock_version() -> int:
    """The version of Landlock the kernel offers; 0 when it offers none."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict_files(readable: Iterable[Path], writable: Iterable[Path], *, for_commands: bool = False) -> None:
    """Allow reading below `readable`, reading and writing below `writable`, and no other access to files.

    With `for_commands`, programs there may be executed and every folder listed. No TCP connection either, nor signals
    to processes outside, where the kernel can deny them.

    Raises:
        OSError: the kernel has no Landlock.
    """
    known = landlock_version()
    if not known:
        raise OSError(errno.ENOSYS, "Landlock is not offered by this kernel")
    every = _ALL_OF_VERSION[max(number for number in _ALL_OF_VERSION if number <= known)]
    rules = struct.pack("@QQQ", every, _TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = rules[: 8 if known < 4 else 16 if known < 6 else 24]
    execute = _EXECUTE if for_commands else 0
    ruleset = syscall(_CREATE_RULESET, ctypes.create_string_buffer(rules, len(rules)), len(rules), 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ | execute)
        for path in writable:
            _allow(ruleset, path, every & ~(_EXECUTE | _IOCTL | _MAKE_DEVICES) | execute)
        if for_commands:
            _allow(ruleset, Path("/"), _READ_DIR)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = struct.pack("=Qi", access if is_folder else access & _OF_FILES, descriptor)
        syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
    finally:
        os.close(descriptor)


def enter_namespaces(root: Path, readable: Iterable[Path], folder_bytes: int, for_commands: bool = False) -> None:
    """Leave everything behind but `readable`; children of this process get process numbers of their own.

    Args:
        root: An empty folder, hidden from others by what is mounted on it.
        readable: Files and folders that stay, at the same place.
        folder_bytes: The size of `FOLDER_INSIDE`, the only place to write to.
        for_commands: Whether there is to be what ordinary programs expect: `/tmp`, a place for `/proc`, their user's
            name, and a folder that programs can be started from.

    Raises:
        OSError: the system does not allow it. The process is then in an undefined state: try in a child first.
    """
    machine = platform.machine()
    if machine not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, f"system calls of {machine or 'this machine'} are not known here")
    user, group = os.geteuid(), os.getegid()
    call("unshare", _NEW_USER | _NEW_NET | _NEW_MOUNT | _NEW_IPC | _NEW_UTS | _NEW_PID)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_USER_INSIDE} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{_USER_INSIDE} {group} 1")
    _mount("none", Path("/"), None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    folder = _inside(FOLDER_INSIDE, root)
    folder.mkdir()
    flags, files = (_NOSUID | _NODEV, 1 << 17) if for_commands else (_NOSUID | _NODEV | _NOEXEC, 4096)
    _mount("tmpfs", folder, "tmpfs", flags, f"size={folder_bytes},nr_inodes={files},mode=700")
    if for_commands:
        _furnish(root, folder)
    for path in readable:
        _keep(path, root)
    os.chdir(root)
    syscall(_PIVOT_ROOT[machine], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    call("umount2", ctypes.c_char_p(b"."), _DETACH)
    os.chdir(FOLDER_INSIDE)
    _make_read_only(Path("/"), 0)


def _furnish(root: Path, folder: Path) -> None:
    """What ordinary programs expect besides libraries."""
    for name in ("tmp", "proc", "dev", "etc", _OLD_PROC):
        (root / name).mkdir(exist_ok=True)
    _mount("/proc", root / _OLD_PROC, None, _BIND | _RECURSIVE)
    (folder / ".tmp").mkdir(mode=0o700)
    _mount(str(folder / ".tmp"), root / "tmp", None, _BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (root / "dev" / name).symlink_to(target)
    name, number = USER_NAME, _USER_INSIDE
    (root / "etc/passwd").write_text(f"{name}:x:{number}:{number}::{FOLDER_INSIDE}:/bin/sh\n")
    (root / "etc/group").write_text(f"{name}:x:{number}:\n")


def show_processes() -> None:
    """Mount `/proc` for the first process of a namespace: its own processes, nothing of the machine, nothing writable.

    The kernel allows it only while the machine's own is in sight, which is then taken away.

    Raises:
        OSError: the system does not allow it.
    """
    _mount("proc", Path("/proc"), "proc", _NOSUID | _NODEV | _NOEXEC, "subset=pid")
    _make_read_only(Path("/proc"), 0)
    call("umount2", ctypes.c_char_p(f"/{_OLD_PROC}".encode()), _DETACH)


def _keep(path: Path, root: Path) -> None:
    target = _inside(path, root)
    if path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(str(path.resolve()), target, None, _BIND | _RECURSIVE)
    if not path.is_char_device():
        _make_read_only(target, _AT_RECURSIVE)


def _inside(path: Path, root: Path) -> Path:
    return root / path.relative_to("/")


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, str(target), kind, options)]
    source_c, target_c, kind_c, options_c = (ctypes.c_char_p(text) for text in texts)
    call("mount", source_c, target_c, kind_c, ctypes.c_ulong(flags), options_c)


def _make_read_only(target: Path, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTRIBUTE_READ_ONLY | _ATTRIBUTE_NOSUID, 0, 0, 0)
    path = ctypes.c_char_p(str(target).encode())
    syscall(_MOUNT_SETATTR, _AT_CWD, path, flags, ctypes.byref(attributes), ctypes.sizeof(attributes))


@dataclass
class Confinement:
    """Which layers hold, and why the others do not."""

    folder: Path
    """The one place that can be written to."""
    layers: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    memory: int | None = None
    """A descriptor that tells what memory this process has; opened before that is no longer possible."""

    def address_space(self) -> int:
        """Bytes of address space this process has; 0 where that is not known."""
        if self.memory is None:
            return 0
        pages = int(os.pread(self.memory, 100, 0).split()[0])
        return pages * os.sysconf("SC_PAGESIZE")

    @property
    def holds(self) -> bool:
        """Whether the process can do no harm: not to files, other processes, the network."""
        return SECCOMP in self.layers and len(self.layers) > 1

    def attempt(self, layer: str, put_on: Callable[[], None]) -> None:
        """Put a layer on, or note why it cannot be."""
        try:
            put_on()
        except OSError as error:
            self.problems[layer] = str(error)
        else:
            self.layers.append(layer)


def what_python_needs() -> list[Path]:
    """Files and folders without which this interpreter cannot import its libraries."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [path for place in dict.fromkeys([*own, *_LIBRARIES, *_HARMLESS]) if (path := Path(place)).exists()]


def confine(folder: Path, allowed: list[str], folder_bytes: int) -> Confinement:
    """Put on every layer of `allowed` that this system offers; `folder` is empty and stays writable.

    With namespaces the caller goes on as the first process of its namespace.
    """
    result = Confinement(folder)
    if sys.platform != "linux":  # elsewhere the same numbers may be other system calls
        result.problems = dict.fromkeys(allowed, f"{sys.platform} has no such thing")
        allowed = []
    readable = what_python_needs()
    with _processes() as proc:
        if NAMESPACES in allowed:
            result.attempt(NAMESPACES, lambda: _enter_namespaces(folder, readable, folder_bytes))
            if NAMESPACES in result.layers:
                result.folder = FOLDER_INSIDE
        if proc is not None:
            result.memory = os.open("self/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    if LANDLOCK in allowed:
        devices = [path for path in readable if path == Path("/dev/null")]
        result.attempt(LANDLOCK, lambda: restrict_files(readable, [result.folder, *devices]))
    if SECCOMP in allowed:
        result.attempt(SECCOMP, _forbid_system)
    _settle_in(result.folder)
    sys.path[:] = [entry for entry in sys.path if any(Path(entry).is_relative_to(path) for path in readable)]
    return result


@contextmanager
def _processes() -> Iterator[int | None]:
    """`/proc`, also for a process that has just lost sight of it; None where there is none."""
    try:
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield proc
    finally:
        os.close(proc)


def _forbid_system() -> None:
    drop_capabilities()
    seccomp.forbid_system()


def _settle_in(folder: Path) -> None:
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(folder)


def confine_commands(root: Path, readable: list[Path], folder_bytes: int) -> Confinement:
    """Confine this process and the programs that it will start, which may start others: all layers or none.

    It goes on as the first process of its namespace: when it ends, all others are killed.
    """
    result = Confinement(FOLDER_INSIDE)
    if sys.platform != "linux":
        result.problems = dict.fromkeys(LAYERS, f"{sys.platform} has no such thing")
        return result
    result.attempt(NAMESPACES, lambda: _enter_namespaces(root, readable, folder_bytes, for_commands=True))
    if NAMESPACES not in result.layers:
        return result
    devices = [path for path in readable if path.is_char_device()]
    programs = [*readable, Path("/proc"), Path("/etc"), Path("/dev")]
    writable = [FOLDER_INSIDE, Path("/tmp"), *devices]
    result.attempt("processes", show_processes)
    result.attempt(LANDLOCK, lambda: restrict_files(programs, writable, for_commands=True))
    result.attempt(SECCOMP, _forbid_system)
    result.attempt("new namespaces", seccomp.forbid_new_spaces)
    os.chdir(FOLDER_INSIDE)
    return result


def _enter_namespaces(folder: Path, readable: list[Path], folder_bytes: int, *, for_commands: bool = False) -> None:
    """Try in a child first, since a failure half way leaves a process that is good for nothing."""
    pid = os.fork()
    if pid == 0:
        _exit_with_errno_of(lambda: enter_namespaces(folder, readable, folder_bytes, for_commands))
    error = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if error:
        raise OSError(error, f"cannot be entered: {os.strerror(error) if error > 0 else f'signal {-error}'}")
    enter_namespaces(folder, readable, folder_bytes, for_commands)
    inner = os.fork()
    if inner:
        _leave_with(inner)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_errno_of(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        os._exit(error.errno or 1)
    os._exit(0)


def _leave_with(inner: int) -> None:
    """Wait for the process inside, holding nothing open, and end as it ended."""
    os.closerange(0, 64)
    status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    os._exit(status if status >= 0 else 1)
