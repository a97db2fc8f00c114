"""What a program asks of the process it runs in: an event loop, processors, enough open files, ports, signals that end
it in order, and work that is done for several callers at once.
"""

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from nemo_gym.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_OPEN_FILES = 65_535
"""As many as are asked for, unless the system allows fewer."""

_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What glibc's `mallopt` calls them."""
_KEPT_FREE_BYTES = 32 << 20
_LARGEST_KEPT_BYTES = 32 << 20
"""The most that glibc takes. To read a megabyte of JSON orjson asks for twelve times that, of which it uses little."""
_FILES_KEPT_BACK = 128
"""For files, logs and the questions asked of servers beside the rollouts."""
_MOST_TOGETHER = 32
_WAIT_FOR_OTHERS_S = 0.002
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, as `asyncio.run` would run it: on uvloop where that is installed."""
    collect_garbage_less_often()
    keep_freed_memory()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def collect_garbage_less_often() -> None:
    """For a process that has loaded its libraries: leave those alone, and look for cycles now and then.

    What a request leaves behind is freed without the collector; with Python's own settings it ran every few
    requests and took a tenth of a server's time.
    """
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, 10, 10)


def keep_freed_memory() -> None:
    """Use memory again that a large payload has left, rather than give it back to the system and ask for it anew.

    Each page that the system hands out is cleared first, and that takes longer than to fill it: writing a megabyte of
    JSON takes five times as long with the C library's own settings. Only glibc has such settings.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)
        set_option(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


def usable_cores(system: Path = Path("/")) -> int:
    """How many processors this process may use: those it may run on, and no more than its container is given."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, int(_quota(system) or cores)))


def _quota(system: Path) -> float | None:
    """The processors' worth of time that the control group of this process may take, if that is limited."""
    groups = system / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        own = (system / "proc/self/cgroup").read_text().rpartition("::")[2].strip().strip("/")
        for file in (groups / own / "cpu.max", groups / "cpu.max"):
            if file.is_file():
                most, period = file.read_text().split()
                return None if most == "max" else int(most) / int(period)
        most_us, period_us = ((groups / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(most_us) / int(period_us) if int(most_us) > 0 else None
    return None


def connections_that_fit() -> int | None:
    """How many connections this process may have at once beside what it has open now; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, soft - len(os.listdir("/dev/fd")) - _FILES_KEPT_BACK)  # noqa: PTH208 - each is a name, not a path


def raise_open_file_limit(target: int = MOST_OPEN_FILES) -> None:
    """Allow as many open files as `target`, or as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target if hard == resource.RLIM_INFINITY else min(target, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        logger.warning("the open-file limit stays at %d (%s); raise it with `ulimit -n %d`", soft, error, wanted)


class RequestStop(Protocol):
    """Asks something to stop soon, or at once."""

    def __call__(self, *, at_once: bool) -> None:
        """Ask for it; must not wait."""


@contextlib.contextmanager
def stopping_on_signals(request_stop: RequestStop, *, on_the_spot: bool = False) -> Iterator[list[int]]:
    """Let Ctrl-C, SIGTERM and a closed terminal ask for an orderly end; gives the signals that have arrived so far.

    The first asks to stop, the second to stop at once. Both are carried out by the running event loop; a third, which
    means that the loop does not get round to it, raises `KeyboardInterrupt`. A program without a loop has them carried
    out `on_the_spot`, between two of its steps; then the second raises `KeyboardInterrupt` besides.

    Signals that are ignored, as by `nohup`, stay ignored. Outside of the main thread, where Python delivers no
    signals, this does nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    loop = None if on_the_spot else asyncio.get_running_loop()
    patience = 1 if on_the_spot else 2

    def ask(number: int, frame: FrameType | None) -> None:
        received.append(number)
        at_once = len(received) > 1
        if loop is None:
            request_stop(at_once=at_once)
        elif len(received) <= patience:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to stop
                loop.call_soon_threadsafe(lambda: request_stop(at_once=at_once))
        if len(received) > patience:
            raise KeyboardInterrupt

    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, ask) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def pass_on(number: int) -> None:
    """Let a signal that was taken as a request to stop do what it does in the rest of the program, if anything.

    Ctrl-C then raises `KeyboardInterrupt`, or cancels the task that `asyncio.run` runs; SIGTERM ends the process.
    """
    signal.raise_signal(number)
    await asyncio.sleep(0)  # a task that was cancelled finds out here


class Together(Generic[T]):
    """Work that has to be done before its callers go on, done for several of them at once.

    Where hundreds of calls are under way, what is done for each of them finds its code and data gone from the
    processor's caches, and drives out those of the others: done one after another it takes half the time. Callers enter
    (`with together:`) when they know that they will have something to do, and wait for `done` with it. It is done when
    all who entered wait, when `_MOST_TOGETHER` do, or two milliseconds after the first: in order, by `each`, then
    `finish` for all of them. Who is alone never waits, and who is cancelled meanwhile has nothing done for him.
    """

    def __init__(self, each: Callable[[T], None], finish: Callable[[], None] = lambda: None) -> None:
        self._each = each
        self._finish = finish
        self._entered = 0
        self._waiting: list[tuple[T, asyncio.Future[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._entered += 1

    def __exit__(self, *_: object) -> None:
        self._entered -= 1

    async def done(self, item: T) -> None:
        """Wait until the work for an item is done; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        if self._entered <= 1 or (self._waiting and loop is not self._loop):
            try:
                self._each(item)
            finally:
                self._finish()
            return
        future = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= min(_MOST_TOGETHER, self._entered):
            self.do_now()
        elif self._timer is None:
            self._loop = loop
            self._timer = loop.call_later(_WAIT_FOR_OTHERS_S, self.do_now)
        await future

    def do_now(self) -> None:
        """Do what callers wait for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        failed: dict[int, BaseException] = {}
        for at, (item, future) in enumerate(waiting):
            if not future.done():  # or else cancelled
                try:
                    self._each(item)
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    failed[at] = error
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001 - it is that of all callers
            failed = dict.fromkeys(range(len(waiting)), error)
        for at, (_, future) in enumerate(waiting):
            if future.done():
                continue
            if at in failed:
                future.set_exception(failed[at])
            else:
                future.set_result(None)


def listen(host: str, port: int, who: str, remedy: str, *, exclusive: bool = False) -> socket.socket:
    """A socket that listens on `host:port`; a port in use is a clear error that names its holder when it can be known.

    With `exclusive`, a port that is held for somebody, or that remembers connections, is in use, too.
    """
    with _explained(host, port, who, remedy):
        bound = _bound(host, port, exclusive=exclusive)
        try:
            bound.listen(16_384)
        except OSError:
            bound.close()
            raise
        return bound


def hold(host: str, port: int, who: str, remedy: str, *, exclusive: bool) -> socket.socket | None:
    """Keep a port for a server that will be started: whoever looks for a free one meanwhile takes another.

    The server itself can listen there, as long as the socket that is returned does not. Only Linux has that: elsewhere
    it is looked whether the port is free, and nothing is kept.
    """
    if not exclusive:
        listen(host, port, who, remedy).close()
    with _explained(host, port, who, remedy):
        bound = _bound(host, port, exclusive=exclusive)
    if sys.platform != "linux":
        bound.close()
        return None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


def _bound(host: str, port: int, *, exclusive: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; without it small answers wait 40 ms for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if not exclusive:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


@contextlib.contextmanager
def _explained(host: str, port: int, who: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = pid_listening_on(port)
            by = f" by process {holder}" if holder else ""
            raise ConfigError(f"port {port} for {who} is already in use{by}; choose another with {remedy}") from error
        raise ConfigError(f"{who} cannot listen on {host}:{port}: {error.strerror or error}") from error


def pid_listening_on(port: int) -> int | None:
    """The process that listens on `port`, where the system tells (Linux, same user or root)."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return next((pid for pid in _pids() if inodes & _open_files(pid)), None) if inodes else None


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _open_files(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # closed since
                found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))  # noqa: PTH115
    return found
