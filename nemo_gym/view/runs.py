"""The runs below a path: which there are, how each stands, and what is known about it besides its rollouts."""

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from nemo_gym.errors import GymError
from nemo_gym.metrics.intervals import Estimate, clustered_mean, pass_at_k
from nemo_gym.paths import odd_file
from nemo_gym.runs.facts import DAMAGED, FAILED, SCORED, UNSCORED, moment_of, seconds_of
from nemo_gym.runs.files import BESIDE_ROLLOUTS, Kind, RolloutPaths, kind_of
from nemo_gym.runs.lock import address_in, is_being_written
from nemo_gym.runs.manifest import RunManifest, read_manifest
from nemo_gym.runs.record import utc_text
from nemo_gym.runs.sockets import ask, run_id
from nemo_gym.runs.spending import prices_of
from nemo_gym.view.record_columns import Codes, Numbers, Rows
from nemo_gym.view.table import RunTable, equal_to

logger = logging.getLogger(__name__)

_MOST_FILES = 100_000
_DEEPEST_FOLDER = 12
_MANIFEST = "_manifest.json"
_MOST_METRICS_BYTES = 64 << 20
_ANSWERS_WITHIN_S = 1.0
_ASKED_EVERY_S = 2.0
TOKENS = ("input_tokens", "output_tokens", "total_tokens")
RUNNING, FINISHED, FAILURES, STOPPED = "running", "finished", "failed", "stopped"


Judged: TypeAlias = dict[Path, tuple[tuple[int, ...], Path | None]]
"""What was found out about files, so that it need not be found out again: which file it was, and whose it is."""


def find_runs(path: Path, judged: Judged | None = None) -> list[RolloutPaths]:
    """The runs at a path: a file of rollouts, or all below a folder. Links that lead out of it are not followed.

    With `judged`, files that were looked at before are not opened again.
    """
    if path.is_file():
        return [RolloutPaths(path)]
    judged = {} if judged is None else judged
    found: dict[Path, None] = {}
    for file in _files_below(path):
        rollouts = _remembered(file, judged)
        if rollouts is not None and rollouts not in found and _is_inside(rollouts, path):
            found[rollouts] = None
    return [RolloutPaths(rollouts) for rollouts in found]


def _files_below(path: Path) -> Iterator[Path]:
    seen = 0
    for folder, folders, names in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not name.endswith(".previous") and depth < _DEEPEST_FOLDER
        )
        for name in sorted(names):
            if name.endswith((".jsonl", _MANIFEST)):
                seen += 1
                if seen > _MOST_FILES:
                    logger.warning("%s has more than %d files; those after %s are not shown", path, _MOST_FILES, folder)
                    return
                yield Path(folder, name)


def _remembered(file: Path, judged: Judged) -> Path | None:
    try:
        status = file.stat()
    except OSError:
        return None
    known, rollouts = judged.get(file, ((), None))
    # A file of rollouts stays one while it grows; whatever else it was may have become one.
    same = (status.st_dev, status.st_ino)
    stamp = same if known == same else (*same, status.st_size, status.st_mtime_ns)
    if stamp != known:
        rollouts = _rollouts_of(file)
        judged[file] = (same if rollouts is not None else stamp), rollouts
    return rollouts


def _rollouts_of(file: Path) -> Path | None:
    """The rollouts file of the run that a file belongs to; None when it belongs to none."""
    try:
        if file.name.endswith(_MANIFEST):
            stem = file.name.removesuffix(_MANIFEST)
            named = _named_by(file)
            return file.with_name(named if named is not None and Path(named).stem == stem else f"{stem}.jsonl")
        if file.name.endswith(BESIDE_ROLLOUTS) or odd_file(file) is not None:
            return None
        return file if kind_of(file) in (Kind.ROLLOUTS, Kind.RESULTS, Kind.BARE) else None
    except OSError:
        return None


def _named_by(manifest: Path) -> str | None:
    """The name of the output that a manifest tells."""
    read = read_manifest(manifest)
    output = None if read is None else read.options.get("output_jsonl_fpath")
    return Path(output).name if isinstance(output, str) else None


def _is_inside(file: Path, folder: Path) -> bool:
    try:
        return file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


class Run:
    """One run: its files, and its table of rollouts once somebody asks for it. Safe to use from several threads."""

    def __init__(self, paths: RolloutPaths, root: Path, cache: Path | None) -> None:
        self.id = run_id(paths.rollouts)
        self.paths = paths
        self.lock = threading.RLock()
        folder = root if root.is_dir() else root.parent
        self._name = os.path.relpath(paths.rollouts, folder)
        self._cache = cache
        self._table: RunTable | None = None
        self._is_read = False
        self._manifest: tuple[tuple[int, int] | None, RunManifest | None] = (None, None)
        self._priced_by: RunManifest | None = None
        self._summary: tuple[object, dict[str, Any]] = (None, {})
        self._seen: list[tuple[float, int]] = []
        self._asked: tuple[float, int | None] = (-math.inf, None)

    @property
    def table(self) -> RunTable:
        """Its rollouts, as of the last refresh."""
        if self._table is None:
            self._table = RunTable(self.paths, self._cache)
        manifest = self.manifest
        if manifest is not self._priced_by:
            self._priced_by = manifest
            given = None if manifest is None else manifest.options.get("prices")
            self._table.prices = prices_of(given, manifest.models) if manifest is not None and given else None
        return self._table

    def close(self) -> None:
        """Let go of the index."""
        with self.lock:
            if self._table is not None:
                self._table.close()
                self._table = self._priced_by = None

    def refresh(self, most_bytes: int | None = None) -> bool:
        """Read what was appended, at most about so much of it; True when that is all."""
        with self.lock:
            self._is_read = self.table.refresh(most_bytes)
            return self._is_read

    def stamp(self) -> tuple[Any, ...]:
        """Something else when any of the run's files is."""
        stamps: list[Any] = []
        for path in (self.paths.rollouts, self.paths.failures, self.paths.manifest, self.paths.lock):
            try:
                status = path.stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns if path.suffix != ".lock" else 0))
        return tuple(stamps)

    @property
    def manifest(self) -> RunManifest | None:
        """What the run says about itself; read again when it has changed."""
        try:
            status = self.paths.manifest.stat()
        except OSError:
            return None
        stamp = status.st_ino, status.st_mtime_ns
        if self._manifest[0] != stamp:
            try:
                self._manifest = stamp, read_manifest(self.paths.manifest)
            except (OSError, ValueError, RecursionError) as error:
                logger.warning("%s cannot be read: %s", self.paths.manifest, error)
                self._manifest = stamp, None
        return self._manifest[1]

    def summary(self) -> dict[str, Any]:
        """How the run stands, as of the last refresh."""
        with self.lock:
            is_running = is_being_written(self.paths)
            key = (self.table.generation, self.stamp(), is_running, self._is_read)
            if self._summary[0] != key:
                self._summary = key, _summary(self, self.table, is_running=is_running)
            summary = dict(self._summary[1])
            summary["live"] = self._live(summary) if is_running else None
            if is_running:
                start = seconds_of(summary["started_at"])
                summary["wall_time_s"] = None if start is None else max(0.0, datetime.now(UTC).timestamp() - start)
            return summary

    def _live(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """How fast it goes, judged by the last minute."""
        now = datetime.now(UTC).timestamp()
        self._seen = [seen for seen in self._seen if seen[0] > now - 60] + [(now, summary["done"])]
        (then, before), (_, after) = self._seen[0], self._seen[-1]
        rate = (after - before) / (now - then) if now - then > 1 and after > before else None
        to_come = None if summary["expected"] is None else max(0, summary["expected"] - after - summary["failed"])
        return {
            "rate_per_s": rate,
            "eta_s": None if rate is None or to_come is None else to_come / rate,
            "in_flight": self._in_flight(),
        }

    def _in_flight(self) -> int | None:
        """What its collector says, if it is this user's and on this machine; None when it says nothing at once."""
        if time.monotonic() < self._asked[0] + _ASKED_EVERY_S:
            return self._asked[1]
        address = address_in(self.paths)
        try:
            found = None if address is None else ask(address, {"do": "status"}, _ANSWERS_WITHIN_S).get("in_flight")
        except GymError:
            found = None
        self._asked = time.monotonic(), found if isinstance(found, int) else None
        return self._asked[1]

    @property
    def shown_path(self) -> str:
        """Relative to the path that was given."""
        return self._name

    @property
    def progress(self) -> float | None:
        """How much of its files was read; None when all was."""
        if self._is_read:
            return None
        total = sum(path.stat().st_size for path in (self.paths.rollouts, self.paths.failures) if path.exists())
        read = self.table.rollouts.read_bytes + self.table.failures.read_bytes
        return None if read >= total else read / total


def _summary(run: Run, table: RunTable, *, is_running: bool) -> dict[str, Any]:
    manifest = run.manifest
    everything = np.arange(len(table))
    outcomes = outcomes_of(table, everything)
    expected = None if manifest is None or not manifest.agents else manifest.needed_rollouts
    done = outcomes[SCORED] + outcomes[UNSCORED]
    score, passes = scores_of(table, everything, repeats_of_run(manifest))
    progress = run.progress
    failures = classes_of(table, everything)
    started = (manifest and manifest.started_at) or moment_of(_extreme(table, "started_at", lowest=True))
    ended = (manifest and manifest.ended_at) or (
        None if is_running else moment_of(_extreme(table, "ended_at", lowest=False))
    )
    start, end = seconds_of(started), seconds_of(ended)
    shown = {
        "id": run.id,
        "name": run.paths.rollouts.stem,
        "path": run.shown_path,
        "folder": str(Path(run.shown_path).parent).removeprefix("."),
        "agents": _names(table, "agent") or sorted(manifest.agents if manifest is not None else ()),
        "models": (manifest and manifest.models) or _names(table, "model"),
        "started_at": started,
        "ended_at": ended,
        "wall_time_s": None if start is None or end is None else max(0.0, end - start),
        "state": _state(is_running, expected, done, outcomes, manifest),
        "has_failures": outcomes[FAILED] > 0,
        "expected": expected,
        "done": done,
        "failed": outcomes[FAILED],
        "damaged": outcomes[DAMAGED],
        "tasks": score_tasks(table),
        "repeats": repeats_of_run(manifest),
        "score": estimate_shown(score),
        "pass_at_k": passes,
        "coverage": coverage_text(outcomes, expected, failures, is_running=is_running),
        "failures": failures,
        "tokens": {name: int(_sum(table, name)) for name in TOKENS},
        "size_bytes": table.rollouts.read_bytes,
        "indexed": progress is None,
        "problem": _problem(run, manifest),
    }
    return shown if progress is None else {**shown, "progress": round(progress, 3)}


def _state(
    is_running: bool, expected: int | None, done: int, outcomes: Mapping[str, int], manifest: RunManifest | None
) -> str:
    if is_running:
        return RUNNING
    if expected is None:
        return FAILURES if outcomes[FAILED] else FINISHED
    if done >= expected:
        return FINISHED
    is_over = manifest is not None and manifest.ended_at is not None
    return FAILURES if is_over and done + outcomes[FAILED] >= expected else STOPPED


def _problem(run: Run, manifest: RunManifest | None) -> str | None:
    if manifest is None and run.paths.manifest.exists():
        return f"{run.paths.manifest.name} cannot be read, so it is not known what was expected"
    if not run.paths.rollouts.exists():
        return f"there is no {run.paths.rollouts.name} (yet)"
    return None


def repeats_of_run(manifest: RunManifest | None) -> int | None:
    """How many rollouts of each row were asked for; None when that is not known, or not the same everywhere."""
    repeats = None if manifest is None else manifest.options.get("num_repeats")
    return repeats if isinstance(repeats, int) and not isinstance(repeats, bool) else None


def outcomes_of(table: RunTable, rows: Rows) -> dict[str, int]:
    """How many of these rollouts ended in which way."""
    return dict.fromkeys((SCORED, UNSCORED, FAILED, DAMAGED), 0) | counts_of(table, "outcome", rows)


def counts_of(table: RunTable, name: str, rows: Rows) -> dict[Any, int]:
    """How many of these rollouts have which value in a column of texts; null is left out."""
    column = table.column(name)
    if not isinstance(column, Codes):
        return {}
    counts = np.bincount(column.codes[rows], minlength=len(column.values)).tolist()
    return {value: count for value, count in zip(column.values, counts, strict=True) if count and value is not None}


def classes_of(table: RunTable, rows: Rows) -> dict[str, int]:
    """The failures by class, the most frequent first."""
    return dict(Counter(counts_of(table, "failure_class", rows)).most_common())


def scores_of(table: RunTable, rows: Rows, repeats: int | None = None) -> tuple[Estimate, dict[str, Any] | None]:
    """The mean reward with its interval, and pass@k where there is one."""
    rewards, tasks = _numbers(table, "reward")[rows], task_numbers(table)[rows]
    is_scored = np.isfinite(rewards) & outcome_is(table, SCORED)[rows]
    rewards, tasks = rewards[is_scored], tasks[is_scored]
    if not len(rewards):
        return Estimate(None, None, 0, 0), None
    order = np.argsort(tasks, kind="stable")
    per_task = np.unique(tasks, return_counts=True)[1]
    return clustered_mean(rewards, tasks), pass_at_k(rewards[order], per_task, repeats)


def estimate_shown(score: Estimate) -> dict[str, Any]:
    """A mean as the API shows it."""
    ends = None if score.ci95 is None else list(score.ci95)
    return {"mean": score.mean, "ci95": ends, "rollouts": score.rollouts, "tasks": score.tasks}


def score_tasks(table: RunTable) -> int:
    """How many tasks there are."""
    tasks = task_numbers(table)
    return len(set(tasks[tasks >= 0].tolist()))


def task_numbers(table: RunTable) -> Rows:
    """A number for each task; -1 for records that name none."""
    column = table.column("task")
    if isinstance(column, Codes):
        return column.codes.astype(np.int64) - 1
    return np.where(np.isnan(column.values), -1, column.values).astype(np.int64)


def _numbers(table: RunTable, name: str) -> Any:
    column = table.column(name)
    return column.values if isinstance(column, Numbers) else np.full(len(column), np.nan)


def outcome_is(table: RunTable, outcome: str) -> NDArray[np.bool_]:
    """Which rollouts ended in that way."""
    return equal_to(table.column("outcome"), outcome)


def _sum(table: RunTable, name: str) -> float:
    return float(np.nansum(_numbers(table, name)))


def _extreme(table: RunTable, name: str, *, lowest: bool) -> float | None:
    values = _numbers(table, name)
    values = values[~np.isnan(values)]
    return (float(values.min()) if lowest else float(values.max())) if len(values) else None


def _names(table: RunTable, name: str) -> list[str]:
    return sorted(map(str, counts_of(table, name, np.arange(len(table)))))


def coverage_text(
    outcomes: Mapping[str, int], expected: int | None, failures: Mapping[str, int], *, is_running: bool = False
) -> str:
    """How much of a run its score rests on, said plainly."""
    scored, failed = outcomes[SCORED], outcomes[FAILED]
    of = f"{scored:,} scored" if expected is None else f"{scored:,} of {expected:,} scored"
    if expected is not None and scored > expected:
        of = f"{scored:,} scored, more than the {expected:,} that are asked for now"
    parts = [of]
    if failed:
        parts.append(f"{failed:,} failed: {', '.join(failures)}")
    if outcomes[UNSCORED]:
        parts.append(f"{outcomes[UNSCORED]:,} without a reward")
    if outcomes[DAMAGED]:
        parts.append(f"{outcomes[DAMAGED]:,} damaged lines")
    missing = 0 if expected is None else expected - scored - failed - outcomes[UNSCORED]
    if missing > 0:
        parts.append(f"{missing:,} {'to come' if is_running else 'missing'}")
    return ", ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:]) if failed else "; ".join(parts)


def run_details(run: Run) -> dict[str, Any]:
    """What is known about a run besides its summary: manifest, files, metrics."""
    manifest = run.manifest
    files = []
    for path in (*run.paths.of_one_run, run.paths.log):
        try:
            status = path.stat()
        except OSError:
            continue
        modified = utc_text(datetime.fromtimestamp(status.st_mtime, UTC))
        files.append({"name": path.name, "size_bytes": status.st_size, "modified_at": modified})
    return {
        "manifest": None if manifest is None else manifest.model_dump(mode="json"),
        "files": files,
        "metrics": _metrics(run.paths.aggregate_metrics),
    }


def _metrics(path: Path) -> list[dict[str, Any]]:
    """The key metrics of each agent in a metrics file; empty when there is none that can be read."""
    try:
        if path.stat().st_size > _MOST_METRICS_BYTES:
            return []
        entries = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    shown = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("key_metrics"), dict):
            reference = entry.get("agent_ref")
            name = reference.get("name") if isinstance(reference, dict) else None
            shown.append({"agent": name, "key_metrics": entry["key_metrics"]})
    return shown


def newest_first(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs by when they began; those that do not say come last."""
    return sorted(summaries, key=lambda run: (run["started_at"] or "", run["path"]), reverse=True)
