"""What the processes of a model server know of each other: when the next may ask, until when nobody, who asks how much.

It is a small file beside the config that a launcher hands to all processes of a run, on one machine: replicas and
workers find it without being told, and it goes when the config goes. It is written under a lock that is held for
microseconds and that nobody who serves waits for. A process that is killed leaves calls in it that are not under way
any more; they are forgotten when they matter.

Where there is no such file (another launcher, no launcher), the books are those of one process. A run in shards writes
into it which share of the limits is this shard's.

Times are those of `time.monotonic`, which is the same for all processes of a machine.
"""

import fcntl
import logging
import mmap
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, cast

from nemo_gym.keys import MODELS_TYPE
from nemo_gym.paths import open_own
from nemo_gym.process_inputs import HOSTS, HOSTS_AT, common_book

logger = logging.getLogger(__name__)

PACE_KEYS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")

_SHARE = Struct("<d")
_RECORD = Struct("<16s3dq")
_MEMBER = Struct("<III")
_KEY_BYTES = 16
_LOCKED_WITHIN_S = 10.0
_HEAD_BYTES, _MOST_SERVERS, _MOST_MEMBERS = 64, 64, 128
_RECORD_BYTES = _RECORD.size + _MOST_MEMBERS * _MEMBER.size
_FILE_BYTES = _HEAD_BYTES + _MOST_SERVERS * _RECORD_BYTES


def share_pace(config_file: Path, share: float) -> None:
    """Let the servers that were handed this config keep to a part of their limits, from 0 (they wait) to 1."""
    with _mapped(common_book(config_file)) as (memory, _):
        _SHARE.pack_into(memory, 0, 1.0 - share)  # a new file is full of zeros, and so leaves everything to its servers


def share_caps(config_file: Path, hosts: int) -> None:
    """Tell the servers that were handed this config how many host processes they divide their caps among."""
    with _mapped(common_book(config_file)) as (memory, _):
        HOSTS.pack_into(memory, HOSTS_AT, hosts)


@contextmanager
def _mapped(path: Path) -> Iterator[tuple[mmap.mmap, int]]:
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of this user")
        os.ftruncate(descriptor, _FILE_BYTES)
        with mmap.mmap(descriptor, _FILE_BYTES) as memory:
            yield memory, descriptor
    finally:
        os.close(descriptor)


def sets_pace(config: Mapping[Any, Any]) -> bool:
    """Whether a model server of a configuration is to keep a pace."""
    blocks = (
        settings
        for instance in config.values()
        if isinstance(instance, Mapping) and isinstance(instance.get(MODELS_TYPE), Mapping)
        for settings in instance[MODELS_TYPE].values()
        if isinstance(settings, Mapping)
    )
    return any(settings.get(key) is not None for settings in blocks for key in PACE_KEYS)


class Times(NamedTuple):
    """When calls may go."""

    requests_s: float = 0.0
    """The next one."""
    tokens_s: float = 0.0
    """The next one that takes tokens."""
    held_s: float = 0.0
    """None before that."""


class Books:
    """What the processes of a server know of each other: when the next may go, until when nobody, who has how many."""

    def __init__(self, config_file: Path | None, server: str) -> None:
        """Those in the file beside `config_file`; without it, or without room in it, books of this process alone."""
        self.is_shared = False
        self._descriptor = -1
        self._memory = mmap.mmap(-1, _FILE_BYTES)
        self._at, self._row = _HEAD_BYTES, 0
        if config_file is not None and config_file.exists():
            try:
                self.is_shared = self._open_shared(
                    common_book(config_file), blake2b(server.encode()).digest()[:_KEY_BYTES]
                )
            except OSError as error:
                logger.warning("%s: each process keeps a part of the pace for itself (%s)", server, error)
        if not self.is_shared:
            self._write_row(os.getpid(), 0, 0)

    def _open_shared(self, path: Path, key: bytes) -> bool:
        with _mapped(path) as (memory, descriptor):
            _lock_soon(descriptor)
            places = [_HEAD_BYTES + number * _RECORD_BYTES for number in range(_MOST_SERVERS)]
            keys = {memory[at : at + _KEY_BYTES]: at for at in reversed(places)}
            at = keys.get(key, keys.get(bytes(_KEY_BYTES), 0))
            rows = [at + _RECORD.size + row * _MEMBER.size for row in range(_MOST_MEMBERS)]
            free = [row for row, place in enumerate(rows) if at and not _lives(_MEMBER.unpack_from(memory, place)[0])]
            if free:
                memory[at : at + _KEY_BYTES] = key
                self._at, self._row, self._descriptor = at, free[0], os.dup(descriptor)
                self._memory = mmap.mmap(self._descriptor, _FILE_BYTES)
                self._write_row(os.getpid(), 0, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # which the duplicate would keep
        return bool(free)

    def close(self) -> None:
        """Leave the others alone."""
        self._write_row(0, 0, 0)
        self._memory.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def lock(self) -> bool:
        """Whether this process alone may now read and write; never waits."""
        if not self.is_shared:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        """Give the books back, so that other processes may write to them."""
        if self.is_shared:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def share(self) -> float:
        """The part of the limits that is for these processes."""
        return 1.0 - float(_SHARE.unpack_from(self._memory, 0)[0])

    def read(self) -> Times:
        """What is in them, under the lock."""
        return Times(*_RECORD.unpack_from(self._memory, self._at)[1:4])

    def write(self, times: Times, *, has_gone: bool) -> None:
        """Put into them, under the lock, what holds from now on; `has_gone`: because a call of this process goes."""
        key, *_, last = _RECORD.unpack_from(self._memory, self._at)
        _RECORD.pack_into(self._memory, self._at, key, *times, self._row + 1 if has_gone else last)

    @property
    def went_last(self) -> bool:
        """Whether the last call was one of this process."""
        return bool(_RECORD.unpack_from(self._memory, self._at)[-1] == self._row + 1)

    def tell(self, under_way: int, waiting: int) -> None:
        """Say how many calls of this process are under way and wait."""
        self._write_row(os.getpid(), under_way, waiting)

    def others(self) -> tuple[int, int]:
        """How many calls of other processes are under way, and how many wait."""
        under_way = waiting = 0
        for row, (_, running, queued) in enumerate(self._rows()):
            if row != self._row:
                under_way, waiting = under_way + running, waiting + queued
        return under_way, waiting

    def forget_the_dead(self) -> None:
        """Free what processes had under way that were killed."""
        for row, (pid, running, _) in enumerate(self._rows()):
            if pid and running and not _lives(pid):
                _MEMBER.pack_into(self._memory, self._place(row), 0, 0, 0)

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        rows = self._memory[self._place(0) : self._place(_MOST_MEMBERS if self.is_shared else 1)]
        return cast(Iterator[tuple[int, int, int]], _MEMBER.iter_unpack(rows))

    def _place(self, row: int) -> int:
        return self._at + _RECORD.size + row * _MEMBER.size

    def _write_row(self, pid: int, under_way: int, waiting: int) -> None:
        _MEMBER.pack_into(self._memory, self._place(self._row), pid, under_way, waiting)


def _lock_soon(descriptor: int) -> None:
    deadline_s = time.monotonic() + _LOCKED_WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.001)
        else:
            return


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0) if pid else None
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return bool(pid)
