"""Looking after a recording: what is in it, whether it is sound, and dropping what is of no use any more."""

import contextlib
import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from nemo_gym.errors import ConfigError, did_you_mean
from nemo_gym.keys import MODEL_NAME_KEYS
from nemo_gym.paths import write_aside
from nemo_gym.recording.files import (
    CALLS_SUFFIX,
    INDEX_SUFFIX,
    CallKey,
    Damage,
    DamagedRecordingError,
    Frame,
    Index,
    Scan,
    call_files,
    read_call,
    scan,
)
from nemo_gym.recording.recorder import whole_request
from nemo_gym.recording.requests import sample_of

_NANOSECONDS = 1_000_000_000
_SECONDS_OF_A_DAY = 24 * 60 * 60


@dataclass
class ServerCalls:
    """The calls of one model server."""

    server: str
    model: str | None = None
    files: int = 0
    calls: int = 0
    superseded: int = 0
    """Calls that were recorded again later."""
    rollouts: int = 0
    bytes: int = 0
    first_ns: int = 0
    last_ns: int = 0


@dataclass
class Inventory:
    """What is in a recording."""

    folder: Path
    servers: list[ServerCalls] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    torn_bytes: int = 0
    """Of calls that were in flight when their writers were killed, or are being written now."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "folder": str(self.folder),
            "servers": [
                {
                    **{name: value for name, value in vars(server).items() if not name.endswith("_ns")},
                    "first_at": server.first_ns / _NANOSECONDS,
                    "last_at": server.last_ns / _NANOSECONDS,
                }
                for server in self.servers
            ],
            "damage": [{"file": str(place.file), "offset": place.offset, "what": place.what} for place in self.damage],
            "torn_bytes": self.torn_bytes,
        }


class CallOfRollout(NamedTuple):
    """One recorded call of a rollout."""

    about: dict[str, Any]
    response: bytes
    is_superseded: bool


def take_inventory(folder: Path, server: str | None = None, *, verify: bool = False) -> Inventory:
    """What is in a recording; with `verify` every call is read and held against its checksum.

    Raises:
        ConfigError: there is no recording, or none of that server.
    """
    found = Inventory(folder)
    by_server: dict[str, ServerCalls] = {}
    keys: dict[str, Counter[CallKey]] = {}
    samples: dict[str, set[int]] = {}
    for path in _files_of(folder, server):
        scanned = scan(path, verify=verify)
        found.damage += scanned.damage
        found.torn_bytes += scanned.torn_bytes
        if not scanned.frames:
            continue
        name, model = _named_in(path, scanned)
        of_server = by_server.setdefault(name, ServerCalls(name, model, first_ns=scanned.frames[0].ended_ns))
        of_server.files += 1
        of_server.calls += len(scanned.frames)
        of_server.bytes += path.stat().st_size
        of_server.first_ns = min(of_server.first_ns, *(frame.ended_ns for frame in scanned.frames))
        of_server.last_ns = max(of_server.last_ns, *(frame.ended_ns for frame in scanned.frames))
        keys.setdefault(name, Counter()).update(frame.key for frame in scanned.frames)
        samples.setdefault(name, set()).update(frame.sample for frame in scanned.frames)
    for name, of_server in by_server.items():
        of_server.superseded = of_server.calls - len(keys[name])
        of_server.rollouts = len(samples[name])
    found.servers = sorted(by_server.values(), key=lambda each: each.server)
    return found


def _files_of(folder: Path, server: str | None) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"+folder={folder}: there is no such folder")
    files = call_files(folder, server)
    if files:
        return files
    if server is not None and call_files(folder):
        names = {name for path in call_files(folder) if (name := _named_in(path, scan(path))[0])}
        raise ConfigError(f"+server={server}: {folder} has no calls of such a server{did_you_mean(server, names)}")
    raise ConfigError(f"+folder={folder}: there are no recorded calls in it (*{CALLS_SUFFIX})")


def _named_in(path: Path, scanned: Scan) -> tuple[str, str | None]:
    """The server and the model that a file is of: all of its calls are."""
    for frame in scanned.frames:
        try:
            about = read_call(path, frame).about
        except (DamagedRecordingError, ConfigError):
            continue
        settings = about.get("settings") or {}
        model = next((settings[key] for key in MODEL_NAME_KEYS if settings.get(key)), None)
        return str((about.get("model_ref") or {}).get("name")), None if model is None else str(model)
    return path.name.rsplit("-", 3)[0], None


def calls_of_rollout(folder: Path, rollout_id: str, server: str | None = None) -> Iterator[CallOfRollout]:
    """The recorded calls of a rollout, the first first.

    Raises:
        ConfigError: there are none.
    """
    sample = sample_of(rollout_id)
    found = [(path, frame) for path in _files_of(folder, server) for frame in scan(path).frames]
    own = sorted((item for item in found if item[1].sample == sample), key=lambda item: item[1].ended_ns)
    if not own:
        raise ConfigError(f"+rollout={rollout_id}: {folder} has no calls of this rollout (task 3, repeat 0 is 3-0)")
    last = {frame.key: frame for _, frame in own}
    index = Index(folder, server)
    for path, frame in own:
        call = read_call(path, frame)
        about = {**call.about, "request": whole_request(index, call.about)}
        yield CallOfRollout(about, call.response, last[frame.key] is not frame)


class Pruned(NamedTuple):
    """What became of a recording."""

    kept: int
    dropped: int
    freed_bytes: int
    in_use: list[Path]
    """Files that servers are writing now: these stay as they are."""


def prune(
    folder: Path, server: str | None = None, *, older_than_days: float | None = None, max_bytes: int | None = None
) -> Pruned:
    """Drop calls that were recorded again later, damaged ones, what killed writers left behind, and what is too old.

    Every file that loses something is written anew before the old one goes, so that nothing is lost if this is killed.

    Raises:
        ConfigError: there is no recording.
    """
    files = _files_of(folder, server)
    in_use: list[Path] = []
    scanned: dict[Path, Scan] = {}
    with contextlib.ExitStack() as stack:
        for path in files:
            if not stack.enter_context(_locked(path)):
                in_use.append(path)
            scanned[path] = scan(path, verify=path not in in_use)
        wanted = _wanted(scanned, older_than_days, max_bytes)
        before = sum(path.stat().st_size for path in files)
        kept = dropped = 0
        for path, found in scanned.items():
            frames = found.frames if path in in_use else [frame for frame in found.frames if (path, frame) in wanted]
            kept += len(frames)
            dropped += len(found.frames) - len(frames) + (0 if path in in_use else len(found.damage))
            if path not in in_use and (len(frames) < len(found.frames) or found.damage or found.torn_bytes):
                _rewrite(path, frames)
    return Pruned(kept, dropped, before - sum(path.stat().st_size for path in call_files(folder, server)), in_use)


def _wanted(scanned: dict[Path, Scan], older_than_days: float | None, max_bytes: int | None) -> set[tuple[Path, Frame]]:
    last: dict[CallKey, tuple[Path, Frame]] = {}
    for path, found in scanned.items():
        for frame in found.frames:
            known = last.get(frame.key)
            if known is None or known[1].ended_ns <= frame.ended_ns:
                last[frame.key] = path, frame
    newest_first = sorted(last.values(), key=lambda item: -item[1].ended_ns)
    if older_than_days is not None:
        since_ns = time.time_ns() - int(older_than_days * _SECONDS_OF_A_DAY * _NANOSECONDS)
        newest_first = [item for item in newest_first if item[1].ended_ns >= since_ns]
    if max_bytes is None:
        return set(newest_first)
    wanted = set()
    for item in newest_first:
        max_bytes -= item[1].size
        if max_bytes < 0:
            break
        wanted.add(item)
    return wanted


def _rewrite(path: Path, frames: list[Frame]) -> None:
    """The same file with these frames only, under another name, so that nobody goes on reading by old places."""
    if frames:
        start = path.name.removesuffix(CALLS_SUFFIX).rpartition("-")[0]
        with path.open("rb") as old, write_aside(path.with_name(f"{start}-{token_hex(4)}{CALLS_SUFFIX}")) as new:
            for frame in frames:
                old.seek(frame.offset)
                new.write(old.read(frame.size))
    path.unlink()
    path.with_name(path.name + INDEX_SUFFIX).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether nobody writes to a file, which nobody does then until the end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True
    finally:
        os.close(descriptor)
