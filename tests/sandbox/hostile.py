"""Programs that want out of the score, out of the sandbox, or into the next program: each is one attempt."""

from pathlib import Path

LIBC = """
import ctypes, os, platform, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
libc.syscall.restype = ctypes.c_long

def syscall(x86, arm, *arguments):
    "The result, or minus the number of the error."
    wide = [ctypes.c_long(it) if isinstance(it, int) else it for it in arguments]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(x86 if X86 else arm), *wide)
    return -ctypes.get_errno() if result == -1 else result
"""
"""System calls by their number, for programs that ask the kernel directly."""

UNSCORED = {
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "kills itself by thread": LIBC + "syscall(234, 131, os.getpid(), os.getpid(), 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "kills everybody": "import os\nos.kill(-1, 9)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills processes next to it": "import os\nfor n in range(1, 400):\n  try: os.kill(os.getpid() - 200 + n, 9)\n"
    "  except OSError: pass",
    "terminates itself": "import os\nos.kill(os.getpid(), 15)",
    "interrupts itself": "import os\nos.kill(os.getpid(), 2)",
    "ends by a signal without a name": "import os\nos.kill(os.getpid(), 40)",
    "ends by every signal in turn": "import os, signal\nfor n in sorted(signal.valid_signals()):\n"
    "  if n not in (19, 20, 21, 22):\n    try: os.kill(os.getpid(), n)\n    except OSError: pass",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "stops itself as from a terminal": "import os, signal\nos.kill(os.getpid(), signal.SIGTSTP)",
    "aborts": "import os\nos.abort()",
    "reads nowhere": "import ctypes\nctypes.string_at(0)",
    "writes nowhere": "import ctypes\nctypes.memset(1, 0, 1)",
    "divides by zero in C": LIBC + "os.kill(os.getpid(), signal.SIGFPE)",
    "overflows the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "overflows the stack in C": "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\n"
    "repr(x)",
    "overflows the stack of the compiler": "eval('-' * 10**6 + '1')",
    "nests parentheses": "(" * 10_000 + ")" * 10_000,
    "recurses for ever": "def f(): return f()\nf()",
    "makes a system call of another machine": LIBC
    + """
import mmap
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex("b825000000bb00000000cd80c3"))  # int 0x80: the 32-bit table
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))() if X86 else os.abort()
""",
    "makes a system call in disguise": LIBC + "print(syscall(0x40000000 + 62, 0, os.getppid(), 9) if X86 else 0)",
    "has the kernel kill it for its calls": LIBC
    + """
import struct
steps = struct.pack("HBBI", 6, 0, 0, 0x80000000)
buffer = ctypes.create_string_buffer(steps)
libc.prctl(22, 2, ctypes.create_string_buffer(struct.pack("HP", 1, ctypes.addressof(buffer))))
os.getppid()
""",
    "allows itself no calls at all": LIBC + "libc.prctl(22, 1, 0, 0, 0)\nos.getppid()",
    "allows itself no processor time": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile 1: 1",
    "allows itself no memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (0, 0))\nx = 'x' * 10**8",
    "allows itself no files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\nopen('x', 'w')",
    "wants to die with its parent": LIBC + "print(libc.prctl(1, 9, 0, 0, 0))",
    "exits early": "import os\nos._exit(0)",
    "exits early with an error": "import os\nos._exit(125)",
    "exits with 137": "import os\nos._exit(137)",
    "exits from a thread": "import os, threading\nthreading.Thread(target=os._exit, args=(9,)).start()",
    "does not let itself end": "import os\nos._exit = lambda *_: None\nraise SystemExit(3)",
    "has no exit any more": "import os, sys\nfor name in ('_exit', 'close', 'write', 'fork', 'read'):\n"
    "  setattr(os, name, None)\nsys.modules.clear()\n1 / 0",
    "removes its streams": "import sys\ndel sys.stdout, sys.stderr",
    "puts a bomb into its streams": "import sys\nclass Bomb:\n  def flush(self): raise KeyboardInterrupt\n"
    "  def write(self, text): raise SystemExit(0)\nsys.stdout = sys.stderr = Bomb()\n1 / 0",
    "raises what cannot be shown": "class E(BaseException):\n  def __str__(self): raise E\n  __repr__ = __str__\n"
    "raise E",
    "raises for ever": "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E",
    "prints without end": "while True: print('x' * 10**6)",
    "prints errors without end": "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
    "prints what is no text": "import os\nos.write(1, bytes(range(128, 256)) * 4096)",
    "prints deep JSON": "print('[' * 10**6)",
    "prints lone surrogates": "import sys\nsys.stdout.reconfigure(errors='surrogatepass')\nprint('\\ud800' * 100)",
    "prints a number without end": "print('9' * (7 * 10**6))",
    "prints numbers without end": "print('9 ' * (3 * 10**6))",
    "prints numbers beyond numbers": "print('1e999999999999999999999 NaN sNaN Infinity')",
    "closes everything": "import os\nos.closerange(0, 1000)",
    "closes the way of its result": "import os\nos.close(3)",
    "floods the way of its result": "import os\nwhile True: os.write(3, b'x' * 10**6)",
    "writes garbage as its result": "import os\nos.write(3, b'\\xff{[' * 1000)\nos._exit(0)",
    "writes deep JSON as its result": "import os\nos.write(3, b'[' * 10**6)\nos._exit(0)",
    "writes a result for the judge": """import os\nos.write(3, b'{"end": "done", "reward": 1.0}')\nos._exit(0)""",
    "turns its result on itself": "import os\nos.dup2(0, 3)",
    "opens all files it can": "files = []\nwhile True: files.append(open('/dev/null'))",
    "opens all pipes it can": "import os\nwhile True: os.pipe()",
    "takes all memory": "x = []\nwhile True: x.append(bytearray(10**7))",
    "takes too much memory": "x = [0] * 10**10",
    "takes address space": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 30))",
    "starts threads without end": "import threading, time\nthreading.stack_size(65536)\nwhile True:\n"
    "  threading.Thread(target=time.sleep, args=(99,)).start()",
    "starts threads that wait": "import threading, time\nfor _ in range(300):\n"
    "  threading.Thread(target=time.sleep, args=(99,)).start()",
    "starts threads that end": "import threading\nwhile True:\n  t = threading.Thread(target=int)\n  t.start()\n"
    "  t.join()",
    "never ends": "while True: pass",
    "sleeps": "import time\ntime.sleep(10**6)",
    "waits for a signal": "import signal\nsignal.pause()",
    "waits for itself": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "never ends at its end": "import atexit, time\natexit.register(time.sleep, 10**6)",
    "ignores that its time is over": "import signal\nfor n in signal.valid_signals():\n"
    "  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\nwhile True: pass",
    "fills its folder": "n = 0\nwhile True:\n  n += 1\n  open(f'{n}', 'wb').write(bytes(10**7))",
    "fills its folder with folders": "import os\nn = 0\nwhile True:\n  n += 1\n  os.mkdir(f'{n}')",
    "nests folders": "import os\nwhile True:\n  os.mkdir('d')\n  os.chdir('d')",
    "leaves folders nobody can look into": "import os\nos.umask(0o777)\nos.mkdir('a')\nos.umask(0o444)\n"
    "os.makedirs('b/c')\nopen('b/c/d', 'w').write('x')",
    "leaves names that are no text": "import os\nopen(b'\\xff\\xfe', 'w')\nos.mkfifo('pipe')\nos.symlink('/', 'link')",
    "removes its folder": "import os, shutil\nhere = os.getcwd()\nshutil.rmtree(here, ignore_errors=True)\n"
    "os.rmdir(here)",
    "starts processes": "import os\nwhile True: os.fork()",
    "becomes another program": "import os\nos.execv('/bin/true', ['true'])",
    "has no code but a null byte": "print(1)\0",
    "is long": "x = '" + "y" * 3_000_000 + "'",
    "is too long": "#" * 20_000_000,
    "has too many lines": "x = 1\n" * 300_000,
    "does not compile": "print('unfinished",
    "looks for the tests": "import gc\nprint([o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o])",
    "replaces what judges": "import json, sys, builtins\njson.dumps = json.loads = builtins.all = "
    "lambda *a, **k: True\nsys.modules['json'] = None\nprint(True)",
}
"""Programs that try to end without a score. Not one prints what is right, so each of them scores 0."""

ANSWERS = {
    "nothing": "",
    "no program": "I would rather not.",
    "an empty program": "```python\n```",
    "half a program": "```python\nprint(",
    "only fences": "```\n" * 1001,
    "a null byte": "\0",
    "blanks without end": " " * 5_000_000,
    "lines without end": "\n" * 2_000_000,
    "tags": "<think>" * 100_000,
}
"""Answers that are no program."""

_SIGNALLING = """
import fcntl, os, signal, struct, sys
target = os.getppid()
reading, writing = os.pipe()
socket_a, socket_b = __import__('socket').socketpair()
done = []

def attempt(name, action):
    try:
        result = action()
    except OSError as error:
        result = -error.errno
    except ValueError:
        result = -22
    if not (isinstance(result, int) and result < 0):
        done.append(name)
"""
SIGNALLING = {
    "F_SETOWN": "fcntl.fcntl(reading, 8, target)",
    "F_SETOWN with bits on top": "syscall(72, 25, reading, 8 | 1 << 32, target)",
    "F_SETOWN of a group": "fcntl.fcntl(reading, 8, -target)",
    "F_SETOWN_EX": "fcntl.fcntl(reading, 15, struct.pack('ii', 1, target))",
    "F_SETSIG": "fcntl.fcntl(reading, 10, 9)",
    "F_SETLEASE": "fcntl.fcntl(os.open('file', os.O_CREAT | os.O_RDONLY), 1024, fcntl.F_RDLCK)",
    "F_NOTIFY": "fcntl.fcntl(os.open('.', os.O_RDONLY), 1026, 4)",
    "O_ASYNC by F_SETFL": "fcntl.fcntl(reading, 4, 0x2000)",
    "O_ASYNC of a socket": "fcntl.fcntl(socket_a, 4, 0x2000 | 0x800)",
    "F_SETPIPE_SZ": "fcntl.fcntl(reading, 1031, 1 << 20)",
    "FIOASYNC": "fcntl.ioctl(reading, 0x5452, struct.pack('i', 1))",
    "FIOASYNC with bits on top": "syscall(16, 29, reading, 0x5452 | 1 << 40, ctypes.byref(ctypes.c_int(1)))",
    "FIOSETOWN": "fcntl.ioctl(socket_a, 0x8901, struct.pack('i', target))",
    "SIOCSPGRP": "fcntl.ioctl(socket_a, 0x8902, struct.pack('i', target))",
    "TIOCSTI": "fcntl.ioctl(0, 0x5412, b'x')",
    "TIOCSPGRP": "fcntl.ioctl(0, 0x5410, struct.pack('i', target))",
    "TIOCSCTTY": "fcntl.ioctl(0, 0x540E, 1)",
    "TIOCNOTTY": "fcntl.ioctl(0, 0x5422)",
    "TIOCSIG": "fcntl.ioctl(0, 0x40045436, 2)",
    "FS_IOC_SETFLAGS": "fcntl.ioctl(os.open('.', os.O_RDONLY), 0x40086602, struct.pack('l', 64))",
    "kill": "os.kill(target, 2) or 0",
    "kill with bits on top": "syscall(62, 129, target | 1 << 32, 2)",
    "killpg": "os.killpg(0, 2) or 0",
    "tkill": "syscall(200, 130, target, 2)",
    "tgkill": "syscall(234, 131, target, target, 2)",
    "rt_sigqueueinfo": "syscall(129, 138, target, 2, ctypes.create_string_buffer(struct.pack('iii', 2, 0, -1), 128))",
    "rt_tgsigqueueinfo": "syscall(297, 240, target, target, 2, ctypes.create_string_buffer(128))",
    "pidfd_open": "syscall(434, 434, target, 0)",
    "pidfd_send_signal": "syscall(424, 424, reading, 2, 0, 0)",
    "mq_notify": "syscall(244, 184, 0, ctypes.create_string_buffer(64))",
    "PR_SET_PDEATHSIG": "-1 if libc.prctl(1, 2, 0, 0, 0) else 0",
    "PR_SET_PDEATHSIG with bits on top": "syscall(157, 167, 1 | 1 << 32, 0)",
    "timer_create for a thread of another": "syscall(222, 107, 1, ctypes.create_string_buffer("
    "struct.pack('qiii', 0, 2, 4, target), 64), ctypes.byref(ctypes.c_int()))",
    "ptrace": "syscall(101, 117, 16, target, 0, 0)",
    "process_vm_writev": "syscall(311, 271, target, 0, 0, 0, 0, 0)",
    "setpgid": "os.setpgid(0, target) or 0",
    "setsid": "os.setsid()",
    "clone": "syscall(56, 220, 17, 0, 0, 0, 0)",
    "clone with a parent's signal": "syscall(56, 220, 0x8000 | 2, 0, 0, 0, 0)",
    "clone3": "syscall(435, 435, ctypes.create_string_buffer(88), 88)",
    "fork": "syscall(57, 220, 17, 0, 0, 0, 0)",
    "vfork": "syscall(58, 220, 0x4100 | 17, 0, 0, 0, 0)",
    "kill in disguise (x32)": "syscall(0x40000000 + 62, 129, target, 2)",
    "fcntl in disguise (x32)": "syscall(0x40000000 + 72, 25, reading, 8, target)",
    "io_uring": "syscall(425, 425, 8, ctypes.create_string_buffer(128))",
    "io_setup": "syscall(206, 0, 8, ctypes.byref(ctypes.c_long()))",
    "a call newer than the list": "syscall(468, 468, 0, 0, 0, 0, 0)",
}
"""Ways to have a signal sent to another process, or to touch it: each must be refused."""

REACHING_OUT = {
    "shmget": "syscall(29, 194, 1234, 4096, 0o1666)", "shmat": "syscall(30, 196, 0, 0, 0)",
    "shmctl": "syscall(31, 195, 0, 0, 0)", "semget": "syscall(64, 190, 1234, 1, 0o1666)",
    "semctl": "syscall(66, 191, 0, 0, 0)", "semop": "syscall(65, 193, 0, 0, 0)",
    "msgget": "syscall(68, 186, 1234, 0o1666)",
    "msgsnd": "syscall(69, 189, 0, 0, 0, 0)", "msgrcv": "syscall(70, 188, 0, 0, 0, 0, 0)",
    "msgctl": "syscall(71, 187, 0, 0, 0)", "mq_open": "syscall(240, 180, b'x', 66, 0o666, 0)",
    "mq_unlink": "syscall(241, 181, b'x')", "add_key": "syscall(248, 217, b'user', b'x', b'x', 1, -3)",
    "keyctl": "syscall(250, 219, 0, -3, 1)", "socket": "syscall(41, 198, 1, 2, 0)",
    "socketpair of datagrams": "syscall(53, 199, 1, 2, 0, ctypes.create_string_buffer(8))",
    "socketpair of another family": "syscall(53, 199, 16, 1, 0, ctypes.create_string_buffer(8))",
    "bind": "syscall(49, 200, socket_a.fileno(), b'\\1\\0\\0x', 4)",
    "connect": "syscall(42, 203, socket_a.fileno(), b'\\1\\0\\0x', 4)",
    "inotify": "syscall(294, 26, 0)", "memfd_create": "syscall(319, 279, b'x', 0)",
    "open to empty a file": "os.open(victim, os.O_RDONLY | os.O_TRUNC)",
    "open to empty a file, neither to read nor to write": "os.open(victim, 3 | os.O_TRUNC)",
    "open its own to read and empty it": "os.open('mine', os.O_CREAT | os.O_RDONLY | os.O_TRUNC)",
    "openat2": "syscall(437, 437, -100, b'.', ctypes.create_string_buffer(24), 24)",
    "migrate_pages": "syscall(256, 238, target, 64, 0, 0)", "move_pages": "syscall(279, 239, target, 0, 0, 0, 0, 0)",
    "unshare": "syscall(272, 97, 0x10000000)", "PR_SCHED_CORE": "syscall(157, 167, 62, 1, target, 0, 0)",
    "SIGKILL for itself": "os.kill(os.getpid(), 9) or 0",
}  # fmt: skip
"""What is shared by all processes of a user, or reaches files and others by a way around: each must be refused."""


def refused(attempts: dict[str, str], victim: Path) -> str:
    """A program that tries all of them and leaves in `out` the names of those that worked.

    Args:
        attempts: What to try.
        victim: A file outside that its owner can spare.
    """
    lines = [f"attempt({name!r}, lambda: {action})" for name, action in attempts.items()]
    return "\n".join([LIBC, _SIGNALLING, f"victim = {str(victim)!r}", *lines, "out = done"])


_SEE_SIGNALS = """sorted(int(n) for n in signal.valid_signals() if n not in (9, 19) and
    signal.getsignal(n) not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler))"""
INHERITED = {
    "affinity": (
        "os.sched_setaffinity(who, {min(os.sched_getaffinity(0))})",
        "sorted(os.sched_getaffinity(0))",
    ),
    "nice": ("os.setpriority(os.PRIO_PROCESS, who, 15)", "os.getpriority(os.PRIO_PROCESS, 0)"),
    "nice of the group": ("os.setpriority(os.PRIO_PGRP, os.getpgid(who), 15)", "os.getpriority(os.PRIO_PGRP, 0)"),
    "nice of the user": ("os.setpriority(os.PRIO_USER, 0, 15)", "os.getpriority(os.PRIO_USER, 0)"),
    "scheduling policy": ("os.sched_setscheduler(who, os.SCHED_IDLE, os.sched_param(0))", "os.sched_getscheduler(0)"),
    "scheduling attributes": (
        "syscall(314, 274, who, struct.pack('IIQiIQQQ', 48, 5, 0, 10, 0, 0, 0, 0), 0)",
        "os.sched_getscheduler(0)",
    ),
    "I/O priority": ("syscall(251, 30, 1, who, 3 << 13)", "syscall(252, 31, 1, 0)"),
    "limit of files": ("resource.prlimit(who, resource.RLIMIT_NOFILE, (5, 5))", "resource.getrlimit(7)"),
    "limit of memory": (  # beside what the process has, which varies
        "resource.prlimit(who, resource.RLIMIT_AS, (1 << 20, 1 << 20))",
        "resource.getrlimit(9)[0] > 100 << 20",
    ),
    "limit of processor time": ("resource.prlimit(who, resource.RLIMIT_CPU, (1, 1))", "resource.getrlimit(0)"),
    "limit of the stack": ("resource.prlimit(who, resource.RLIMIT_STACK, (65536, 65536))", "resource.getrlimit(3)"),
    "limit of a file": ("resource.prlimit(who, resource.RLIMIT_FSIZE, (0, 0))", "resource.getrlimit(1)"),
    "limit of processes": ("resource.prlimit(who, resource.RLIMIT_NPROC, (0, 0))", "resource.getrlimit(6)"),
    "limit of locked memory": ("resource.prlimit(who, resource.RLIMIT_MEMLOCK, (0, 0))", "resource.getrlimit(8)"),
    "limit of core files": ("resource.prlimit(who, resource.RLIMIT_CORE, (0, 0))", "resource.getrlimit(4)"),
    "umask": ("os.umask(0o777)", "os.umask(0)"),
    "working directory": ("os.mkdir('d') or os.chdir('d')", "os.getcwd()"),
    "what the folder holds": ("open('left', 'w').write('x')", "os.listdir('.')"),
    "environment": ("os.environ.update(LEFT='x', PATH='/', HOME='/x', PYTHONPATH='x')", "sorted(os.environ.items())"),
    "environment of C": ("libc.setenv(b'LEFT', b'x', 1)", "libc.getenv(b'LEFT')"),
    "interval timer": ("signal.setitimer(signal.ITIMER_REAL, 0.4)", "signal.getitimer(signal.ITIMER_REAL)"),
    "timer of processor time": ("signal.setitimer(signal.ITIMER_PROF, 1)", "signal.getitimer(signal.ITIMER_PROF)"),
    "alarm": ("signal.alarm(1)", "signal.alarm(0)"),
    "blocked signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ),
    "waiting signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [10]) and os.kill(os.getpid(), 10)",
        "sorted(signal.sigpending())",
    ),
    "what signals do": ("[signal.signal(n, lambda *_: 0) for n in (2, 10, 12, 14, 15, 17)]", _SEE_SIGNALS),
    "ignored signals": (
        "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 10, 12, 14, 15, 24, 25)]",
        "sorted(int(n) for n in signal.valid_signals() if n not in (9, 19) and signal.getsignal(n) == signal.SIG_IGN)",
    ),
    "signal stack": (
        "libc.sigaltstack(ctypes.byref((ctypes.c_long * 3)(ctypes.addressof(stack), 0, 65536)), None)",
        "altstack()",
    ),
    "open descriptors": ("[os.dup(1) for _ in range(20)]", "[n for n in range(64) if is_open(n)]"),
    "flags of its streams": (
        "[os.set_blocking(n, False) for n in range(4)] and [os.set_inheritable(n, True) for n in range(4)]",
        "[os.get_blocking(n) for n in range(4)]",
    ),
    "place in its input": ("os.lseek(0, 3, 0)", "os.lseek(0, 0, 1)"),
    "content of its input": ("os.pwrite(0, b'forged', 0) or os.ftruncate(0, 1)", "os.pread(0, 100, 0).decode()"),
    "name": ("libc.prctl(15, b'left', 0, 0, 0)", "process_name()"),
    "death signal": ("libc.prctl(1, 10, 0, 0, 0)", "prctl_int(2)"),
    "dumpable": ("libc.prctl(4, 0, 0, 0, 0)", "libc.prctl(3, 0, 0, 0, 0)"),
    "timer slack": ("libc.prctl(29, 10**8, 0, 0, 0)", "libc.prctl(30, 0, 0, 0, 0)"),
    "reaper of orphans": ("libc.prctl(36, 1, 0, 0, 0)", "prctl_int(37)"),
    "huge pages": ("libc.prctl(41, 1, 0, 0, 0)", "libc.prctl(42, 0, 0, 0, 0)"),
    "machine check policy": ("libc.prctl(33, 1, 1, 0, 0)", "libc.prctl(34, 0, 0, 0, 0)"),
    "time stamp counter": ("X86 and libc.prctl(26, 2, 0, 0, 0)", "prctl_int(25) if X86 else 0"),
    "speculation": ("libc.prctl(53, 0, 4, 0, 0)", "libc.prctl(52, 0, 0, 0, 0)"),
    "keeping capabilities": ("libc.prctl(8, 1, 0, 0, 0)", "libc.prctl(7, 0, 0, 0, 0)"),
    "security bits": ("libc.prctl(28, 1, 0, 0, 0)", "libc.prctl(27, 0, 0, 0, 0)"),
    "core scheduling": ("libc.prctl(62, 1, who, 1, 0)", "0"),
    "personality": ("libc.personality(0x0040000)", "libc.personality(0xFFFFFFFF)"),
    "seccomp filters": ("forbid_getppid()", "os.getppid() > 0"),
    "Landlock": ("forbid_files()", "os.path.isfile(os.__file__) and len(open(os.__file__).read()) > 0"),
    "user and group": ("os.setresuid(1, 1, 1)", "os.getresuid() + os.getresgid()"),
    "further groups": ("os.setgroups([1, 2])", "os.getgroups()"),
    "process group": ("os.setpgid(who, 0)", "os.getpgid(0) == os.getpid()"),
    "session": ("os.setsid()", "os.getsid(0) in (0, os.getppid(), os.getsid(os.getppid()))"),
    "controlling terminal": ("fcntl.ioctl(0, 0x540E, 1)", "terminal()"),
    "keyring": ("syscall(250, 219, 1, 0)", "syscall(250, 219, 0, -3, 0)"),
    "shared memory segments": ("syscall(29, 194, 77, 4096, 0o1600)", "syscall(29, 194, 77, 0, 0)"),
    "memory policy": ("syscall(238, 237, 1, ctypes.byref(ctypes.c_long(1)), 64)", "memory_policy()"),
    "locked memory": ("libc.mlockall(2)", "0"),
    "memory maps": ("mmap.mmap(-1, 10**8)", "can_map(200)"),
    "heap": ("keep.append('x' * 10**8)", "can_map(200)"),
    "out-of-memory score": ("open('/proc/%d/oom_score_adj' % who, 'w').write('1000')", "0"),
    "modules": ("setattr(os, 'left', 1) or sys.modules.update(left=os)", "hasattr(os, 'left')"),
    "builtins": ("setattr(__import__('builtins'), 'left', 1)", "hasattr(__import__('builtins'), 'left')"),
    "recursion limit": ("sys.setrecursionlimit(100)", "sys.getrecursionlimit()"),
    "import path": ("sys.path.insert(0, os.getcwd())", "sys.path"),
    "exit handlers": ("__import__('atexit').register(print, 'left')", "__import__('atexit')._ncallbacks()"),
    "threads": (
        "__import__('threading').Thread(target=signal.pause, daemon=True).start()",
        "__import__('threading').active_count()",
    ),
    "trace function": ("sys.settrace(lambda *_: None)", "sys.gettrace() is None"),
    "random numbers": ("__import__('random').seed(1)", "__import__('random').random() == 0.13436424411240122"),
    "locale": ("__import__('locale').setlocale(0, 'C')", "__import__('locale').setlocale(0)"),
    "decimal context": (
        "setattr(__import__('decimal').getcontext(), 'prec', 2)",
        "__import__('decimal').getcontext().prec",
    ),
    "garbage collection": ("__import__('gc').disable()", "__import__('gc').isenabled()"),
}  # fmt: skip
"""What a process inherits: how a program changes it, for itself and for its parent, and how a later one looks at it."""

_INHERITED_TOOLS = """
import fcntl, mmap, os, resource, signal, struct
keep = []
stack = ctypes.create_string_buffer(65536)

def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

def process_name():
    name = ctypes.create_string_buffer(16)
    libc.prctl(16, name, 0, 0, 0)
    return name.value.decode()

def prctl_int(option):
    value = ctypes.c_int()
    return libc.prctl(option, ctypes.byref(value), 0, 0, 0), value.value

def altstack():
    seen = (ctypes.c_long * 3)()
    libc.sigaltstack(None, ctypes.byref(seen))
    return seen[1] & 0xFFFFFFFF

def terminal():
    try:
        return os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return "none"

def memory_policy():
    policy = ctypes.c_int()
    return syscall(239, 236, ctypes.byref(policy), 0, 0, 0, 0), policy.value

def can_map(mebibytes):
    mmap.mmap(-1, mebibytes << 20)
    return True

def install(steps):
    buffer = ctypes.create_string_buffer(steps, len(steps))
    header = struct.pack("HP", len(steps) // 8, ctypes.addressof(buffer))
    return libc.prctl(22, 2, ctypes.create_string_buffer(header, len(header)))

def forbid_getppid():
    step = lambda *values: struct.pack("HBBI", *values)
    is_it = step(0x20, 0, 0, 0) + step(0x15, 0, 1, 110 if X86 else 173)
    install(is_it + step(6, 0, 0, 0x50001) + step(6, 0, 0, 0x7FFF0000))

def forbid_files():
    ruleset = syscall(444, 444, ctypes.byref(ctypes.c_uint64(4)), 8, 0)
    return syscall(446, 446, ruleset, 0) if ruleset >= 0 else ruleset
"""


def changing(name: str) -> str:
    """A program that changes an attribute of its parent and of itself, as far as it can."""
    change = INHERITED[name][0]
    return f"""{LIBC}{_INHERITED_TOOLS}
for who in (os.getppid(), 0):
    try:
        {change}
    except (OSError, ValueError):
        pass
"""


def looking(name: str) -> str:
    """A program that leaves in `out` what it finds of that attribute."""
    return f"{LIBC}{_INHERITED_TOOLS}\nout = {INHERITED[name][1]}\n"
