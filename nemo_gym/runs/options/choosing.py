"""What a run can be told about which tasks of its input it is to have, and in which order.

The steps, one after the other: `tasks`, `where` and `only` leave rows out, `shuffle_seed` brings the rest into another
order, `sample` draws from it, then come `limit` and `shard`. Whatever is chosen, tasks keep the indices that they have
in the whole input. Like all options this is imported for every help page, so it stays light; the work is in `chosen`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig
from nemo_gym.schemas.path_text import PathText

CHOOSING_OPTIONS = ("tasks", "where", "only", "of", "shuffle_seed", "sample", "sample_seed", "sample_by")
_EXAMPLE = "write numbers and ranges, such as +tasks=[3,10-20]"


@dataclass(frozen=True)
class TaskRanges:
    """Task indices in ascending ranges, which do not touch."""

    ranges: tuple[tuple[int, int], ...]
    """(first, last)"""

    @classmethod
    def parse(cls, given: Any) -> "TaskRanges":
        """What `+tasks` says: a number, a range, or a list of them.

        Raises:
            ConfigError: it says something else.
        """
        merged: list[tuple[int, int]] = []
        for first, last in sorted(_ranges_in(given)):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        if not merged:
            raise ConfigError(f"+tasks={given} names no task: {_EXAMPLE}")
        return cls(tuple(merged))

    def place_of(self, index: object) -> int | None:
        """Which of the ranges has a task index; None when none has."""
        if type(index) is not int:
            return None
        place = bisect_right(self.ranges, index, key=lambda each: each[0]) - 1
        return place if place >= 0 and index <= self.ranges[place][1] else None

    def __str__(self) -> str:
        return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in self.ranges)


def _ranges_in(given: Any) -> Iterator[tuple[int, int]]:
    if isinstance(given, str):
        for part in given.strip().removeprefix("[").removesuffix("]").split(","):
            yield _range(part)
    elif isinstance(given, Iterable):
        for entry in given:
            yield from _ranges_in(entry)
    else:
        yield _range(given)


def _range(part: Any) -> tuple[int, int]:
    first, dash, last = (each.strip() for each in str(part).partition("-"))
    if isinstance(part, bool) or not (first.isdecimal() and (last.isdecimal() or not dash)):
        raise ConfigError(
            f"+tasks: {part!r} is no task index: {_EXAMPLE} (rows that bring a text as index: "
            """+where='_ng_task_index == "a"')"""
        )
    if dash and int(last) < int(first):
        raise ConfigError(f"+tasks: the range {first}-{last} ends before it begins")
    return int(first), int(last if dash else first)


class ChoosingOptions(BaseNeMoGymCLIConfig):
    """Arguments of the commands that can be told which tasks of the input to take.

    A mapping under one of these names is something of the config's own, such as a server, and no option.
    """

    tasks: list[int | str] | int | str | None = None
    """Only these tasks, by the index that they have in the whole input: [3,10-20]."""
    where: str | None = None
    """Only the tasks whose row fulfils a condition on its fields: 'level == "hard" and 5 < length'."""
    only: Literal["failed", "missing", "unsolved"] | None = None
    """Only what became of an earlier run (of): rollouts that failed there and have no result, rollouts that have no
    result there, or the tasks that were tried there and have no rollout with a reward of at least 1."""
    of: PathText | None = Field(default=None, min_length=1)
    """The rollouts file of the earlier run that `only` speaks of, made from the same input."""
    shuffle_seed: int | None = Field(default=None, ge=0)
    """Take the rows in a random order, always the same for a seed; with limit, a random part of them."""
    sample: int | None = Field(default=None, ge=1)
    """Only so many rows, drawn at random; a larger sample has everything that a smaller one has."""
    sample_seed: int | None = Field(default=None, ge=0)
    """Which sample it is; 0 when unset."""
    sample_by: str | None = Field(default=None, min_length=1)
    """A field of the rows; each of its values has the share of the sample that it has of the rows."""

    @field_validator(*CHOOSING_OPTIONS, mode="before")
    @classmethod
    def _mappings_are_of_others(cls, value: Any) -> Any:
        return None if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _check_choosing(self) -> "ChoosingOptions":
        try:
            if self.tasks is not None:
                TaskRanges.parse(self.tasks)
            if self.where is not None:
                from nemo_gym.runs.select import Expression

                Expression.parse(self.where, "+where")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.only is not None and self.of is None:
            raise ValueError(f"+only={self.only} needs +of=<the rollouts file of the earlier run>")
        if self.of is not None and self.only is None:
            raise ValueError(f"+of={self.of} needs +only=failed, +only=missing or +only=unsolved")
        for name in ("sample_by", "sample_seed"):
            if getattr(self, name) is not None and self.sample is None:
                raise ValueError(f"+{name}={getattr(self, name)} needs +sample=<how many rows>")
        return self

    @property
    def selection(self) -> dict[str, Any]:
        """The options that choose, as far as they are given; empty when the whole input is meant."""
        return selection_in(self.model_dump(include=set(CHOOSING_OPTIONS)))


def selection_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is chosen by the options of a run, as its manifest has them, in one spelling."""
    given = {name: options[name] for name in CHOOSING_OPTIONS if options.get(name) is not None}
    if "tasks" in given:
        given["tasks"] = str(TaskRanges.parse(given["tasks"]))
    if "sample" in given:
        given.setdefault("sample_seed", 0)
    return given


def selection_text(selection: Mapping[str, Any]) -> str | None:
    """A selection as it is written on a command line; None for none."""
    return " ".join(f"+{name}={value}" for name, value in selection.items()) or None
