"""Millions of rows in little memory.

A built-in set spends 60 to 100 bytes on an integer. These spend 8 to 24, so that a run with a million
waiting rows needs hardly more memory than one with ten thousand.
"""

import gc
from array import array
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

_LARGEST = 2**64 - 2
_SIXTY_FOUR_BITS = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15
"""Spreads neighbouring integers over the table (2^64 divided by the golden ratio)."""
_FIRST_BITS = 10

_ROLLOUT_BITS = 24
_TASK_LIMIT = 2**39
_ROLLOUT_LIMIT = 2**_ROLLOUT_BITS


class SeenFilter:
    """Tells, for hashes that come one after the other, which may have come before.

    It never misses one. For a number of hashes as announced it is wrong about one in a hundred.
    """

    def __init__(self, expected: int) -> None:
        self._mask = (1 << (expected * 8).bit_length() + 3) - 1
        self._bits = bytearray((self._mask + 1) // 8)

    def came_before(self, hashed: int) -> bool:
        """Whether `hashed` may have been asked about before."""
        position = hashed & self._mask
        byte, bit = position >> 3, 1 << (position & 7)
        if self._bits[byte] & bit:
            return True
        self._bits[byte] |= bit
        return False


class IntSet:
    """A set of integers from 0 to 2^64 - 2 that can only grow: open addressing in one flat array."""

    def __init__(self) -> None:
        self._bits = _FIRST_BITS
        self._table = _empty_table(self._bits)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, value: int) -> bool:
        return self._size > 0 and self._table[self._slot_of(value + 1)] != 0

    def add(self, value: int) -> bool:
        """Put `value` in; False when it was there already."""
        if not 0 <= value <= _LARGEST:
            raise ValueError(f"{value} does not fit into 64 bits")
        stored = value + 1  # 0 marks an empty slot
        slot = self._slot_of(stored)
        if self._table[slot]:
            return False
        self._table[slot] = stored
        self._size += 1
        if self._size * 3 > len(self._table) * 2:
            self._grow()
        return True

    def _slot_of(self, stored: int) -> int:
        """Where `stored` is, or the empty slot where it would be."""
        table = self._table
        slot = (stored * _MIX & _SIXTY_FOUR_BITS) >> (64 - self._bits)
        found = table[slot]
        while found and found != stored:
            slot = slot + 1 & len(table) - 1
            found = table[slot]
        return slot

    def _grow(self) -> None:
        old = self._table
        self._bits += 1
        self._table = _empty_table(self._bits)
        for stored in old:
            if stored:
                self._table[self._slot_of(stored)] = stored


class IndexSet:
    """A set of task indices: whole numbers compactly, whatever else a data set uses (text, null) as it is."""

    def __init__(self) -> None:
        self._integers = IntSet()
        self._others: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._integers) + len(self._others)

    def __contains__(self, index: Any) -> bool:
        return index in self._integers if _fits(index) else index in self._others

    def add(self, index: Any) -> bool:
        """Put `index` in; False when it was there already."""
        if _fits(index):
            return self._integers.add(index)
        if index in self._others:
            return False
        self._others.add(index)
        return True


class KeySet:
    """A set of rollout keys."""

    def __init__(self) -> None:
        self._packed = IntSet()
        self._others: set[tuple[Any, Any]] = set()

    def __len__(self) -> int:
        return len(self._packed) + len(self._others)

    def __contains__(self, key: tuple[Any, Any]) -> bool:
        packed = _pack(key)
        return key in self._others if packed is None else packed in self._packed

    def add(self, key: tuple[Any, Any]) -> bool:
        """Put `key` in; False when it was there already."""
        packed = _pack(key)
        if packed is not None:
            return self._packed.add(packed)
        if key in self._others:
            return False
        self._others.add(key)
        return True


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For building a long list of rows: looking for garbage among them takes several times as long as parsing them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _empty_table(bits: int) -> "array[int]":
    return array("Q", (0,)) * (1 << bits)


def _fits(index: Any) -> bool:
    return type(index) is int and 0 <= index <= _LARGEST


def _pack(key: tuple[Any, Any]) -> int | None:
    task, rollout = key
    if type(task) is int and type(rollout) is int and 0 <= task < _TASK_LIMIT and 0 <= rollout < _ROLLOUT_LIMIT:
        return task << _ROLLOUT_BITS | rollout
    return None
