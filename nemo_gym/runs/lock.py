"""One process at a time writes to the files of an output, by whatever name they are called.

The kernel's lock on `<stem>.lock` goes with the process, however it ends, so a killed collector never blocks its
successor. The file names the holder for people, and for file systems without such locks: there whoever creates it
has it. An output that is a symbolic link is locked under the name it leads to, too, and the file itself, which may
have further names, for as long as it is written to.
"""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.paths import NotAFolderError, make_folder, open_own
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.record import utc_text

logger = logging.getLogger(__name__)

_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_TRIES = 50
_PAUSE_S = 0.02
"""Between tries: whoever created the file is about to write into it, or to remove what a killed process left."""


_ADDRESS = "control_socket"
_ELSEWHERE_S = 600.0
"""How long a collector elsewhere may write nothing and still be thought to be at work."""


class OutputInUseError(ConfigError):
    """Another collector writes to the same output file."""


class OutputLock:
    """What the one writer of an output holds."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._covered: set[tuple[int, int]] = set()
        self._locks: list[RunLock] = []

    def hold(self, lock: "RunLock") -> None:
        """Take a lock file, for as long as the block lasts in which this is held."""
        self._locks.append(self._stack.enter_context(lock))

    def announce(self, address: Path) -> None:
        """Let the lock file say where its holder can be asked."""
        for lock in self._locks:
            lock.announce(address)

    def cover(self, *paths: Path) -> None:
        """Let nobody else write to these files, as far as they exist, whatever other names they have.

        Raises:
            OutputInUseError: somebody else does, or that cannot be told.
        """
        for path in paths:
            with suppress(FileNotFoundError):
                self._cover(path)

    def _cover(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with ExitStack() as closing:
            closing.callback(os.close, descriptor)
            stat = os.fstat(descriptor)
            if (stat.st_dev, stat.st_ino) in self._covered:
                return
            try:
                is_locked = _has_lock(descriptor)
            except BlockingIOError as error:
                raise OutputInUseError(
                    f"another collector is writing to {path}, by another name of the same file; wait for it, stop it, "
                    "or choose another +output_jsonl_fpath"
                ) from error
            if is_locked:
                self._covered.add((stat.st_dev, stat.st_ino))
                self._stack.enter_context(closing.pop_all())
            elif stat.st_nlink > 1:
                raise OutputInUseError(
                    f"{path} has {stat.st_nlink} names (hard links), and on this file system it cannot be told whether "
                    "a collector writes to it by another one; remove the other names, or go on with a copy of the file"
                )


@contextmanager
def only_writer(paths: RolloutPaths) -> Iterator[OutputLock]:
    """Make this process the only one that writes to the files of an output, whose folder is made if need be.

    Raises:
        OutputInUseError: another process does.
        ConfigError: it is not possible to write there.
    """
    folder = paths.rollouts.parent
    with ExitStack() as stack:
        held = OutputLock(stack)
        try:
            make_folder(folder)
            for path in _lock_files(paths):
                held.hold(RunLock(path))
            held.cover(paths.rollouts, paths.failures)
        except OSError as error:
            if isinstance(error, ConfigError) and not isinstance(error, NotAFolderError):
                raise
            raise ConfigError(f"cannot write to {folder}, the folder of +output_jsonl_fpath: {error}") from error
        yield held


def _lock_files(paths: RolloutPaths) -> list[Path]:
    """That of the output as it was named, and of what that name leads to."""
    target = RolloutPaths(Path(os.path.realpath(paths.rollouts))).lock
    own = Path(os.path.realpath(paths.lock.parent), paths.lock.name)
    return [paths.lock] if target == own else [paths.lock, target]


class RunLock:
    """`with RunLock(path):` makes this process the only one that holds the lock file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        """Take the lock.

        Raises:
            OutputInUseError: a living process holds it.
            SymbolicLinkError: it is a link, which is not followed.
        """
        self._descriptor = self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._descriptor is not None
        if self._is_still_the_file(self._descriptor):
            with suppress(OSError):  # in a folder that became read-only it stays, and the next one takes it over
                self._path.unlink()  # before it is given up, or it might be the next one's
        os.close(self._descriptor)
        self._descriptor = None

    def announce(self, address: Path) -> None:
        """Let the file say where its holder can be asked."""
        if self._descriptor is not None:
            _write(self._descriptor, {**_read_holder(self._descriptor), _ADDRESS: str(address)})

    def _take(self) -> int:
        for _ in range(_TRIES):
            descriptor, is_new = self._open()
            try:
                if self._is_ours(descriptor, is_new=is_new):
                    _write_holder(descriptor)
                    if self._is_still_the_file(descriptor):
                        return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(_PAUSE_S)
        raise self._unsettled()

    def _open(self) -> tuple[int, bool]:
        """The lock file, and whether it was created here and now: without kernel locks that decides."""
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                return open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
            with suppress(FileNotFoundError):
                return open_own(self._path, os.O_RDWR), False
        raise self._unsettled()

    def _is_ours(self, descriptor: int, *, is_new: bool) -> bool:
        """Whether the lock is taken; False means: try again."""
        holder = _read_holder(descriptor)
        try:
            is_locked = _has_lock(descriptor)
        except BlockingIOError as error:
            raise self._refusal(holder) from error
        if not is_locked:
            return is_new or self._has_removed_dead(descriptor, holder)
        if _is_alive(holder):
            raise self._refusal(holder)
        if not self._is_still_the_file(descriptor):
            return False
        if holder:
            logger.warning("Taking over %s from process %s, which is gone", self._path, holder.get("pid"))
        return True

    def _has_removed_dead(self, descriptor: int, holder: dict[str, Any]) -> bool:
        """Remove the file of a process that is gone, if it is that; always False: then somebody may create it anew.

        One at a time, or a second one would remove the file that the first has created meanwhile.
        """
        if "pid" not in holder:
            return False
        if not _is_here(holder) or _is_alive(holder):
            raise self._refusal(holder)
        try:
            os.close(open_own(self._takeover, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        try:
            if self._is_still_the_file(descriptor):
                logger.warning("Taking over %s from process %s, which is gone", self._path, holder.get("pid"))
                self._path.unlink()
        finally:
            self._takeover.unlink(missing_ok=True)
        return False

    @property
    def _takeover(self) -> Path:
        return self._path.with_name(f"{self._path.name}.tmp")

    def _is_still_the_file(self, descriptor: int) -> bool:
        """False when its last holder removed it between our opening and our locking it."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except OSError:
            return False

    def _unsettled(self) -> OutputInUseError:
        return OutputInUseError(
            f"{self._path} names nobody, or keeps changing hands; is another collector writing to the same output? "
            f"If not, delete it, and {self._takeover} if there is one"
        )

    def _refusal(self, holder: dict[str, Any]) -> OutputInUseError:
        host = holder.get("host", _host())
        where = "" if host == _host() else f" on {host}"
        since = f", since {holder['since']}" if "since" in holder else ""
        return OutputInUseError(
            f"process {holder.get('pid', '?')}{where} is already collecting into this output "
            f"(lock file {self._path}{since}); wait for it, stop it, or choose another +output_jsonl_fpath. "
            "If no such collector runs, delete the lock file."
        )


def is_being_written(paths: RolloutPaths) -> bool:
    """Whether a collector is at work on these files, found out without touching the lock.

    A holder that cannot be seen from here, on another machine or in another container, counts as long as files change.
    """
    holder = _holder_of(paths.lock)
    if holder is None:
        return False
    if _is_here(holder):
        return _is_alive(holder)
    return any(_changed_lately(path) for path in (paths.lock, paths.rollouts, paths.failures))


def address_in(paths: RolloutPaths) -> Path | None:
    """Where the collector that is at work on these files can be asked; None when there is none, or it does not say."""
    holder = _holder_of(paths.lock)
    address = None if holder is None or not _is_alive(holder) else holder.get(_ADDRESS)
    return Path(address) if isinstance(address, str) else None


def _holder_of(lock: Path) -> dict[str, Any] | None:
    """Who a lock file says holds it; None when there is no such file."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _read_holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _changed_lately(path: Path) -> bool:
    with suppress(OSError):
        return time.time() - path.stat().st_mtime < _ELSEWHERE_S
    return False


def _has_lock(descriptor: int) -> bool:
    """Lock a file for as long as the descriptor is open; False when its file system has no locks.

    Raises:
        BlockingIOError: somebody else has locked it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def _write_holder(descriptor: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": _host(),
        "since": utc_text(datetime.now(UTC)),
        "process_start": _process_start(os.getpid()),
        "pid_namespace": _pid_namespace(),
    }
    _write(descriptor, holder)


def _write(descriptor: int, holder: dict[str, Any]) -> None:
    content = orjson.dumps(holder) + b"\n"
    os.pwrite(descriptor, content, 0)  # in one step: whoever looks meanwhile sees a holder
    os.ftruncate(descriptor, len(content))


def _read_holder(descriptor: int) -> dict[str, Any]:
    """Who the file says holds the lock; empty when it says nothing."""
    try:
        content = orjson.loads(os.pread(descriptor, 4096, 0))
    except orjson.JSONDecodeError:
        return {}
    if isinstance(content, int):
        return {"pid": content}
    return content if isinstance(content, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the named process still runs here; its start time tells it from a later one with the same number."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0 or not _is_here(holder):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started = holder.get("process_start")
    return started is None or started == _process_start(pid)


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether the process it names is one that this process could see: same machine, same container."""
    namespace = holder.get("pid_namespace")
    return holder.get("host", _host()) == _host() and namespace in (None, _pid_namespace())


def _pid_namespace() -> str | None:
    """What tells containers apart that go by one host name; None where there is no /proc."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _process_start(pid: int) -> str | None:
    """When a process started, in the kernel's own terms; None where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _host() -> str:
    return socket.gethostname()
