"""Which part of a run a shard is, and how commands are told of it.

Tasks are dealt out to shards by their index, so every shard reads the same input and none needs to know of the others.
"""

import glob
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import ALL_SHORTCUTS, BaseNeMoGymCLIConfig
from nemo_gym.schemas.path_text import PathText

_DIGITS = 3
_WRITTEN = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")
_IN_FILE_NAME = re.compile(r"-shard(\d{3,})of(\d{3,})$")


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
        name = f"{output.stem}-shard{self.index + 1:0{_DIGITS}}of{self.count:0{_DIGITS}}"
        return output.with_name(f"{name}{output.suffix}")

    def glob(self, output: Path) -> str:
        """What matches the rollouts files of all shards of that run, and of no run cut otherwise."""
        stem = glob.escape(str(output.with_name(output.stem)))
        return f"{stem}-shard*of{self.count:0{_DIGITS}}{glob.escape(output.suffix)}"

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
        found = _WRITTEN.fullmatch(text)
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
                f"+executor={self.executor} runs all shards of a run; say only how many there are, +num_shards=<number>"
            )
        if self.num_shards is None:
            raise ConfigError(
                f"+executor={self.executor} needs +num_shards=<number>: as many as there are nodes, or a few times that"
            )
        return None


class SlurmConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_slurm`; everything else on its command line is for the command that the jobs run."""

    shortcuts = ALL_SHORTCUTS
    num_shards: int = Field(ge=1)
    """Into how many shards the run is cut; each is one task of the array job."""
    command: Literal["ng_e2e_collect_rollouts", "ng_collect_rollouts"] = "ng_e2e_collect_rollouts"
    """What a shard runs. ng_collect_rollouts needs servers that every node can reach (+head_server.host)."""
    script_dirpath: PathText | None = Field(default=None, min_length=1)
    """The folder for the scripts and the jobs' logs; <output without ending>_slurm unless set."""
    wall_time: str | None = Field(default=None, min_length=1)
    """The longest a job may take, as sbatch --time takes it (04:00:00); that of the partition when unset."""
    stop_before_s: int = Field(default=120, ge=10)
    """So many seconds before the wall time a shard stops in good order, keeping what is finished."""
    chain: int = Field(default=1, ge=1)
    """Submit the array job so many times, one after the other; each time the shards go on where they ended."""
    max_running_shards: int | None = Field(default=None, ge=1)
    """How many shards may run at the same time; any number when unset."""
    sbatch_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of sbatch, such as {partition: batch, account: me, cpus-per-task: 8, exclusive: true}."""
    setup: str | None = None
    """Shell commands that come first in every job, such as `source /shared/venv/bin/activate`; without them the
    commands of the environment that ng_slurm runs in are used, which every node must see."""
