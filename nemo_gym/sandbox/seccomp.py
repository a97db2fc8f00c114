"""Which system calls may be made: filters that the kernel applies to this process and its children for ever.

What is denied answers with "operation not permitted", so that Python raises an ordinary error. Two filters
are used: one for the process that starts children, one on top of it for the children, which
may not start processes of their own, signal others, or change anything of theirs.

A filter sees the numbers a call is given, not what they point to. Of a number that the kernel takes as an int it
sees the lower half of the register, as the kernel does.

Here are also the system calls that Python has no function for.
"""

import ctypes
import errno
import fcntl
import functools
import os
import platform
import resource
import select
import signal
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ASK, _ERROR, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_OTHER_ABI = 0x40000000
"""x86-64 numbers from here on are the same calls in another disguise."""
_FIRST_UNKNOWN = 468
"""Calls from here on are newer than this list: it is not known what they do."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_THREAD = 0x00010000
_CLONE_NEW_SPACES = 0x7E020000
"""Namespaces of any kind; that of time, whose bit means something else here, only `clone3` and `unshare` can make."""
_AF_UNIX, _SOCK_STREAM, _SOCKET_KINDS = 1, 1, 0xF
_O_ASYNC, _O_TRUNC, _O_ACCMODE = 0x2000, 0x200, 3
_F_SETFL = 4
_FCNTL_ALLOWED = (
    0, 1, 2, 3, 5, 6, 7, 9,  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, F_GETOWN
    36, 37, 38, 1030, 1032, 1034,  # F_OFD_*, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS
)  # fmt: skip
_IOCTL_ALLOWED = (
    0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451,  # TCGETS, TIOCGPGRP, TIOCGWINSZ, FIO{NREAD,NBIO,NCLEX,CLEX}
)  # fmt: skip
_PR_SCHED_CORE = 62
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000
_RECEIVE, _SEND, _GRANTED = 0xC0502100, 0xC0182101, 1
_QUESTION, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")


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


class Call(NamedTuple):
    """The number of a system call, by architecture; None where there is no such call."""

    x86_64: int | None
    aarch64: int | None

    @classmethod
    def same(cls, number: int) -> "Call":
        """A call with one number everywhere, as all newer ones have."""
        return cls(number, number)


NETWORK = {"bind": Call(49, 200), "connect": Call(42, 203), "socket": Call(41, 198)}
SYSTEM = {
    "acct": Call(163, 89), "add_key": Call(248, 217), "adjtimex": Call(159, 171), "bpf": Call(321, 280),
    "chroot": Call(161, 51), "clock_adjtime": Call(305, 266), "clock_settime": Call(227, 112),
    "delete_module": Call(176, 106), "fanotify_init": Call(300, 262), "finit_module": Call(313, 273),
    "fsconfig": Call.same(431), "fsmount": Call.same(432), "fsopen": Call.same(430), "fspick": Call.same(433),
    "init_module": Call(175, 105), "inotify_add_watch": Call(254, 27), "inotify_init": Call(253, None),
    "inotify_init1": Call(294, 26), "io_setup": Call(206, 0), "io_uring_enter": Call.same(426),
    "io_uring_register": Call.same(427), "io_uring_setup": Call.same(425), "ioperm": Call(173, None),
    "iopl": Call(172, None), "kcmp": Call(312, 272), "kexec_file_load": Call(320, 294), "kexec_load": Call(246, 104),
    "keyctl": Call(250, 219), "listmount": Call.same(458), "memfd_secret": Call.same(447),
    "migrate_pages": Call(256, 238), "modify_ldt": Call(154, None), "mount": Call(165, 40),
    "mount_setattr": Call.same(442), "move_mount": Call.same(429), "move_pages": Call(279, 239),
    "mq_notify": Call(244, 184), "mq_open": Call(240, 180), "mq_unlink": Call(241, 181), "msgctl": Call(71, 187),
    "msgget": Call(68, 186), "msgrcv": Call(70, 188), "msgsnd": Call(69, 189), "name_to_handle_at": Call(303, 264),
    "open_by_handle_at": Call(304, 265), "open_tree": Call.same(428), "open_tree_attr": Call.same(467),
    "perf_event_open": Call(298, 241), "personality": Call(135, 92), "pidfd_getfd": Call.same(438),
    "pivot_root": Call(155, 41), "process_madvise": Call.same(440), "process_mrelease": Call.same(448),
    "process_vm_readv": Call(310, 270), "process_vm_writev": Call(311, 271), "ptrace": Call(101, 117),
    "quotactl": Call(179, 60), "quotactl_fd": Call.same(443), "reboot": Call(169, 142), "request_key": Call(249, 218),
    "semctl": Call(66, 191), "semget": Call(64, 190), "semop": Call(65, 193), "semtimedop": Call(220, 192),
    "setdomainname": Call(171, 162), "sethostname": Call(170, 161), "setns": Call(308, 268),
    "settimeofday": Call(164, 170), "shmat": Call(30, 196), "shmctl": Call(31, 195), "shmget": Call(29, 194),
    "statmount": Call.same(457), "swapoff": Call(168, 225), "swapon": Call(167, 224), "sync": Call(162, 81),
    "syncfs": Call(306, 267), "syslog": Call(103, 116), "umount2": Call(166, 39), "unshare": Call(272, 97),
    "userfaultfd": Call(323, 282), "vhangup": Call(153, 58),
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
    "execve": Call(59, 221), "execveat": Call(322, 281), "fork": Call(57, None), "get_robust_list": Call(274, 100),
    "ioprio_set": Call(251, 30), "memfd_create": Call(319, 279), "pidfd_open": Call.same(434),
    "pidfd_send_signal": Call.same(424), "rt_sigqueueinfo": Call(129, 138), "rt_tgsigqueueinfo": Call(297, 240),
    "sched_setaffinity": Call(203, 122), "sched_setattr": Call(314, 274), "sched_setparam": Call(142, 118),
    "sched_setscheduler": Call(144, 119), "setpgid": Call(109, 154), "setpriority": Call(141, 140),
    "setsid": Call(112, 157), "tkill": Call(200, 130), "vfork": Call(58, None),
}  # fmt: skip
NOT_SEEN_THROUGH = {"clone3": Call.same(435), "openat2": Call.same(437)}
"""Their flags are behind a pointer. The C library then uses the older calls, whose flags can be seen."""
CLONE, EXIT = Call(56, 220), Call(60, 93)
_SECCOMP = Call(317, 277)
_SOCKETPAIR = Call(53, 199)
_KILL_PROCESS, _KILL_THREAD = Call(62, 129), Call(234, 131)
_GET_AND_SET_LIMIT, _SET_LIMIT = Call(302, 261), Call(160, 164)
_OPEN, _OPENAT = Call(2, None), Call(257, 56)
_FCNTL, _IOCTL, _PRCTL, _MMAP = Call(72, 25), Call(16, 29), Call(157, 167), Call(9, 222)


def forbid_system() -> None:
    """Deny the network, what concerns the whole machine, and what is shared by all processes of a user.

    Raises:
        OSError: the kernel takes no filter.
    """
    _for_children()  # once, before there are any
    program = [_when(call, _REFUSED) for call in (*SYSTEM.values(), *NETWORK.values())]
    program.append(_when(_SOCKETPAIR, _unless(0, [_AF_UNIX]) + _unless(1, [_SOCK_STREAM], _SOCKET_KINDS) + _ALLOWED))
    _install(program, 0)


def forbid_new_spaces() -> None:
    """Deny namespaces to processes that may start others: inside one they would have privileges again.

    Raises:
        OSError: the kernel takes no filter.
    """
    makes_space = _argument(0) + _step(_ANY_BIT, _CLONE_NEW_SPACES, 0, 1) + _REFUSED + _ALLOWED
    clone3 = _when(NOT_SEEN_THROUGH["clone3"], _error(errno.ENOSYS))
    _install([_when(CLONE, makes_space), clone3], 0)


def ask_for_shared_memory() -> int:
    """Deny memory that does not show in `/proc/<pid>/maps`, and have every shared mapping asked for.

    Denied is `memfd_create`, whose files need not be mapped. A process that asks to be hidden from others stays
    visible, and is told that it worked.

    Returns:
        A descriptor on which somebody else answers, see `receive_question`.

    Raises:
        OSError: the kernel takes no filter, or does not ask.
    """
    is_shared = _argument(3) + _step(_ANY_BIT, MAP_SHARED, 0, 1) + _step(_RETURN, _ASK) + _ALLOWED
    program = [
        _when(PROCESSES["memfd_create"], _error(errno.ENOSYS)),
        _when(_PRCTL, _if(0, [PR_SET_DUMPABLE], _error(0)) + _ALLOWED),
        _when(_MMAP, is_shared),
    ]
    return _install(program, _NEW_LISTENER)


class Question(NamedTuple):
    """A system call that waits for an answer."""

    identity: int
    thread: int
    number: int
    arguments: tuple[int, ...]


def has_question(listener: int) -> bool:
    """Return whether a question waits; False as well when there will be no more."""
    asks = select.poll()
    asks.register(listener, select.POLLIN)
    return any(events & select.POLLIN for _, events in asks.poll(0))


def receive_question(listener: int) -> Question:
    """Return the question that waits.

    Raises:
        OSError: whoever asked was interrupted, and asks again, or is gone.
    """
    question = bytearray(_QUESTION.size)
    fcntl.ioctl(listener, _RECEIVE, question)
    identity, thread, _, number, _, _, *arguments = _QUESTION.unpack(question)
    return Question(identity, thread, number, tuple(arguments))


def answer_question(listener: int, question: Question, error: int = 0) -> None:
    """Let the call be made, or fail with an error.

    Raises:
        OSError: whoever asked is gone, or the kernel cannot go on with a call.
    """
    fcntl.ioctl(listener, _SEND, _ANSWER.pack(question.identity, 0, -error, 0 if error else _GRANTED))


def forbid_processes(own_pid: int) -> int | None:
    """Deny starting processes, replacing this one, and touching any but this one; threads must be asked for.

    Also changes to the attributes of files (Landlock does not ask about them, and a folder made unreadable could not
    be tidied up), and what makes the kernel signal others on its behalf. It may end itself, though not by SIGKILL: that
    one tells that the kernel ended it.

    Returns:
        A descriptor on which somebody else answers when it starts a thread or ends one; None where the kernel has no
        such thing: it may then have as many as its memory holds.

    Raises:
        OSError: the kernel takes no filter.
    """
    itself = _when(_KILL_PROCESS, _unless(0, [own_pid]) + _if(1, [signal.SIGKILL], _REFUSED) + _ALLOWED)
    itself += _when(_KILL_THREAD, _unless(0, [own_pid]) + _if(2, [signal.SIGKILL], _REFUSED) + _ALLOWED)
    is_thread = _argument(0) + _step(_ANY_BIT, _CLONE_THREAD, 1, 0) + _REFUSED
    ask = _step(_RETURN, _ASK)
    try:
        return _install([_for_children(), itself, _when(CLONE, is_thread + ask), _when(EXIT, ask)], _NEW_LISTENER)
    except OSError:
        _install([_for_children(), itself, _when(CLONE, is_thread + _ALLOWED)], 0)
        return None


@functools.cache
def _for_children() -> bytes:
    """What is the same for every child."""
    program = [_when(call, _REFUSED) for call in (*PROCESSES.values(), *FILE_ATTRIBUTES.values())]
    program += [_when(call, _error(errno.ENOSYS)) for call in NOT_SEEN_THROUGH.values()]
    return b"".join([*program, *_limits(), *_descriptors()])


def _limits() -> list[bytes]:
    """Limits of its own only, and neither that of processor time nor its parent's end: by those it would be killed."""
    reads_only = _step(_LOAD, _ARGUMENTS_AT + 16) + _step(_EQUAL, 0, 0, 3)
    reads_only += _step(_LOAD, _ARGUMENTS_AT + 20) + _step(_EQUAL, 0, 0, 1) + _ALLOWED
    is_cpu = [resource.RLIMIT_CPU]
    return [
        _when(_GET_AND_SET_LIMIT, _unless(0, [0]) + reads_only + _if(1, is_cpu, _REFUSED) + _ALLOWED),
        _when(_SET_LIMIT, _if(0, is_cpu, _REFUSED) + _ALLOWED),
        _when(_PRCTL, _if(0, [PR_SET_PDEATHSIG, _PR_SCHED_CORE], _REFUSED) + _ALLOWED),
    ]


def _descriptors() -> list[bytes]:
    """No signals by way of a file's owner, and no emptying of files that may only be read."""
    sets_flags = _argument(2) + _step(_ANY_BIT, _O_ASYNC, 0, 1) + _REFUSED + _ALLOWED
    program = [_when(_FCNTL, _if(1, [_F_SETFL], sets_flags) + _unless(1, _FCNTL_ALLOWED) + _ALLOWED)]
    program.append(_when(_IOCTL, _unless(1, _IOCTL_ALLOWED) + _ALLOWED))
    for call, flags in ((_OPEN, 1), (_OPENAT, 2)):
        neither = _if(flags, [_O_ACCMODE], _REFUSED, _O_ACCMODE)
        program.append(_when(call, neither + _if(flags, [_O_TRUNC], _REFUSED, _O_ACCMODE | _O_TRUNC) + _ALLOWED))
    return program


def _install(program: Iterable[bytes], flags: int) -> int:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"system calls of {machine or 'this machine'} are not known here")
    prelude = _step(_LOAD, _ARCHITECTURE_AT) + _step(_EQUAL, ARCHITECTURES[machine], 1, 0) + _step(_RETURN, _KILL)
    prelude += _step(_LOAD, _NUMBER_AT)
    if machine == "x86_64":
        prelude += _step(_AT_LEAST, _OTHER_ABI, 0, 1) + _REFUSED
    prelude += _step(_AT_LEAST, _FIRST_UNKNOWN, 0, 1) + _error(errno.ENOSYS)
    steps = prelude + b"".join(program) + _ALLOWED
    buffer = ctypes.create_string_buffer(steps, len(steps))
    header = struct.pack("@HP", len(steps) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    return syscall(
        getattr(_SECCOMP, machine), _SET_MODE_FILTER, flags, ctypes.create_string_buffer(header, len(header))
    )


def number_of(call: Call) -> int | None:
    """Its number on this machine."""
    number: int | None = getattr(call, platform.machine())
    return number


def _when(call: Call, then: bytes) -> bytes:
    """Steps that end with `then` if the call is `call`; `then` must decide, for it has no way back."""
    number = number_of(call)
    return b"" if number is None else _step(_EQUAL, number, 0, len(then) // 8) + then


def _if(index: int, values: Iterable[int], then: bytes, mask: int | None = None) -> bytes:
    """Do `then`, which must decide, if an argument (of which only the bits in `mask` count) is one of `values`."""
    steps = _argument(index, mask)
    return steps + b"".join(_step(_EQUAL, value, 0, len(then) // 8) + then for value in values)


def _unless(index: int, values: Iterable[int], mask: int | None = None) -> bytes:
    """Refuse unless an argument is one of `values`."""
    steps = b"".join(_step(_EQUAL, value, left, 0) for left, value in reversed(list(enumerate(reversed([*values]), 1))))
    return _argument(index, mask) + steps + _REFUSED


def _argument(index: int, mask: int | None = None) -> bytes:
    load = _step(_LOAD, _ARGUMENTS_AT + 8 * index)
    return load if mask is None else load + _step(_AND, mask)


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("@HBBI", code, if_true, if_false, value)


_ALLOWED = _step(_RETURN, _ALLOW)
_REFUSED = _error(errno.EPERM)
