"""Chance without randomness: every draw is a hash of the seed, the request and what it is drawn for.

Equal requests with equal seeds therefore get equal answers, in any process and in any order.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

_T = TypeVar("_T")
_SCALE = 2.0**64


class Draws:
    """The source of chance for one request."""

    def __init__(self, seed: int | str, fingerprint: bytes) -> None:
        self._key = blake2b(f"{seed}\0".encode() + fingerprint, digest_size=32).digest()

    def uniform(self, purpose: str) -> float:
        """A number from 0 up to, but not including, 1."""
        return int.from_bytes(self._digest(purpose, 8), "big") / _SCALE

    def happens(self, purpose: str, probability: float) -> bool:
        """Whether something of that probability happens."""
        return self.uniform(purpose) < probability

    def choice(self, purpose: str, options: Sequence[_T]) -> _T:
        """One of `options`, which must not be empty."""
        return options[int(self.uniform(purpose) * len(options))]

    def normal(self, purpose: str) -> float:
        """A number from the standard normal distribution."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform(f"{purpose} radius")))
        return radius * math.cos(2.0 * math.pi * self.uniform(f"{purpose} angle"))

    def identifier(self, prefix: str, purpose: str) -> str:
        """An id such as the API's own, `prefix` followed by hexadecimal digits."""
        return f"{prefix}_{self._digest(f'{prefix} {purpose}', 16).hex()}"

    def _digest(self, purpose: str, size: int) -> bytes:
        return blake2b(purpose.encode(), digest_size=size, key=self._key).digest()
