"""By which numbers tasks go: those that rows bring along, and for all others the order in which they come.

Equal lines are one task. Whatever is used of an input, its tasks are numbered as a whole, so that what was collected
from a part of it belongs to the same tasks in a run of all.
"""

import logging
from collections.abc import Container
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.runs.record import IndexSet, IntSet, Row, SeenFilter

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_MANY = 2**32
_HASH_BITS = 2**63 - 1
_SAMPLE_BYTES = 1 << 18


@dataclass
class TakenIndices:
    """What has to be known about all rows before the first can be numbered."""

    supplied: IndexSet = field(default_factory=IndexSet)
    """Every task index that the file brings itself, also beyond the limit."""
    supplied_twice: set[Any] = field(default_factory=set)
    repeated_lines: IntSet = field(default_factory=IntSet)
    """Hashes of the lines without an index that occur more than once, and of a few others."""

    def note(self, row: Row, content: bytes, seen: SeenFilter) -> None:
        """Take one row into account."""
        if TASK_INDEX_KEY_NAME in row:
            index = row[TASK_INDEX_KEY_NAME]
            if not self.supplied.add(index):
                self.supplied_twice.add(index)
            return
        hashed = line_hash(content)
        if seen.came_before(hashed):
            self.repeated_lines.add(hashed)


class Numbers:
    """Hands out task indices and counts the rollouts of tasks that occur on several lines."""

    def __init__(self, taken: TakenIndices) -> None:
        self._taken = taken
        self._supplied: Container[int] = taken.supplied if len(taken.supplied) else ()
        self._next_index = 0
        self._emitted: dict[Any, int] = {}
        """Rollouts so far of a supplied index that occurs more than once."""
        self._of_line: dict[bytes, int] = {}
        """Task index and rollouts so far of a repeated line, in one number: there may be very many."""
        self._merged = self._rows = 0
        """Rows that became part of the task of an earlier one; all of them."""

    def report(self, path: Path) -> None:
        """Say that equal rows have become one task, which makes it more rollouts than were asked for."""
        if self._merged:
            logger.warning(
                "%d of the %d rows of %s are equal to earlier ones, so they are further rollouts of the same tasks: "
                "%d tasks. To keep them apart, give each row a number of its own as %s",
                self._merged,
                self._rows,
                path,
                self._rows - self._merged,
                TASK_INDEX_KEY_NAME,
            )

    def claim(self, row: Row, content: bytes, repeats: int) -> tuple[Any, int]:
        """The row's task index and the first of its rollout indices."""
        self._rows += 1
        if TASK_INDEX_KEY_NAME not in row:
            if line_hash(content) in self._taken.repeated_lines:
                return self._claim_repeated_line(content, repeats)
            return self._fresh_index(), 0
        index = row[TASK_INDEX_KEY_NAME]
        if index not in self._taken.supplied_twice:
            return index, 0
        first = self._emitted.get(index, 0)
        self._emitted[index] = first + repeats
        return index, first

    def _claim_repeated_line(self, content: bytes, repeats: int) -> tuple[int, int]:
        # The hash that found it repeated may be wrong; this one is not.
        digest = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        known = self._of_line.get(digest)
        index, first = (self._fresh_index(), 0) if known is None else divmod(known, _MANY)
        self._merged += known is not None
        self._of_line[digest] = index * _MANY + first + repeats
        return index, first

    def _fresh_index(self) -> int:
        index = self._next_index
        while index in self._supplied:
            index += 1
        self._next_index = index + 1
        return index


def line_hash(content: bytes) -> int:
    """A hash of a line: the same for equal lines, hardly ever for others."""
    return hash(content) & _HASH_BITS


def estimated_lines(path: Path) -> int:
    """Judged from the beginning of the file; being wrong costs a little time, nothing else."""
    with path.open("rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    return 1 + path.stat().st_size * (1 + sample.count(b"\n")) // (1 + len(sample))
