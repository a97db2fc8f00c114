"""Rows that are alike stand or fall together: one of each shape is put before the servers, however many there are.

A shape is the agent, the keys of the row and of its parameters, and the types of their values. Telling them apart
costs a fraction of parsing a row; what a type refuses because of a missing, unknown or mistyped field it refuses in all
rows of a shape.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.schemas.row_faults import RowFault

logger = logging.getLogger(__name__)

_MOST_SHAPES = 200
"""Rows of a file with more of them have keys of their own; the others are not looked at."""
_MOST_SHOWN = 5


@dataclass
class Shape:
    """Rows that are alike."""

    agent: str
    row: dict[str, Any]
    """The first of them."""
    line: int
    """Its number, from 1."""
    count: int = 0


@dataclass
class RowShapes:
    """The shapes of the rows of one file."""

    shapes: dict[tuple[Any, ...], Shape] = field(default_factory=dict)
    _last_key: tuple[Any, ...] = ()
    _last: Shape | None = None

    def note(self, agent: str, row: dict[str, Any], line: int) -> None:
        """Take note of a row."""
        params = row[RESPONSES_CREATE_PARAMS_KEY_NAME]
        key = (agent, *row, *map(type, row.values()), *params, *map(type, params.values()))
        if key != self._last_key:  # rows alike mostly follow each other, and comparing is cheaper than hashing
            self._last_key, self._last = key, self._shape(key, agent, row, line)
        if self._last is not None:
            self._last.count += 1

    def _shape(self, key: tuple[Any, ...], agent: str, row: dict[str, Any], line: int) -> Shape | None:
        if key not in self.shapes and len(self.shapes) < _MOST_SHAPES:
            self.shapes[key] = Shape(agent, row, line)
        return self.shapes.get(key)

    def by_agent(self) -> dict[str, list[Shape]]:
        """The shapes, in the order of their first rows."""
        grouped: dict[str, list[Shape]] = {}
        for shape in self.shapes.values():
            grouped.setdefault(shape.agent, []).append(shape)
        return grouped


@dataclass
class Objections:
    """What those who will get the rows have against them."""

    refusals: list[str] = field(default_factory=list)
    """Reasons why rollouts are bound to fail, one line each, with the first row's line and how many there are."""
    doubts: list[str] = field(default_factory=list)
    """Reasons why they may fail, unless somebody on the way adds what is missing."""

    def add(self, where: str, shapes: Iterable[Shape], faults: Iterable[Iterable[RowFault]]) -> None:
        """Add what is wrong with the first row of each shape; `where` says what its number counts."""
        for shape, of_shape in zip(shapes, faults, strict=True):
            for fault in of_shape:
                also = f" ({shape.count:,} rows are like this)" if fault.is_of_shape and shape.count > 1 else ""
                line = f"{where} {shape.line}: {fault}{also}"
                (self.refusals if fault.is_certain else self.doubts).append(line)

    def settle(self, error_type: type[ConfigError], remedy: str, *, keep: bool) -> None:
        """Warn of doubts, once, and refuse rows that cannot be rolled out; with `keep`, only warn of these, too.

        Raises:
            ConfigError: of `error_type`.
        """
        if keep:
            self.doubts, self.refusals = [*self.refusals, *self.doubts], []
        if self.doubts:
            others = f" and {len(self.doubts) - 1} more" if len(self.doubts) > 1 else ""
            logger.warning(
                "some rollouts may fail, because a server may refuse their rows: %s%s", self.doubts[0], others
            )
        if self.refusals:
            shown = "".join(f"\n  {line}" for line in self.refusals[:_MOST_SHOWN])
            more = len(self.refusals) - _MOST_SHOWN
            shown += f"\n  and {more} more" if more > 0 else ""
            raise error_type(f"rows cannot be rolled out, so nothing was written:{shown}\n{remedy}")
