"""Which system calls may be made: filters that the kernel applies to this process and its children for ever.

What is denied answers with "operation not permitted", so that Python raises an ordinary error. Two filters
are used: one for the process that starts children, one on top of it for the children, which
may not start processes of their own or signal others.
"""

import ctypes
import errno
import platform
import struct
from typing import NamedTuple

from nemo_gym.sandbox.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

_MODE_FILTER = 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD = 0x00010000
_OTHER_ABI = 0x40000000
"""x86-64 numbers from here on are the same calls in another disguise."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class Call(NamedTuple):
    """The number of a system call, by architecture; None where there is no such call."""

    x86_64: int | None
    aarch64: int | None

    @classmethod
    def same(cls, number: int) -> "Call":
        """A call with one number everywhere, as all newer ones have."""
        return cls(number, number)


NETWORK = {"socket": Call(41, 198)}
SYSTEM = {
    "acct": Call(163, 89), "add_key": Call(248, 217), "adjtimex": Call(159, 171), "bpf": Call(321, 280),
    "chroot": Call(161, 51), "clock_settime": Call(227, 112), "delete_module": Call(176, 106),
    "finit_module": Call(313, 273), "fsconfig": Call.same(431), "fsmount": Call.same(432), "fsopen": Call.same(430),
    "fspick": Call.same(433), "init_module": Call(175, 105), "io_uring_enter": Call.same(426),
    "io_uring_register": Call.same(427), "io_uring_setup": Call.same(425), "ioperm": Call(173, None),
    "iopl": Call(172, None), "kcmp": Call(312, 272), "kexec_file_load": Call(320, 294), "kexec_load": Call(246, 104),
    "keyctl": Call(250, 219), "memfd_create": Call(319, 279), "memfd_secret": Call.same(447), "mount": Call(165, 40),
    "mount_setattr": Call.same(442), "move_mount": Call.same(429), "mq_open": Call(240, 180), "msgget": Call(68, 186),
    "name_to_handle_at": Call(303, 264), "open_by_handle_at": Call(304, 265), "open_tree": Call.same(428),
    "open_tree_attr": Call.same(467), "perf_event_open": Call(298, 241), "personality": Call(135, 92),
    "pidfd_getfd": Call.same(438), "pivot_root": Call(155, 41), "process_vm_readv": Call(310, 270),
    "process_vm_writev": Call(311, 271), "ptrace": Call(101, 117), "quotactl": Call(179, 60), "reboot": Call(169, 142),
    "request_key": Call(249, 218), "semget": Call(64, 190), "setdomainname": Call(171, 162),
    "sethostname": Call(170, 161), "setns": Call(308, 268), "settimeofday": Call(164, 170), "shmget": Call(29, 194),
    "swapoff": Call(168, 225), "swapon": Call(167, 224), "syslog": Call(103, 116), "umount2": Call(166, 39),
    "unshare": Call(272, 97), "userfaultfd": Call(323, 282),
}  # fmt: skip
FILE_ATTRIBUTES = {
    "chmod": Call(90, None), "chown": Call(92, None), "fchmod": Call(91, 52), "fchmodat": Call(268, 53),
    "fchmodat2": Call.same(452), "fchown": Call(93, 55), "fchownat": Call(260, 54), "fremovexattr": Call(199, 16),
    "fsetxattr": Call(190, 7), "futimesat": Call(261, None), "lchown": Call(94, None), "lremovexattr": Call(198, 15),
    "lsetxattr": Call(189, 6), "removexattr": Call(197, 14), "removexattrat": Call.same(466), "setxattr": Call(188, 5),
    "setxattrat": Call.same(463), "truncate": Call(76, 45), "utime": Call(132, None), "utimensat": Call(280, 88),
    "utimes": Call(235, None),
}  # fmt: skip
PROCESSES = {
    "execve": Call(59, 221), "execveat": Call(322, 281), "fork": Call(57, None), "ioprio_set": Call(251, 30),
    "pidfd_open": Call.same(434), "pidfd_send_signal": Call.same(424), "rt_sigqueueinfo": Call(129, 138),
    "rt_tgsigqueueinfo": Call(297, 240), "sched_setattr": Call(314, 274), "sched_setparam": Call(142, 118),
    "sched_setscheduler": Call(144, 119), "setpgid": Call(109, 154), "setpriority": Call(141, 140),
    "setsid": Call(112, 157), "tkill": Call(200, 130), "vfork": Call(58, None),
}  # fmt: skip
_CLONE, _CLONE3 = Call(56, 220), Call.same(435)
_SIGNALS = (Call(62, 129), Call(234, 131))  # kill, tgkill
_PRLIMIT = Call(302, 261)


def is_available() -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return platform.machine() in ARCHITECTURES


def forbid_system() -> None:
    """Deny the network, and what concerns the whole machine.

    Raises:
        OSError: the kernel takes no filter.
    """
    calls = [*SYSTEM.values(), *NETWORK.values()]
    _install(b"".join(_when(call, _error(errno.EPERM)) for call in calls))


def forbid_processes(own_pid: int) -> None:
    """Deny starting processes, replacing this one, and touching any but this one; threads are fine.

    And changes to the attributes of files: Landlock does not ask about them, and a folder made
    unreadable could not be tidied up.

    Raises:
        OSError: the kernel takes no filter.
    """
    refused = _error(errno.EPERM)
    is_thread = _step(_LOAD, _FIRST_ARGUMENT_AT) + _step(_ANY_BIT, _CLONE_THREAD, 0, 1) + _step(_RETURN, _ALLOW)
    program = [_when(call, refused) for call in [*PROCESSES.values(), *FILE_ATTRIBUTES.values()]]
    program.append(_when(_CLONE3, _error(errno.ENOSYS)))  # the C library then uses clone, whose flags can be seen
    program.append(_when(_CLONE, is_thread + refused))
    program += [_when(call, _unless_first_argument_is(own_pid) + refused) for call in _SIGNALS]
    program.append(_when(_PRLIMIT, _unless_first_argument_is(0) + refused))
    _install(b"".join(program))


def _install(program: bytes) -> None:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"system calls of {machine or 'this machine'} are not known here")
    prelude = _step(_LOAD, _ARCHITECTURE_AT) + _step(_EQUAL, ARCHITECTURES[machine], 1, 0) + _step(_RETURN, _KILL)
    prelude += _step(_LOAD, _NUMBER_AT)
    if machine == "x86_64":
        prelude += _step(_AT_LEAST, _OTHER_ABI, 0, 1) + _error(errno.EPERM)
    steps = prelude + program + _step(_RETURN, _ALLOW)
    buffer = ctypes.create_string_buffer(steps, len(steps))
    header = struct.pack("@HP", len(steps) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header, len(header)))


def _when(call: Call, then: bytes) -> bytes:
    """Steps that end with `then` if the call is `call`; `then` must decide, for it has no way back."""
    number = getattr(call, platform.machine())
    return b"" if number is None else _step(_EQUAL, number, 0, len(then) // 8) + then


def _unless_first_argument_is(value: int) -> bytes:
    return _step(_LOAD, _FIRST_ARGUMENT_AT) + _step(_EQUAL, value, 0, 1) + _step(_RETURN, _ALLOW)


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("@HBBI", code, if_true, if_false, value)
