"""PUBLIC: `RolloutBuffer`, groups on their way from those who make them to those who train on them.

    buffer = RolloutBuffer(capacity=256, max_age=2, path="buffer.ngb")
    await manager.generate_and_push(sample)              # reserves, makes, commits
    batch = await buffer.take(32)                        # the oldest first, unless told otherwise
    train(batch); buffer.done(batch)                     # only now they are gone

With a `path`, every committed group is on the disk before `commit` returns, and stays until it is `done`: a trainer
that is killed finds all of them again, those included that it had taken and not finished. One file holds it all: a
line per event, each with its checksum; a line that was cut short by the end of its writer is left out. Opening a file
is restoring what it holds.
"""

import asyncio
import base64
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nemo_gym.errors import GymError
from nemo_gym.paths import write_aside
from nemo_gym.rl.interfaces import Completion, GroupBuffer, PromptGroupRecord, as_list, with_tensors

logger = logging.getLogger(__name__)

_REWRITE_FROM_BYTES = 1 << 20
"""A smaller file is not worth rewriting for what is no longer needed in it."""
_ARRAYS: "dict[str, np.dtype[Any]]" = {
    "token_ids": np.dtype("<i8"),
    "generation_logprobs": np.dtype("<f4"),
    "token_loss_mask": np.dtype("u1"),
}
_ARRAY_KEY = "_array"


class BufferFullError(GymError):
    """There is no room for another group."""


class BufferFileError(GymError):
    """A file that is no buffer, or a group that cannot be kept in one."""


@dataclass
class BufferedGroup:
    """A committed group, and the versions of the weights it was made with."""

    group_id: int
    record: PromptGroupRecord
    start_weight_version: int
    """When its first token was asked for."""
    end_weight_version: int
    """When its last one had come."""
    target_step: int | None = None
    """The step of the trainer that it was made for, if it was made for one."""

    def age(self, weight_version: int) -> int:
        """How many versions have come since it was begun."""
        return weight_version - self.start_weight_version


Priority = Callable[[BufferedGroup], Any]
"""What to take first: groups with small values before those with large ones."""


@dataclass(frozen=True)
class _Reserved:
    weight_version: int
    target_step: int | None


@dataclass
class BufferStats:
    """What became of the groups so far."""

    committed: int = 0
    taken: int = 0
    done: int = 0
    too_old: int = 0
    """Left out because of their age."""
    abandoned: int = 0
    """Reserved and never committed."""

    def as_metrics(self) -> dict[str, float]:
        """The numbers by name, for an experiment tracker."""
        return {f"buffer/{name}_total": float(value) for name, value in vars(self).items()}


@dataclass
class RolloutBuffer:
    """Groups that are being made, that are ready, and that are being trained on. For one event loop."""

    capacity: int = 1024
    """Groups reserved, ready and taken together."""
    max_age: int | None = None
    """Groups begun more than so many versions ago are left out; None keeps all."""
    priority: Priority | None = None
    """Used by `take` unless that is told another; oldest first when None."""
    path: str | Path | None = None
    """Where committed groups are kept; None keeps them in memory alone."""
    weight_version: int = 0
    stats: BufferStats = field(default_factory=BufferStats)

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}; there must be room for at least 1 group")
        if self.max_age is not None and self.max_age < 0:
            raise ValueError(f"max_age is {self.max_age}; it must be 0 or more")
        self._reserved: dict[int, _Reserved] = {}
        self._ready: dict[int, BufferedGroup] = {}
        self._taken: dict[int, BufferedGroup] = {}
        self._changed = asyncio.Event()
        self._file = None if self.path is None else _GroupFile(Path(self.path))
        if self._file is not None:
            self._restore(self._file)
        self._ids = count(1 + max(self._ready, default=0))

    def __len__(self) -> int:
        """Groups that are ready."""
        return len(self._ready)

    @property
    def reserved(self) -> int:
        """Groups that are being made."""
        return len(self._reserved)

    @property
    def has_room(self) -> bool:
        """Whether another group may be reserved."""
        return len(self._reserved) + len(self._ready) + len(self._taken) < self.capacity

    async def wait_for_room(self) -> None:
        """Return when another group may be reserved."""
        while not self.has_room:
            self._changed.clear()
            await self._changed.wait()

    def reserve(self, weight_version: int | None = None, target_step: int | None = None) -> int:
        """Room for a group that is about to be made; the id to commit it under.

        Raises:
            BufferFullError: there is none; `wait_for_room` returns when there is.
        """
        if not self.has_room:
            raise BufferFullError(
                f"all {self.capacity} places are taken: {len(self._reserved)} groups are being made, "
                f"{len(self._ready)} are ready, {len(self._taken)} are with the trainer; await wait_for_room() first, "
                "or raise capacity"
            )
        group_id = next(self._ids)
        version = self.weight_version if weight_version is None else weight_version
        self._reserved[group_id] = _Reserved(version, target_step)
        return group_id

    async def commit(
        self,
        group_id: int,
        record: PromptGroupRecord,
        *,
        start_weight_version: int | None = None,
        end_weight_version: int | None = None,
    ) -> None:
        """Put a group where it was reserved; once this has returned, it is safe, if there is a file.

        Raises:
            KeyError: nothing is reserved under that id.
            BufferFileError: it holds what cannot be written.
        """
        reserved = self._reserved[group_id]
        start = reserved.weight_version if start_weight_version is None else start_weight_version
        end = self.weight_version if end_weight_version is None else end_weight_version
        group = BufferedGroup(group_id, record, start, end, reserved.target_step)
        if self._file is not None:
            self._file.append(_to_line(group))
        del self._reserved[group_id]
        self._ready[group_id] = group
        self.stats.committed += 1
        self._changed.set()
        self._leave_out_old()

    async def remove_group(self, group_id: int) -> None:
        """Give back the room of a group that could not be made."""
        if self._reserved.pop(group_id, None) is not None:
            self.stats.abandoned += 1
            self._changed.set()

    def set_weight_version(self, version: int) -> None:
        """The trainer has new weights; groups that are too old now are left out."""
        self.weight_version = int(version)
        self._leave_out_old()

    async def take(self, number: int, priority: Priority | None = None) -> list[BufferedGroup]:
        """So many groups, waiting until they are there; whoever has trained on them says so with `done`."""
        while len(self._ready) < number:
            self._changed.clear()
            await self._changed.wait()
        return self.take_ready(number, priority)

    def take_ready(self, number: int | None = None, priority: Priority | None = None) -> list[BufferedGroup]:
        """What is ready now, at most so many."""
        order = priority or self.priority
        groups = list(self._ready.values())
        chosen = (groups if order is None else sorted(groups, key=order))[:number]
        for group in chosen:
            self._taken[group.group_id] = self._ready.pop(group.group_id)
        self.stats.taken += len(chosen)
        return chosen

    def put_back(self, groups: Iterable[BufferedGroup]) -> None:
        """Groups that were taken and not trained on are ready again, in their old order."""
        for group in groups:
            if self._taken.pop(group.group_id, None) is not None:
                self._ready[group.group_id] = group
        self._ready = dict(sorted(self._ready.items()))
        self._changed.set()
        self._leave_out_old()

    def done(self, groups: Iterable[BufferedGroup]) -> None:
        """Groups that were taken are not needed any more, not even after a crash."""
        finished = [group.group_id for group in groups if self._taken.pop(group.group_id, None) is not None]
        self.stats.done += len(finished)
        self._forget(finished)

    def _leave_out_old(self) -> None:
        if self.max_age is None:
            return
        old = [key for key, group in self._ready.items() if group.age(self.weight_version) > self.max_age]
        for group_id in old:
            del self._ready[group_id]
        self.stats.too_old += len(old)
        self._forget(old)

    def _forget(self, group_ids: Sequence[int]) -> None:
        if not group_ids:
            return
        self._changed.set()
        if self._file is not None:
            self._file.append(_sealed(orjson.dumps({"gone": list(group_ids)})))
            needed = sorted([*self._taken.values(), *self._ready.values()], key=lambda group: group.group_id)
            self._file.rewrite_if_mostly_gone(map(_to_line, needed))

    def _restore(self, file: "_GroupFile") -> None:
        for entry in file.entries():
            if "gone" in entry:
                for group_id in entry["gone"]:
                    self._ready.pop(group_id, None)
            else:
                group = _from_entry(entry)
                self._ready[group.group_id] = group
        self.weight_version = max((group.end_weight_version for group in self._ready.values()), default=0)


class _GroupFile:
    """Lines that are only ever appended, each brought to the disk at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes_needed = 0
        path.touch()

    def append(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def entries(self) -> Iterator[dict[str, Any]]:
        """What is in the file; a last line that was cut short is taken out of it.

        Raises:
            BufferFileError: another line is damaged.
        """
        content = self._path.read_bytes()
        offset = 0
        for line in content.splitlines(keepends=True):
            entry = _opened(line)
            if entry is None:
                if offset + len(line) < len(content):
                    raise BufferFileError(
                        f"{self._path} is damaged at byte {offset}: it is no buffer, or its disk is at fault; what "
                        "comes before can be had by cutting it off there"
                    )
                logger.warning("%s ends in a group that was not committed; it is taken out", self._path)
                os.truncate(self._path, offset)
                return
            yield entry
            offset += len(line)

    def rewrite_if_mostly_gone(self, needed: Iterable[bytes]) -> None:
        """Write the file anew when most of it is about groups that are gone."""
        size = self._path.stat().st_size
        if size < _REWRITE_FROM_BYTES or size < 2 * self._bytes_needed:
            return
        with write_aside(self._path) as file:
            for line in needed:
                file.write(line)
        self._bytes_needed = self._path.stat().st_size


def _sealed(content: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(content), content)


def _opened(line: bytes) -> dict[str, Any] | None:
    """What a line says; None when it is damaged."""
    checksum, _, content = line.partition(b" ")
    if not line.endswith(b"\n"):
        return None
    content = content[:-1]
    try:
        is_sound = int(checksum, 16) == zlib.crc32(content)
    except ValueError:
        return None
    entry: dict[str, Any] | None = orjson.loads(content) if is_sound else None
    return entry


def _to_line(group: BufferedGroup) -> bytes:
    record = group.record
    entry = {
        "group_id": group.group_id,
        "versions": [group.start_weight_version, group.end_weight_version],
        "target_step": group.target_step,
        "record": {
            **vars(record),
            "prompt": _packed(record.prompt),
            "rollout_metrics": {key: value for key, value in record.rollout_metrics.items() if _is_plain(value)},
            "completions": [_packed_completion(it) for it in record.completions],
        },
    }
    try:
        return _sealed(orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))
    except TypeError as error:
        raise BufferFileError(
            f"the group of prompt {record.prompt_idx} cannot be kept in a file: {error}; what an environment gives as "
            "metadata must be JSON, or the buffer must have no path"
        ) from error


def _from_entry(entry: dict[str, Any]) -> BufferedGroup:
    stored = entry["record"]
    completions = [_unpacked_completion(it) for it in stored["completions"]]
    record = PromptGroupRecord(**{**stored, "prompt": _unpacked(stored["prompt"]), "completions": completions})
    start, end = entry["versions"]
    return BufferedGroup(entry["group_id"], record, start, end, entry["target_step"])


def _packed_completion(completion: Completion) -> dict[str, Any]:
    logs = {"message_log": _packed(completion.message_log), "branches": [_packed(log) for log in completion.branches]}
    return {**vars(completion), **logs}


def _unpacked_completion(stored: dict[str, Any]) -> Completion:
    logs = [_unpacked(log) for log in (stored["message_log"], *stored.get("branches", ()))]
    reward = math.nan if stored["reward"] is None else stored["reward"]  # JSON has no NaN
    return Completion(**{**stored, "message_log": logs[0], "branches": logs[1:], "reward": reward})


def _packed(message_log: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: _pack(value, _ARRAYS.get(key)) for key, value in message.items()} for message in message_log]


def _pack(value: Any, dtype: "np.dtype[Any] | None") -> Any:
    if dtype is None:
        return value
    content = np.asarray(value.numpy() if hasattr(value, "numpy") else as_list(value), dtype).tobytes()
    return {_ARRAY_KEY: base64.b64encode(content).decode()}


def _unpacked(message_log: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return with_tensors([{key: _unpack(key, value) for key, value in message.items()} for message in message_log])


def _unpack(key: str, value: Any) -> Any:
    if key not in _ARRAYS or not isinstance(value, dict):
        return value
    return np.frombuffer(base64.b64decode(value[_ARRAY_KEY]), _ARRAYS[key])


def _is_plain(value: Any) -> bool:
    """Not a histogram or a table for a tracker, which nobody needs again."""
    return isinstance(value, str | int | float | bool | list | dict) or value is None


async def give_place_back(buffer: GroupBuffer, group_id: Any) -> None:
    """Let go of a place that no group will fill; that this fails is only told, as what failed before matters more."""
    try:
        await buffer.remove_group(group_id)
    except Exception as error:  # noqa: BLE001 - any buffer, and any way of failing
        logger.warning("the place of group %s could not be given back: %r", group_id, error)
