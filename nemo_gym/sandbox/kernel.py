"""System calls that Python has no function for."""

import ctypes
import errno
import functools
import os
import platform
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """A function of the C library that returns -1 for an error.

    Raises:
        OSError: the call failed, or the C library has no such function.
    """
    try:
        function = getattr(_libc(), name)
    except AttributeError:
        raise OSError(f"{name} is not offered by this system") from None
    result: int = function(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: Any) -> int:
    """A system call by its number; numbers and pointers are passed as wide as a register.

    Raises:
        OSError: the call failed.
    """
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return call("syscall", ctypes.c_long(number), *wide)


def prctl(option: int, value: int, pointer: Any = None) -> None:
    """Change an attribute of this process.

    Raises:
        OSError: the kernel does not offer it.
    """
    zero = ctypes.c_ulong(0)
    call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), pointer or zero, zero, zero)


def drop_capabilities() -> None:
    """Give up every privilege beyond those of an ordinary user.

    Raises:
        OSError: it is not known how, on this machine.
    """
    machine = platform.machine()
    if machine not in _SYS_CAPSET:
        raise OSError(errno.ENOSYS, f"system calls of {machine or 'this machine'} are not known here")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    syscall(_SYS_CAPSET[machine], ctypes.byref(header), ctypes.byref(nothing))
