"""The checked merge: every rollout once, in key order, copied byte for byte from its shard."""

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import orjson

from nemo_gym.errors import ConfigError, GymError
from nemo_gym.jsonl import parse, write_aside
from nemo_gym.rollouts.record import Result
from nemo_gym.rollouts.shard_index import Indices, ShardIndex

logger = logging.getLogger(__name__)

OnDuplicate = Literal["error", "first", "last"]

_MOST_OPEN_FILES = 64
_STRETCH_BYTES = 4 << 20
_CONFLICTS_NAMED = 10


class DuplicateRolloutError(ConfigError, ValueError):
    """Two records of one rollout differ, and nobody said which one counts."""


class ShardChangedError(GymError):
    """A shard was replaced or cut short while it was being read."""


@dataclass(frozen=True)
class Merged:
    """Which records make up the result."""

    order: Indices
    """Their numbers, in key order."""
    identical: int = 0
    """Records left out because the same one is there already."""
    different: int = 0
    """Records left out because another one of the same rollout was to be kept."""

    @property
    def left_out(self) -> int:
        """Every record that is not part of the result."""
        return self.identical + self.different


class ShardReader(AbstractContextManager["ShardReader"]):
    """Reads pieces of the shards, with no more than a few of them open at a time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: OrderedDict[int, int] = OrderedDict()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """So many bytes of a shard.

        Raises:
            ShardChangedError: they are not there any more.
        """
        content = os.pread(self._descriptor(shard), length, offset)
        while 0 < len(content) < length:
            more = os.pread(self._descriptor(shard), length - len(content), offset + len(content))
            if not more:
                break
            content += more
        if len(content) != length:
            raise ShardChangedError(
                f"{self._paths[shard]} became shorter while it was being read; wait until nobody writes to it"
            )
        return content

    def _descriptor(self, shard: int) -> int:
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            if len(self._open) >= _MOST_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[shard] = os.open(self._paths[shard], os.O_RDONLY)
        return self._open[shard]


def settle_duplicates(index: ShardIndex, on_duplicate: OnDuplicate) -> Merged:
    """One record per rollout key.

    Raises:
        DuplicateRolloutError: records of one rollout differ and `on_duplicate` does not say which to keep.
    """
    order = index.in_key_order()
    repeated = index.repeated(order)
    if not repeated:
        return Merged(order)
    left_out: list[int] = []
    conflicts: list[tuple[int, int]] = []
    identical = 0
    with ShardReader(index.paths) as reader:
        for numbers in repeated:
            first, others = numbers[0], numbers[1:]
            differing = [other for other in others if not _are_same(index, reader, first, other)]
            conflicts += [(first, other) for other in differing[:1]]
            identical += len(others) - len(differing)
            left_out += numbers[:-1] if on_duplicate == "last" else others
    if conflicts and on_duplicate == "error":
        raise DuplicateRolloutError(_conflict_message(index, conflicts))
    kept = order[~np.isin(order, np.array(left_out, np.int64))]
    return Merged(kept, identical, len(left_out) - identical)


def _are_same(index: ShardIndex, reader: ShardReader, one: int, other: int) -> bool:
    """Whether two records say the same, be it with other spaces or keys in another order."""
    first, second = (
        reader.read(index.shards[number], index.offsets[number], index.lengths[number]) for number in (one, other)
    )
    return first == second or _canonical(first) == _canonical(second)


def _canonical(content: bytes) -> object:
    value = parse(content)
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # text that cannot be encoded
        return value


def _conflict_message(index: ShardIndex, conflicts: list[tuple[int, int]]) -> str:
    lines = [
        f"\n  rollout {_key_text(index, one)}: {index.piece(one)} and {index.piece(other)}"
        f"{_of_agents(index, one, other)}"
        for one, other in conflicts[:_CONFLICTS_NAMED]
    ]
    more = len(conflicts) - len(lines)
    lines += [f"\n  and {more} more"] if more > 0 else []
    return (
        f"{len(conflicts)} rollouts have records that differ:{''.join(lines)}\n"
        "Remove the shards that do not belong together, or say which record counts: +on_duplicate=first or "
        "+on_duplicate=last, in the order of input_glob"
    )


def _key_text(index: ShardIndex, number: int) -> str:
    key = index.key_of(number)
    assert key is not None
    return f"({key.task_index!r}, {key.rollout_index!r})"


def _of_agents(index: ShardIndex, one: int, other: int) -> str:
    agents = index.agent_of(one), index.agent_of(other)
    if agents[0] == agents[1]:
        return ""
    return f" (of agents {agents[0]!r} and {agents[1]!r}: aggregate runs of different agents separately)"


def records_in(index: ShardIndex, order: Indices) -> Iterator[tuple[int, Result]]:
    """The records of `order`, read again: (number, record)."""
    with ShardReader(index.paths) as reader:
        for number in order.tolist():
            content = reader.read(index.shards[number], index.offsets[number], index.lengths[number])
            yield number, parse(content)


def write_merged(index: ShardIndex, order: Indices, output: Path) -> None:
    """Replace `output` in one step by the records of `order`."""
    with ShardReader(index.paths) as reader, write_aside(output) as file:
        for shard, offset, length in index.stretches(order, _STRETCH_BYTES):
            file.write(reader.read(shard, offset, length))
            file.write(b"\n")
