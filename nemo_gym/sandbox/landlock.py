"""Which files may be opened: Landlock, a kernel feature any process may use to restrict itself for ever."""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from nemo_gym.sandbox.kernel import PR_SET_NO_NEW_PRIVS, prctl, syscall

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


def version() -> int:
    """The version of Landlock the kernel offers; 0 when it offers none."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Allow reading below `readable`, reading and writing below `writable`, and no other access to files.

    Nor any TCP connection, nor signals to processes outside, where the kernel can deny them.

    Raises:
        OSError: the kernel has no Landlock.
    """
    known = version()
    if not known:
        raise OSError(errno.ENOSYS, "Landlock is not offered by this kernel")
    every = _ALL_OF_VERSION[max(number for number in _ALL_OF_VERSION if number <= known)]
    rules = struct.pack("@QQQ", every, _TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = rules[: 8 if known < 4 else 16 if known < 6 else 24]
    ruleset = syscall(_CREATE_RULESET, ctypes.create_string_buffer(rules, len(rules)), len(rules), 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ)
        for path in writable:
            _allow(ruleset, path, every & ~(_EXECUTE | _IOCTL | _MAKE_DEVICES))
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
