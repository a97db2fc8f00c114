"""All runs at the paths that were given: found as they come and go, read in the background, watched while they grow."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_gym.runs.sockets import run_id
from nemo_gym.view.runs import RUNNING, Judged, Run, find_runs, newest_first

logger = logging.getLogger(__name__)

_FOUND_EVERY_S = 5.0
_AT_ONCE_BYTES = 32 << 20
_CALM = 200
"""A run is looked at again after so many times as long as looking at it took."""
_SOONEST_S, _LATEST_S = 3.0, 10.0
_IDLE_S = 5.0
"""How often a run is looked at that nobody writes to."""


class Library:
    """The runs that may be shown. Safe to use from several threads."""

    def __init__(self, roots: Sequence[Path], cache: Path | None) -> None:
        self._roots = list(roots)
        self._cache = cache
        self._runs: dict[str, Run] = {}
        self._lock = threading.RLock()
        self._found_at = -_FOUND_EVERY_S
        self._judged: Judged = {}
        self._reader: threading.Thread | None = None
        self._is_closed = threading.Event()

    @property
    def name(self) -> str:
        """The paths that were given, as one text."""
        return ", ".join(map(str, self._roots))

    def close(self) -> None:
        """Stop reading, and let go of all indexes."""
        self._is_closed.set()
        if self._reader is not None:
            self._reader.join(timeout=10)
        for run in self._runs.values():
            run.close()

    def find(self) -> list[Run]:
        """The runs there are; looked for again every few seconds."""
        with self._lock:
            if time.monotonic() - self._found_at >= _FOUND_EVERY_S:
                self._find()
                self._found_at = time.monotonic()
            return list(self._runs.values())

    def _find(self) -> None:
        found: dict[str, Run] = {}
        for root in self._roots:
            for paths in find_runs(root, self._judged):
                name = run_id(paths.rollouts)
                found[name] = self._runs.get(name) or found.get(name) or Run(paths, root, self._cache)
        for name, run in self._runs.items():
            if name not in found:
                run.close()
        self._runs = found

    def get(self, name: str) -> Run | None:
        """A run by its id, read up to its end, or as far as that is quick; None when there is none."""
        self.find()
        run = self._runs.get(name)
        if run is not None:
            self.bring_up(run)
        return run

    def bring_up(self, run: Run) -> None:
        """Read what was appended; the rest of a large file is read in the background."""
        if not run.refresh(_AT_ONCE_BYTES):
            self._read_on()

    def summaries(self) -> list[dict[str, Any]]:
        """All runs, newest first."""
        runs = self.find()
        for run in runs:
            self.bring_up(run)
        return newest_first([run.summary() for run in runs])

    def read_all(self) -> list[Run]:
        """All runs, each read to its end."""
        runs = self.find()
        for run in runs:
            run.refresh()
        return runs

    def _read_on(self) -> None:
        with self._lock:
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Thread(target=self._read, name="ng_view reader", daemon=True)
                self._reader.start()

    def _read(self) -> None:
        is_all = False
        while not is_all and not self._is_closed.is_set():
            is_all = True
            for run in list(self._runs.values()):
                if self._is_closed.is_set():
                    return
                try:
                    is_all &= run.progress is None or run.refresh(_AT_ONCE_BYTES)
                except Exception:
                    logger.exception("%s cannot be read", run.paths.rollouts)


class Watch:
    """What has changed since somebody looked the last time."""

    def __init__(self, library: Library, only: str | None = None) -> None:
        self._library = library
        self._only = only
        self._stamps: dict[str, tuple[Any, ...]] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._due: dict[str, float] = {}
        self._states: dict[str, str] = {}

    def changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Events, each a name and its data; the first time all runs."""
        events: list[tuple[str, dict[str, Any]]] = []
        for run in self._library.find():
            now = time.monotonic()
            if (self._only is None or run.id == self._only) and self._due.get(run.id, 0) <= now:
                events += self._of_run(run)
                is_running = self._states.get(run.id) == RUNNING
                took = time.monotonic() - now
                self._due[run.id] = now + max(_SOONEST_S if is_running else _IDLE_S, min(_CALM * took, _LATEST_S))
        return events

    def _of_run(self, run: Run) -> list[tuple[str, dict[str, Any]]]:
        stamp = (*run.stamp(), run.progress)
        if self._stamps.get(run.id) == stamp and self._states.get(run.id) != RUNNING:
            return []
        events: list[tuple[str, dict[str, Any]]] = []
        is_same = self._stamps.get(run.id) == stamp
        if not is_same:
            self._library.bring_up(run)
        before, after = self._totals.get(run.id), (len(run.table), run.table.rollouts.replaced)
        if self._only is not None and before is not None and after != before:
            is_replaced = after[1] != before[1]
            events.append(("rollouts", {"added": max(0, after[0] - before[0]), "replaced": is_replaced}))
        summary = run.summary()
        if not is_same or summary["state"] != self._states.get(run.id):
            events.insert(0, ("run", summary))
        self._stamps[run.id] = (*run.stamp(), run.progress)
        self._totals[run.id], self._states[run.id] = after, summary["state"]
        return events
