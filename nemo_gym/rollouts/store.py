"""Where a run's rollouts go as they finish.

Each result is one line, written at once and whole, so a killed run loses at most what was in flight.
Results are not kept in memory.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from nemo_gym.errors import GymError
from nemo_gym.jsonl import to_line
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Outcome, Result, outcome_of, stamp

logger = logging.getLogger(__name__)

SYNC_EVERY_S = 5.0


class StoreError(GymError, OSError):
    """A result could not be written; what was written before is safe."""


class RolloutStore:
    """The rollouts and the failures sidecar, open for appending: `with RolloutStore(paths) as store:`."""

    def __init__(self, paths: RolloutPaths) -> None:
        self.paths = paths
        self.counts: Counter[Outcome] = Counter()
        """What was appended, by outcome."""

    def __enter__(self) -> "RolloutStore":
        rollouts = _AppendFile(self.paths.rollouts)
        try:
            failures = _AppendFile(self.paths.failures)
        except BaseException:
            rollouts.close()
            raise
        self._file_of = {Outcome.SUCCESS: rollouts, Outcome.FAILURE: failures}
        self._syncer = _Syncer(self._file_of.values())
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
            self._syncer.sync_if_due()
        self.counts[outcome] += 1
        return outcome


def archive_previous(paths: RolloutPaths) -> Path | None:
    """Move the files of an earlier run out of the way; returns the folder they are in now, None if there were none."""
    existing = [path for path in paths.of_one_run if path.exists()]
    if not existing:
        return None
    folder = _new_folder(paths.previous, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for path in existing:
        path.rename(folder / path.name)
    logger.info("The files of the earlier run are now in %s", folder)
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(exist_ok=True)
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise StoreError(f"{parent} is full of folders named {name}; remove some")


class _AppendFile:
    """A file that grows by whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = str(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._identity = os.fstat(self._descriptor)
        self._end = os.lseek(self._descriptor, 0, os.SEEK_END)

    def append(self, line: bytes) -> None:
        self.check_place()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            with suppress(OSError):  # then the line is torn, which resuming repairs
                os.ftruncate(self._descriptor, self._end)
            raise StoreError(
                f"cannot write to {self._path}: {error.strerror}; everything finished before is safe. "
                "Remove the cause and go on with +resume_from_cache=true"
            ) from error
        self._end += len(line)

    def check_place(self) -> None:
        """Writing to a file that was removed succeeds, and nobody will ever read it.

        Raises:
            StoreError: the file is no longer where it was.
        """
        try:
            if os.path.samestat(os.stat(self._name), self._identity):  # noqa: PTH116 - for every rollout, and three times as fast
                return
        except OSError:
            pass
        raise StoreError(
            f"{self._path} is no longer the file that this run writes to: it, or its folder, was removed, renamed or "
            "replaced meanwhile. If you moved it, move it back; then go on with +resume_from_cache=true"
        )

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _Syncer:
    """Brings the files to the disk every few seconds, in a thread: a slow disk must not stop the event loop."""

    def __init__(self, files: Iterable[_AppendFile]) -> None:
        self._files = list(files)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-sync")
        self._running: Future[None] | None = None
        self._last = time.monotonic()

    def sync_if_due(self) -> None:
        now = time.monotonic()
        if now - self._last < SYNC_EVERY_S or (self._running is not None and not self._running.done()):
            return
        self._raise_if_failed()
        self._last = now
        self._running = self._thread.submit(self._sync)

    def close(self) -> None:
        self._running = self._thread.submit(self._sync)
        self._thread.shutdown(wait=True)
        self._raise_if_failed()

    def _sync(self) -> None:
        for file in self._files:
            file.sync()

    def _raise_if_failed(self) -> None:
        error = None if self._running is None else self._running.exception()
        if error is not None:
            raise StoreError(
                f"rollouts may not have reached the disk ({error}); "
                "check the disk and go on with +resume_from_cache=true"
            ) from error
