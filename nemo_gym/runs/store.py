"""Where a run's rollouts go as they finish.

Each result is one line, written at once and whole, so a killed run loses at most what was in flight.
Results are not kept in memory.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from nemo_gym.errors import FileProblemError, GymError, file_problem
from nemo_gym.jsonl import newlines_in, to_line
from nemo_gym.paths import make_folder, open_own, sync_folder
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import OutputLock
from nemo_gym.runs.record import Outcome, Result, outcome_of, stamp

logger = logging.getLogger(__name__)

SYNC_AFTER_S = 4.0
"""What was written is brought to the disk after so long; with a second for the disk that makes the 5 promised."""
_CHUNK_BYTES = 1 << 20
_SAFE = "everything finished before is safe. Remove the cause and go on with +resume_from_cache=true"
RESUME_TO_REPAIR = "Go on with +resume_from_cache=true: what is whole stays, the rest is made again"


class StoreError(FileProblemError):
    """A result could not be written; what was written before is safe."""


@contextmanager
def explaining_refusals(path: Path, doing: str) -> Iterator[None]:
    """Name the file, and how to go on, in every error of the system while inside.

    Raises:
        FileProblemError: in place of an `OSError`; it is a `ConfigError` where the user can correct the cause.
    """
    try:
        yield
    except GymError:
        raise
    except OSError as error:
        raise file_problem(error, doing, path, _SAFE) from error


class FileChangedError(StoreError):
    """Somebody else has written to a file of the run; resuming makes good what was lost."""


class RolloutStore:
    """The rollouts and the failures sidecar, open for appending: `with RolloutStore(paths) as store:`.

    It may be opened more than once; between two times nobody else may have written.
    """

    def __init__(
        self,
        paths: RolloutPaths,
        lock: OutputLock | None = None,
        *,
        sync: Callable[[int], object] = os.fsync,
        sync_after_s: float = SYNC_AFTER_S,
    ) -> None:
        """`lock` is held for the files as soon as they exist; `sync` brings a file to the disk, in a thread."""
        self.paths = paths
        self.counts: Counter[Outcome] = Counter()
        """What was appended, by outcome."""
        self._lock = lock
        self._sync = sync
        self._sync_after_s = sync_after_s
        rollouts = Path(os.path.realpath(paths.rollouts)) if paths.rollouts.is_symlink() else paths.rollouts
        self._file_of = {Outcome.SUCCESS: _AppendFile(rollouts), Outcome.FAILURE: _AppendFile(paths.failures)}

    def announce(self, address: Path) -> None:
        """Let the lock file say where the run can be asked."""
        if self._lock is not None:
            self._lock.announce(address)

    def __enter__(self) -> "RolloutStore":
        with ExitStack() as closing, explaining_refusals(self.paths.rollouts, "open"):
            for file in self._file_of.values():
                file.open()
                closing.callback(file.close)
            if self._lock is not None:
                self._lock.cover(*(file.path for file in self._file_of.values()))
            for folder in {file.path.parent for file in self._file_of.values()}:
                sync_folder(folder)
            closing.pop_all()
        self._syncer = _Syncer(self._file_of.values(), self._sync, self._sync_after_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._syncer.close()
            if error is None:
                for file in self._file_of.values():
                    file.check_place()
        finally:
            for file in self._file_of.values():
                file.close()

    def append(self, row: Mapping[str, Any], result: Result) -> Outcome:
        """Stamp `result` with its row's identity and write it where it belongs.

        Raises:
            StoreError: it could not be written; the file is as it was before.
        """
        line = to_line(stamp(row, result))
        outcome = outcome_of(result)
        if outcome is not Outcome.DISCARDED:
            self._file_of[outcome].append(line)
            self._syncer.note_written()
        self.counts[outcome] += 1
        return outcome

    @property
    def num_written(self) -> int:
        """Rollouts that were appended, without failures."""
        return self._file_of[Outcome.SUCCESS].lines

    @property
    def num_synced(self) -> int:
        """How many of them are known to be on the disk."""
        return self._file_of[Outcome.SUCCESS].synced_lines

    def expect_unchanged(self) -> None:
        """From now on the files are to stay as they are, but for what is appended here."""
        with explaining_refusals(self.paths.rollouts, "open"):
            for file in self._file_of.values():
                file.take_as_it_is()

    def verify(self) -> None:
        """Look whether everything that was appended is in the files, and nothing else.

        Raises:
            FileChangedError: somebody else has written to them, shortened, removed or replaced them.
        """
        with explaining_refusals(self.paths.rollouts, "check"):
            for file in self._file_of.values():
                file.verify()


def archive_previous(paths: RolloutPaths) -> Path | None:
    """Move the files of an earlier run out of the way; returns the folder they are in now, None if there were none."""
    existing = [path for path in paths.of_one_run if path.exists()]
    if not existing:
        return None
    folder = _new_folder(paths.previous, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for path in existing:
        path.rename(folder / path.name)
    for changed in (folder, paths.rollouts.parent):
        sync_folder(changed)
    logger.info("The files of the earlier run are now in %s", folder)
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    make_folder(parent)
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        sync_folder(parent)
        return folder
    raise StoreError(f"{parent} is full of folders named {name}; remove some")


class _AppendFile:
    """A file that grows by whole lines, and by nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._identity: os.stat_result | None = None
        """Which file it is; None before that is known."""
        self._start = self._end = 0
        """How long it was, and has to be now."""
        self.lines = 0
        """How many lines there have to be in between."""
        self.synced_lines = 0
        """How many of them have reached the disk."""

    def take_as_it_is(self) -> None:
        """If it exists, expect it to stay as it is."""
        with suppress(FileNotFoundError):
            self._begin_with(self.path.stat())

    def _begin_with(self, stat: os.stat_result) -> None:
        self._identity, self.lines, self.synced_lines = stat, 0, 0
        self._start = self._end = stat.st_size

    def open(self) -> None:
        """Open it, for the first time or again.

        Raises:
            FileChangedError: it has changed since it was closed.
        """
        self._descriptor = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if self._identity is None:
                self._begin_with(os.fstat(self._descriptor))
            self.check_place()
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, line: bytes) -> None:
        """Write a line at once."""
        self.check_place()
        try:
            rest = memoryview(line)
            while rest:  # more than once if the disk is full, or a signal came
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            with suppress(OSError):  # then the line is torn, which resuming repairs
                os.ftruncate(self._descriptor, self._end)
            raise StoreError(f"cannot write to {self.path}: {error.strerror}; {_SAFE}") from error
        self._end += len(line)
        self.lines += 1

    def check_place(self) -> None:
        """Writing to a file that was removed succeeds, and nobody will ever read it; one that was cut has lost lines.

        Raises:
            FileChangedError: the file is no longer where it was, or not what it was.
        """
        try:
            stat = os.stat(self._name)  # noqa: PTH116 - for every rollout, and three times as fast
        except OSError:
            raise self._gone() from None
        if self._identity is None or not os.path.samestat(stat, self._identity):
            raise self._gone()
        if stat.st_size != self._end:
            size = os.fstat(self._descriptor).st_size  # what a name says may be late on a network
            if size != self._end:
                raise self._changed(size)

    def verify(self) -> None:
        """The same when it is closed, and with what is in it."""
        if self._identity is None:
            return
        try:
            with self.path.open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                if not os.path.samestat(stat, self._identity):
                    raise self._gone()
                if stat.st_size != self._end:
                    raise self._changed(stat.st_size)
                file.seek(self._start)
                found = sum(map(newlines_in, iter(lambda: file.read(_CHUNK_BYTES), b"")))
        except FileNotFoundError:
            raise self._gone() from None
        if found != self.lines:
            raise FileChangedError(
                f"{self.path} holds {found} of the {self.lines} lines that this run has written: another program has "
                f"written to it. {RESUME_TO_REPAIR}"
            )

    def sync(self, sync: Callable[[int], object]) -> None:
        lines = self.lines
        sync(self._descriptor)
        self.synced_lines = lines

    def close(self) -> None:
        os.close(self._descriptor)

    def _changed(self, size: int) -> FileChangedError:
        deed = "shortened it" if size < self._end else "written to it"
        return FileChangedError(
            f"{self.path} has {size:,} bytes, and this run left it with {self._end:,}: another program has {deed} "
            f"meanwhile. {RESUME_TO_REPAIR}"
        )

    def _gone(self) -> FileChangedError:
        return FileChangedError(
            f"{self.path} is no longer the file that this run writes to: it, or its folder, was removed, renamed or "
            "replaced meanwhile. If you moved it, move it back; then go on with +resume_from_cache=true"
        )


class _Syncer:
    """Brings the files to the disk soon after they were written to, whether more is written or not.

    In a thread: a slow disk must not stop the event loop.
    """

    def __init__(self, files: Iterable[_AppendFile], sync: Callable[[int], object], after_s: float) -> None:
        self._files = list(files)
        self._sync = sync
        self._after_s = after_s
        self._has_unsynced = False
        self._is_over = False
        self._woken = threading.Condition()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-sync", daemon=True)
        self._thread.start()

    def note_written(self) -> None:
        """Something is to be brought to the disk.

        Raises:
            StoreError: that failed the last time.
        """
        if self._has_unsynced:
            return
        self._raise_if_failed()
        with self._woken:
            self._has_unsynced = True
            self._woken.notify()

    def close(self) -> None:
        """Bring the rest to the disk; raises as `note_written`."""
        with self._woken:
            self._is_over = True
            self._woken.notify()
        self._thread.join()
        self._raise_if_failed()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._woken:
                self._woken.wait_for(lambda: self._has_unsynced or self._is_over)
                is_last = self._woken.wait_for(lambda: self._is_over, self._after_s)
                self._has_unsynced = False  # what is written from here on is for the next time
            try:
                for file in self._files:
                    file.sync(self._sync)
            except OSError as error:
                self._error = error

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise StoreError(
                f"rollouts may not have reached the disk ({self._error}); "
                "check the disk and go on with +resume_from_cache=true"
            ) from self._error
