"""How long rollouts take and how many tokens they use: the middle one, and the one that 95 of 100 do not exceed.

Numbers are counted by their first three digits, so that any number of rollouts fits into little memory, and shards
come to what the whole run comes to.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from nemo_gym.keys import PARTIAL_RESPONSE_KEY_NAME, RESPONSE_KEY_NAME, TIMING_KEY_NAME

DURATION = "duration_s"
TOKEN_COUNTS = ("input_tokens", "output_tokens", "total_tokens")
_BEYOND_REASON = 1e15
_SHARES = {"p50": 0.5, "p95": 0.95}
_COUNTED_AT_ONCE = 4_096
"""Rollouts whose numbers are kept as they came: counting many at a time is several times as fast."""


class Used(NamedTuple):
    """What one record says it took."""

    input: int
    """Tokens, those out of the cache included."""
    cached: int
    output: int
    total: int
    model: str | None

    @property
    def fresh(self) -> int:
        """Input tokens that were not in the cache."""
        return max(0, self.input - self.cached)


def used_by(record: Mapping[str, Any]) -> Used | None:
    """What a record, or the sidecar line of a failed attempt, took; None when it does not say."""
    response = record.get(RESPONSE_KEY_NAME)
    if type(response) is not dict:
        response = record.get(PARTIAL_RESPONSE_KEY_NAME)
        if type(response) is not dict:
            return None
    usage = response.get("usage")
    if type(usage) is not dict:
        return None
    given, output, total = usage.get("input_tokens"), usage.get("output_tokens"), usage.get("total_tokens")
    if type(given) is not int and type(output) is not int and type(total) is not int:
        return None
    given, output = given if type(given) is int else 0, output if type(output) is int else 0
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else 0
    model = response.get("model")
    return Used(
        given,
        cached if type(cached) is int else 0,
        output,
        total if type(total) is int else given + output,
        model if type(model) is str else None,
    )


def duration_s(record: Mapping[str, Any]) -> float | None:
    """How long one rollout took; None when its record does not say."""
    timing = record.get(TIMING_KEY_NAME)
    value = timing.get(DURATION) if isinstance(timing, dict) else None
    return float(value) if isinstance(value, int | float) and 0 <= value < _BEYOND_REASON else None


@dataclass(slots=True)
class Tally:
    """Tokens added up."""

    input: int = 0
    cached: int = 0
    output: int = 0


class Percentiles:
    """Takes the records of finished rollouts one by one."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[float]] = {}
        self._waiting: list[tuple[float | None, ...]] = []
        """What is not counted yet: the quantities of one rollout each, as far as they are numbers."""
        self.rollouts = 0
        self.by_model: dict[tuple[str | None, bool], Tally] = {}
        """What models used, as far as it is told, and whether for attempts that failed."""

    def add_failed(self, record: Mapping[str, Any]) -> None:
        """Count what a failed attempt used; it has no part in percentiles."""
        self._add_up(used_by(record), is_failed=True)

    def _add_up(self, used: Used | None, *, is_failed: bool) -> None:
        if used is None:
            return
        tally = self.by_model.get((used.model, is_failed))
        if tally is None:
            tally = self.by_model[used.model, is_failed] = Tally()
        tally.input += used.input
        tally.cached += used.cached
        tally.output += used.output

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one rollout; what its record does not say is left out."""
        self._add_up(used_by(record), is_failed=False)
        self.add_times(record)

    def add_times(self, record: Mapping[str, Any]) -> None:
        """The same without what models used."""
        self.rollouts += 1
        response, timing = record.get(RESPONSE_KEY_NAME), record.get(TIMING_KEY_NAME)
        usage = response.get("usage") if type(response) is dict else None
        given = output = total = took_s = None
        if type(usage) is dict:
            given, output, total = usage.get("input_tokens"), usage.get("output_tokens"), usage.get("total_tokens")
        if type(timing) is dict:
            took_s = timing.get(DURATION)
        self._waiting.append(
            (
                took_s if isinstance(took_s, float | int) else None,
                given if isinstance(given, int) else None,
                output if isinstance(output, int) else None,
                total if isinstance(total, int) else None,
            )
        )
        if len(self._waiting) == _COUNTED_AT_ONCE:
            self._count_waiting()

    def _count_waiting(self) -> None:
        for name, values in zip((DURATION, *TOKEN_COUNTS), zip(*self._waiting, strict=True), strict=False):
            for value, times in Counter(values).items():
                if value is not None and 0 <= value < _BEYOND_REASON:
                    self._counts.setdefault(name, Counter())[_rounded(value)] += times
        self._waiting.clear()

    def as_json(self) -> dict[str, dict[str, float]]:
        """`p50` and `p95` of each quantity, to three significant digits; empty when nothing is known."""
        self._count_waiting()
        return {
            name: {label: _at(self._counts[name], share, whole=name != DURATION) for label, share in _SHARES.items()}
            for name in (DURATION, *TOKEN_COUNTS)
            if name in self._counts
        }


@lru_cache(4096)
def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _at(counts: Counter[float], share: float, *, whole: bool) -> float:
    """The smallest value that is not exceeded by that share of all."""
    rank, seen = math.ceil(share * counts.total()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            break
    return int(value) if whole else value
