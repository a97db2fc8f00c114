"""The checked merge: every rollout once, in key order, copied byte for byte from its shard.

What lies beside the rollouts of a run cut into shards is put together like the rollouts themselves: with it the merged
output is what the run would have written in one piece, and other commands can go on from there.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import parse, to_line
from nemo_gym.keys import TIMING_KEY_NAME
from nemo_gym.paths import write_aside
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import Indices, RecordIndex, RecordReader
from nemo_gym.runs.read import records
from nemo_gym.runs.record import KeySet, Result

logger = logging.getLogger(__name__)

OnDuplicate = Literal["error", "first", "last"]

_STRETCH_BYTES = 4 << 20
_CONFLICTS_NAMED = 10


class DuplicateRolloutError(ConfigError, ValueError):
    """Two records of one rollout differ, and nobody said which one counts."""


@dataclass(frozen=True)
class Merged:
    """Which records make up the result."""

    order: Indices
    """Their numbers, in key order."""
    identical: int = 0
    """Records left out because the same one is there already."""
    different: int = 0
    """Records left out because another one of the same rollout was to be kept."""
    no_longer_asked: int = 0
    """Records left out because their run is no longer asked for them."""

    @property
    def left_out(self) -> int:
        """Every record that is not part of the result."""
        return self.identical + self.different + self.no_longer_asked


def settle_duplicates(index: RecordIndex, on_duplicate: OnDuplicate) -> Merged:
    """Which records to keep so that every rollout key occurs once.

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
    with RecordReader(index) as reader:
        for numbers in repeated:
            first, others = numbers[0], numbers[1:]
            differing = [other for other in others if not _are_same(reader.content(first), reader.content(other))]
            conflicts += [(first, other) for other in differing[:1]]
            identical += len(others) - len(differing)
            left_out += numbers[:-1] if on_duplicate == "last" else others
    if conflicts and on_duplicate == "error":
        raise DuplicateRolloutError(_conflict_message(index, conflicts))
    kept = order[~np.isin(order, np.array(left_out, np.int64))]
    return Merged(kept, identical, len(left_out) - identical)


def leave_out_unasked(index: RecordIndex, merged: Merged, asked: Mapping[int, KeySet]) -> Merged:
    """Without the records of rollouts that are not among those asked for, where that is known of a file."""
    if not asked:
        return merged
    kept = [
        number
        for number in merged.order.tolist()
        if (wanted := asked.get(index.files[number])) is None or (key := index.key_of(number)) is None or key in wanted
    ]
    return replace(merged, order=np.array(kept, np.int64), no_longer_asked=len(merged.order) - len(kept))


def _are_same(one: bytes, other: bytes) -> bool:
    """Whether two records say the same, be it with other spaces or keys in another order, or took another time."""
    try:
        return one == other or _canonical(one) == _canonical(other)
    except RecursionError:  # nested too deeply to be compared
        return False


def _canonical(content: bytes) -> object:
    value = parse(content)
    if isinstance(value, dict):
        value.pop(TIMING_KEY_NAME, None)
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # text that cannot be encoded
        return value


def _conflict_message(index: RecordIndex, conflicts: list[tuple[int, int]]) -> str:
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


def _key_text(index: RecordIndex, number: int) -> str:
    key = index.key_of(number)
    assert key is not None
    return f"({key.task_index!r}, {key.rollout_index!r})"


def _of_agents(index: RecordIndex, one: int, other: int) -> str:
    agents = index.agent_of(one), index.agent_of(other)
    if agents[0] == agents[1]:
        return ""
    return f" (of agents {agents[0]!r} and {agents[1]!r}: aggregate runs of different agents separately)"


def records_in(index: RecordIndex, order: Indices) -> Iterator[tuple[int, Result]]:
    """The records of `order`, read again: (number, record)."""
    with RecordReader(index) as reader:
        for number in order.tolist():
            yield number, reader.record(number)


def write_merged(index: RecordIndex, order: Indices, output: Path) -> None:
    """Replace `output` in one step by the records of `order`."""
    with RecordReader(index) as reader, write_aside(output) as file:
        for stretch in index.stretches(order, _STRETCH_BYTES):
            file.write(reader.read(*stretch))
            file.write(b"\n")


def merge_siblings(shards: Iterable[Path], output: RolloutPaths) -> None:
    """Write the materialized inputs and the failures of all shards beside the merged output.

    Those of a run that was collected there are left alone, as are materialized inputs of which a part is missing.
    """
    if output.manifest.exists():
        return
    of_shards = [RolloutPaths(path) for path in shards]
    with write_aside(output.failures) as file:
        for paths in of_shards:
            file.writelines(to_line(failure) for _, _, failure in records(paths.failures, "skip", may_lack_key=True))
    absent = [paths.materialized_inputs for paths in of_shards if not paths.materialized_inputs.exists()]
    if absent:
        logger.warning("%s is not written: %s is not there", output.materialized_inputs, absent[0])
        return
    index = RecordIndex([paths.materialized_inputs for paths in of_shards])
    index.read()
    write_merged(index, index.in_key_order(), output.materialized_inputs)
