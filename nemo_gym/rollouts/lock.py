"""One writer per output file.

The kernel's lock on `<stem>.lock` goes with the process, however it ends, so a killed collector never
blocks its successor. The file names the holder for people, and for file systems without such locks.
"""

import errno
import fcntl
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.rollouts.record import utc_text

logger = logging.getLogger(__name__)

_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_TRIES = 10


class OutputInUseError(ConfigError):
    """Another collector writes to the same output file."""


class RunLock:
    """`with RunLock(path):` makes this process the only one that writes to the run's files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        """Take the lock.

        Raises:
            OutputInUseError: a living process holds it.
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

    def _take(self) -> int:
        for _ in range(_TRIES):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock_or_refuse(descriptor)
                if self._is_still_the_file(descriptor):
                    _write_holder(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise OutputInUseError(f"{self._path} keeps changing hands; is another collector writing to the same output?")

    def _lock_or_refuse(self, descriptor: int) -> None:
        holder = _read_holder(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refusal(holder) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if holder.get("host", _host()) != _host():
                raise self._refusal(holder) from error
        if _is_alive(holder):
            raise self._refusal(holder)
        if holder:
            logger.warning("Taking over %s from process %s, which is gone", self._path, holder.get("pid"))

    def _is_still_the_file(self, descriptor: int) -> bool:
        """False when its last holder removed it between our opening and our locking it."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except OSError:
            return False

    def _refusal(self, holder: dict[str, Any]) -> OutputInUseError:
        host = holder.get("host", _host())
        where = "" if host == _host() else f" on {host}"
        since = f", since {holder['since']}" if "since" in holder else ""
        return OutputInUseError(
            f"process {holder.get('pid', '?')}{where} is already collecting into this output "
            f"(lock file {self._path}{since}); wait for it, stop it, or choose another +output_jsonl_fpath. "
            "If no such collector runs, delete the lock file."
        )


def _write_holder(descriptor: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": _host(),
        "since": utc_text(datetime.now(UTC)),
        "process_start": _process_start(os.getpid()),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, orjson.dumps(holder) + b"\n", 0)


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
    if not isinstance(pid, int) or pid <= 0 or holder.get("host", _host()) != _host():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started = holder.get("process_start")
    return started is None or started == _process_start(pid)


def _process_start(pid: int) -> str | None:
    """When a process started, in the kernel's own terms; None where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _host() -> str:
    return socket.gethostname()
