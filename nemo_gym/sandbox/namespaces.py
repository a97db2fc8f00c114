"""A file system, a network and process numbers of its own: Linux namespaces, entered without privileges.

The new file system has only what is named, read-only, and one folder to write to that is kept in memory and
bounded. The new network has no connection to anything, not even to this machine.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from nemo_gym.sandbox.kernel import call, syscall

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

FOLDER_INSIDE = Path("/nemo-gym-sandbox")


def enter(root: Path, readable: Iterable[Path], folder_bytes: int) -> None:
    """Leave everything behind but `readable`; children of this process get process numbers of their own.

    Args:
        root: An empty folder, hidden from others by what is mounted on it.
        readable: Files and folders that stay, at the same place.
        folder_bytes: The size of `FOLDER_INSIDE`, the only place to write to.

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
    for path in readable:
        _keep(path, root)
    folder = _inside(FOLDER_INSIDE, root)
    folder.mkdir()
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV | _NOEXEC, f"size={folder_bytes},nr_inodes=4096,mode=700")
    os.chdir(root)
    syscall(_PIVOT_ROOT[machine], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    call("umount2", ctypes.c_char_p(b"."), _DETACH)
    os.chdir(FOLDER_INSIDE)
    _make_read_only(Path("/"), 0)


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
