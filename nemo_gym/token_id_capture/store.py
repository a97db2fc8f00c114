"""Entries in files, a few per rollout, in a folder that model servers and the collector share.

`<id>.tokens.jsonl` holds the entries, one per line; `.tokens.intents` the calls that began, `.tokens.incomplete` those
that could not be kept; `.tokens.state.json` what is known about the rollout; `.tokens.lock` is held while any of them
is touched. A line is on the disk before a call is answered. The last line may be torn by a crash and is cut off then.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from nemo_gym.token_id_capture.config import token_id_capture_config
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot
from nemo_gym.token_id_capture.records import TokenEntry

__all__ = ["TokenCaptureStore", "make_token_store", "validate_rollout_id"]

_ID = re.compile(r"[A-Za-z0-9._-]+")
_STATE = ".tokens.state.json"
_LOCK_TRIES = 100


def validate_rollout_id(rollout_id: str) -> str:
    """The id itself, if files can be named after it.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(rollout_id, str) or not _ID.fullmatch(rollout_id):
        raise ValueError(f"Invalid rollout id {rollout_id!r}: it must be letters, digits, `.`, `_` and `-`")
    return rollout_id


@dataclass
class _State:
    """What is known about a rollout besides its entries."""

    frozen: bool = False
    retired: bool = False
    incomplete: bool = False
    snapshot_id: str = ""
    version: int = 0
    entry_digests: dict[str, str] = field(default_factory=dict)
    indexed_size: int = 0
    """Bytes of the entries' file that `entry_digests` knows."""


class TokenCaptureStore:
    """Both a sink and a source."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        self._root.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        """The folder that all files of the store are in."""
        return self._root

    def path_for(self, rollout_id: str) -> Path:
        """The entries of a rollout."""
        return self._file(rollout_id, ".tokens.jsonl")

    def incomplete_path_for(self, rollout_id: str) -> Path:
        """The calls that could not be kept."""
        return self._file(rollout_id, ".tokens.incomplete")

    def intents_path_for(self, rollout_id: str) -> Path:
        """The calls that began."""
        return self._file(rollout_id, ".tokens.intents")

    def state_path_for(self, rollout_id: str) -> Path:
        """What is known about a rollout."""
        return self._file(rollout_id, _STATE)

    def lock_path_for(self, rollout_id: str) -> Path:
        """Held while its files are touched."""
        return self._file(rollout_id, ".tokens.lock")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Note that a call could not be kept.

        Raises:
            RuntimeError: the rollout is retired.
        """
        await asyncio.to_thread(self._mark_incomplete, rollout_id, model_call_id)

    def is_incomplete(self, rollout_id: str) -> bool:
        """Whether a call is known to be missing."""
        return self.incomplete_path_for(rollout_id).exists() or self._state(rollout_id).incomplete

    def append(self, entry: TokenEntry) -> None:
        """Keep an entry; the same one again changes nothing.

        Raises:
            ValueError: there is another entry of the same call; the rollout is incomplete from now on.
            RuntimeError: the rollout is frozen or retired.
        """
        rollout_id, line = entry.rollout_id, _line_of(entry)
        digest = hashlib.sha256(line).hexdigest()
        with self._locked(rollout_id):
            state = self._indexed(rollout_id)
            known = state.entry_digests.get(entry.model_call_id)
            if known == digest:
                return
            if state.frozen or state.retired:
                what = "retired" if state.retired else "frozen"
                raise RuntimeError(f"rollout {rollout_id} is {what}: call {entry.model_call_id} came too late")
            if known is not None:
                self._note_incomplete(rollout_id, entry.model_call_id, state)
                raise ValueError(f"rollout {rollout_id} has another entry of call {entry.model_call_id} already")
            _append(self.path_for(rollout_id), line)
            state.entry_digests[entry.model_call_id] = digest
            state.indexed_size += len(line)
            self._write_state(rollout_id, state)

    async def put(self, entry: TokenEntry) -> None:
        """`append`, without holding up others."""
        await asyncio.to_thread(self.append, entry)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Note that a call begins.

        Raises:
            RuntimeError: the rollout is frozen or retired.
        """
        await asyncio.to_thread(self._begin_call, rollout_id, model_call_id)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """`freeze_now`, without holding up others."""
        return await asyncio.to_thread(self.freeze_now, rollout_id)

    def freeze_now(self, rollout_id: str) -> TokenCaptureSnapshot:
        """What was kept of a rollout; nothing is added from now on.

        Raises:
            ValueError: a line of its file is no entry.
        """
        with self._locked(rollout_id):
            state = self._indexed(rollout_id)
            entries = () if state.retired else tuple(self._entries(rollout_id))
            begun, kept = set(_lines(self.intents_path_for(rollout_id))), {entry.model_call_id for entry in entries}
            is_marked = state.incomplete or self.incomplete_path_for(rollout_id).exists()
            incomplete = not state.retired and (is_marked or bool(begun - kept))
            if not state.frozen:
                state.frozen, state.incomplete = True, incomplete
                state.snapshot_id, state.version = uuid4().hex, state.version + 1
                self._write_state(rollout_id, state)
            return TokenCaptureSnapshot(rollout_id, entries, incomplete, state.snapshot_id, state.version)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete what a snapshot held and remember that it is done with; False if it is not the latest any more."""
        return await asyncio.to_thread(self._drop, rollout_id, snapshot_id, version)

    async def close(self) -> None:
        """Nothing is open between calls."""

    def delete(self, rollout_id: str) -> None:
        """Forget a rollout that is about to be made again."""
        with self._locked(rollout_id):
            self._delete_payloads(rollout_id)
            self.state_path_for(rollout_id).unlink(missing_ok=True)

    def sweep_retired(self, older_than_seconds: float) -> int:
        """Delete what is left of rollouts that were retired so long ago; how many there were."""
        swept = 0
        for path in self._root.glob(f"*{_STATE}"):
            rollout_id = path.name.removesuffix(_STATE)
            with self._locked(rollout_id):
                is_old = path.exists() and time.time() - path.stat().st_mtime >= older_than_seconds
                if is_old and self._state(rollout_id).retired:
                    path.unlink()
                    self.lock_path_for(rollout_id).unlink()
                    swept += 1
        return swept

    def read_entries(self, rollout_id: str) -> list[TokenEntry]:
        """The entries so far.

        Raises:
            ValueError: a line is no entry.
        """
        with self._locked(rollout_id):
            self._indexed(rollout_id)
            return self._entries(rollout_id)

    def _file(self, rollout_id: str, ending: str) -> Path:
        return self._root / f"{validate_rollout_id(rollout_id)}{ending}"

    @contextmanager
    def _locked(self, rollout_id: str) -> Iterator[None]:
        """Hold the lock; one whose file was swept away while waiting for it is no lock any more."""
        path = self.lock_path_for(rollout_id)
        for _ in range(_LOCK_TRIES):
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    is_current = os.fstat(file.fileno()).st_ino == path.stat().st_ino
                except FileNotFoundError:
                    is_current = False
                if is_current:
                    yield
                    return
        raise RuntimeError(f"{path} is deleted as fast as it is made; is the folder being cleaned?")

    def _state(self, rollout_id: str) -> _State:
        path = self.state_path_for(rollout_id)
        try:
            told = json.loads(path.read_bytes())
            return _State(**{key: told[key] for key in asdict(_State()) if key in told})
        except FileNotFoundError:
            return _State()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}; delete the files of rollout {rollout_id}") from error

    def _write_state(self, rollout_id: str, state: _State) -> None:
        path = self.state_path_for(rollout_id)
        beside = path.with_name(f"{path.name}.new")
        with beside.open("wb") as file:
            file.write(json.dumps(asdict(state), sort_keys=True).encode())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def _indexed(self, rollout_id: str) -> _State:
        """The state, with the lines in it that a crash kept it from knowing."""
        state, path = self._state(rollout_id), self.path_for(rollout_id)
        size = path.stat().st_size if path.exists() else 0
        if size == state.indexed_size:
            return state
        with path.open("r+b") as file:
            file.seek(state.indexed_size)
            added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            if len(whole) < len(added):
                file.truncate(state.indexed_size + len(whole))
        for line in whole.splitlines(keepends=True):
            state.entry_digests[_entry_of(line, path).model_call_id] = hashlib.sha256(line).hexdigest()
        state.indexed_size += len(whole)
        return state

    def _entries(self, rollout_id: str) -> list[TokenEntry]:
        path = self.path_for(rollout_id)
        if not path.exists():
            return []
        return [_entry_of(line, path) for line in path.read_bytes().splitlines()]

    def _mark_incomplete(self, rollout_id: str, model_call_id: str) -> None:
        with self._locked(rollout_id):
            state = self._indexed(rollout_id)
            if state.retired:
                raise RuntimeError(f"rollout {rollout_id} is retired: call {model_call_id} came too late")
            self._note_incomplete(rollout_id, model_call_id, state)

    def _note_incomplete(self, rollout_id: str, model_call_id: str, state: _State) -> None:
        _append(self.incomplete_path_for(rollout_id), f"{model_call_id}\n".encode())
        state.incomplete, state.version = True, state.version + 1
        self._write_state(rollout_id, state)

    def _begin_call(self, rollout_id: str, model_call_id: str) -> None:
        with self._locked(rollout_id):
            state = self._state(rollout_id)
            if state.frozen or state.retired:
                raise RuntimeError(f"rollout {rollout_id} is over: call {model_call_id} came too late")
            _append(self.intents_path_for(rollout_id), f"{model_call_id}\n".encode())

    def _drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        with self._locked(rollout_id):
            state = self._state(rollout_id)
            if not state.frozen or (state.snapshot_id, state.version) != (snapshot_id, version):
                return False
            if not state.retired:
                retired = _State(frozen=True, retired=True, snapshot_id=snapshot_id, version=version)
                self._write_state(rollout_id, retired)
            self._delete_payloads(rollout_id)
            return True

    def _delete_payloads(self, rollout_id: str) -> None:
        for path_for in (self.path_for, self.incomplete_path_for, self.intents_path_for):
            path_for(rollout_id).unlink(missing_ok=True)


def make_token_store(global_config_dict: Any) -> TokenCaptureStore | None:
    """The store in the folder that a run's configuration names; None when it keeps nothing, or not in files."""
    config = token_id_capture_config(global_config_dict)
    if not config.enabled or config.token_id_capture.sink or config.resolved_dir is None:
        return None
    return TokenCaptureStore(config.resolved_dir)


def _line_of(entry: TokenEntry) -> bytes:
    return json.dumps(entry.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _entry_of(line: bytes, path: Path) -> TokenEntry:
    try:
        return TokenEntry.model_validate_json(line)
    except ValueError as error:
        raise ValueError(f"{path} has a line that is no entry: {line[:80]!r}: {error}") from error


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
