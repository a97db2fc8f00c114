"""What a run can be told about which tasks of its input it is to have, in which order, and which shard of it one is.

The steps, one after the other: `tasks`, `where` and `only` leave rows out, `shuffle_seed` brings the rest into another
order, `sample` draws from it, then come `limit` and `shard`. Whatever is chosen, tasks keep the indices that they have
in the whole input. They are dealt out to shards by these, so every shard reads the same input and none needs to know of
the others. Like all options this is imported for every help page, so it stays light; the work is in `chosen`.
"""

import glob
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig

CHOOSING_OPTIONS = ("tasks", "where", "only", "of", "shuffle_seed", "sample", "sample_seed", "sample_by")
_EXAMPLE = "write numbers and ranges, such as +tasks=[3,10-20]"
_SHARD_DIGITS = 3
_SHARD_AS_TEXT = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")
_IN_FILE_NAME = re.compile(r"-shard(\d{3,})of(\d{3,})$")


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
    of: str | None = Field(default=None, min_length=1)
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


@dataclass(frozen=True)
class Shard:
    """One of `count` parts."""

    index: int
    """Counted from 0; texts for people and file names count from 1."""
    count: int

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    def has_task(self, task_index: Any) -> bool:
        """Whether a task belongs to this shard: task t to shard t mod `count`, so with all of its repeats."""
        if isinstance(task_index, int):
            return task_index % self.count == self.index
        return zlib.crc32(repr(task_index).encode()) % self.count == self.index

    def file(self, output: Path) -> Path:
        """The rollouts file of this shard of the run whose output is given."""
        name = f"{output.stem}-shard{self.index + 1:0{_SHARD_DIGITS}}of{self.count:0{_SHARD_DIGITS}}"
        return output.with_name(f"{name}{output.suffix}")

    def glob(self, output: Path) -> str:
        """What matches the rollouts files of all shards of that run, and of no run cut otherwise."""
        stem = glob.escape(str(output.with_name(output.stem)))
        return f"{stem}-shard*of{self.count:0{_SHARD_DIGITS}}{glob.escape(output.suffix)}"

    @classmethod
    def of_file(cls, path: Path) -> "Shard | None":
        """The shard that a file is by its name; None when it is none."""
        found = _IN_FILE_NAME.search(path.stem)
        return None if found is None else _checked(int(found[1]) - 1, int(found[2]))

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """The shard that is written as `3/16`, counted from 1.

        Raises:
            ConfigError: it says nothing, or something impossible.
        """
        found = _SHARD_AS_TEXT.fullmatch(text)
        shard = None if found is None else _checked(int(found[1]) - 1, int(found[2]))
        if shard is None:
            raise ConfigError(f"+shard={text}: write which of how many, counted from 1, such as +shard=3/16")
        return shard


def _checked(index: int, count: int) -> Shard | None:
    return Shard(index, count) if 0 <= index < count else None


class ShardOptions(BaseNeMoGymCLIConfig):
    """Arguments of the commands that can do one part of a run, or have all parts done elsewhere."""

    shard: str | None = None
    """Collect only one part of the run, such as 3/16 (counted from 1): the tasks whose index modulo 16 is 2, with all
    of their repeats. The output becomes <output>-shard003of016.jsonl; ng_aggregate_rollouts combines all 16."""
    shard_index: int | None = Field(default=None, ge=0)
    """The same, counted from 0 and together with num_shards."""
    num_shards: int | None = Field(default=None, ge=1)
    """How many parts the run has."""
    executor: Literal["local", "ray"] = "local"
    """Who runs it: this process, or a Ray cluster, to which it goes as num_shards tasks that start their own servers.
    All nodes must see the folder of the output. num_samples_in_parallel then holds for all shards together."""
    ray_address: str = Field(default="auto", min_length=1)
    """The Ray cluster: auto finds the one that runs on this machine, local starts one here and now."""
    shard_resources: dict[str, float] = Field(default_factory=lambda: {"CPU": 1.0})
    """What Ray sets aside for each shard, such as {CPU: 4, GPU: 1, memory: 8000000000}."""
    ray_runtime_env: dict[str, Any] = Field(default_factory=dict)
    """What Ray ships to the nodes, such as {working_dir: ., pip: [...], env_vars: {...}}; unless set, package and
    working folder are found there under the same paths."""

    @model_validator(mode="after")
    def _check_shard(self) -> "ShardOptions":
        try:
            self.chosen_shard  # noqa: B018 - reading it checks it
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def chosen_shard(self) -> Shard | None:
        """The part of the run that was asked for; None means all of it.

        Raises:
            ConfigError: the three options do not say it clearly.
        """
        if self.executor != "local":
            return self._none_of_them()
        if self.shard is not None:
            shard = Shard.parse(self.shard)
            if self.shard_index not in (None, shard.index) or self.num_shards not in (None, shard.count):
                raise ConfigError(
                    f"+shard={self.shard} contradicts +shard_index={self.shard_index} +num_shards={self.num_shards}; "
                    "say it one way (shard counts from 1, shard_index from 0)"
                )
            return shard
        if self.shard_index is None and self.num_shards is None:
            return None
        if self.shard_index is None:
            raise ConfigError(
                f"+num_shards={self.num_shards} needs +shard_index=<which of them, counted from 0>; or write "
                f"+shard=1/{self.num_shards}"
            )
        if self.num_shards is None:
            raise ConfigError(f"+shard_index={self.shard_index} needs +num_shards=<how many there are>")
        if self.shard_index >= self.num_shards:
            raise ConfigError(f"+shard_index={self.shard_index}: there are {self.num_shards} shards, counted from 0")
        return Shard(self.shard_index, self.num_shards)

    def _none_of_them(self) -> Shard | None:
        if self.shard is not None or self.shard_index is not None:
            raise ConfigError(
                "+executor=ray runs all shards of a run; say only how many there are, +num_shards=<number>"
            )
        if self.num_shards is None:
            raise ConfigError(
                "+executor=ray needs +num_shards=<number>: as many as there are nodes, or a few times that"
            )
        return None
