"""`ng_slurm`: a run in shards as Slurm jobs; which options go to which job, and the texts of the scripts.

The array job runs the shards, each of which resumes what it finds. It is submitted several times, one after the
other, for runs that are longer than a job may be; the job after them combines the shards.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.options import options_of, validate_options
from nemo_gym.config.secrets import is_secret_key
from nemo_gym.errors import ConfigError
from nemo_gym.executors.base import Job
from nemo_gym.keys import HEAD_SERVER_KEY_NAME
from nemo_gym.paths import make_folder, write_aside
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig, RowOptions
from nemo_gym.runs.options.sharding import Shard, SlurmConfig

PREPARE, SHARDS, AGGREGATE, SUBMIT = "prepare.sbatch", "shards.sbatch", "aggregate.sbatch", "submit.sh"
_SHARD_OPTIONS = '"+shard_index=$SLURM_ARRAY_TASK_ID"'
_OF_SHARDS = ("shard", "shard_index", "num_shards", "resume_from_cache")
_REUSE = "reuse_existing_data_preparation"
_COLLECTING: dict[str, type[RowOptions]] = {
    "ng_e2e_collect_rollouts": E2ERolloutCollectionConfig,
    "ng_collect_rollouts": RolloutCollectionConfig,
}
"""The options of each command that jobs can run."""


class SlurmWriter:
    """Writes the scripts of a run."""

    def write(self, config: SlurmConfig, job: Job) -> dict[Path, str]:
        """Write the scripts for a run with these arguments; their texts by path, the one that submits them last."""
        _refuse_secrets(job.arguments)
        collecting = _collecting_config(config, job.global_config)
        output = Path(collecting.output_jsonl_fpath)
        folder = Path(config.script_dirpath or output.with_name(f"{output.stem}_slurm")).absolute()
        plan = _plan(config, collecting, job.arguments, folder)
        written = {folder / name: text for name, text in plan.scripts().items()}
        make_folder(folder)
        for path, text in written.items():
            with write_aside(path) as file:
                file.write(text.encode())
        return written


@dataclass(frozen=True)
class SlurmPlan:
    """What the scripts are made of; commands are lists of words."""

    name: str
    """Of the jobs."""
    folder: Path
    """Where the jobs run."""
    logs: Path
    """The folder of their output."""
    num_shards: int
    collect: Sequence[str]
    aggregate: Sequence[str]
    prepare: Sequence[str] = ()
    """What every shard needs and one job does before them; empty when there is nothing."""
    chain: int = 1
    """How often the shards are submitted, one time after the other."""
    max_running: int | None = None
    wall_time: str | None = None
    stop_before_s: int = 120
    """How long before the wall time a shard is asked to stop in good order."""
    sbatch_options: Mapping[str, Any] = field(default_factory=dict)
    setup: str = ""
    """Shell lines that come first in every job."""

    def scripts(self) -> dict[str, str]:
        """Every script by its file name, in the order the jobs run; the last one submits the others."""
        scripts = {} if not self.prepare else {PREPARE: self._job("prepare", (), shlex.join(self.prepare))}
        scripts[SHARDS] = self._job("shards", self._array_options(), f"{shlex.join(self.collect)} {_SHARD_OPTIONS}")
        scripts[AGGREGATE] = self._job("aggregate", (), shlex.join(self.aggregate))
        scripts[SUBMIT] = self._submit()
        return scripts

    def _array_options(self) -> list[str]:
        at_once = "" if self.max_running is None else f"%{self.max_running}"
        return [
            f"--array=0-{self.num_shards - 1}{at_once}",
            f"--signal=B:TERM@{self.stop_before_s}",
            "--requeue",
            "--open-mode=append",
        ]

    def _job(self, part: str, options: Sequence[str], command: str) -> str:
        log = "%x-%A_%a.log" if options else "%x-%j.log"
        directives = [
            f"--job-name={self.name}-{part}",
            f"--chdir={self.folder}",
            f"--output={self.logs / log}",
            *([] if self.wall_time is None else [f"--time={self.wall_time}"]),
            *options,
            *(_directive(name, value) for name, value in self.sbatch_options.items() if value is not False),
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives), "set -euo pipefail"]
        # exec: the signal before the wall time goes to the batch shell, so the command takes its place
        return "\n".join([*lines, *self.setup.splitlines(), f"exec {command}", ""])

    def _submit(self) -> str:
        lines = [
            "#!/bin/bash",
            "# Submits the jobs of this folder, each waiting for the one before.",
            "set -euo pipefail",
            'cd "$(dirname "$0")"',
            'after=""',
            "submit() {",
            '  job=$(sbatch --parsable --kill-on-invalid-dep=yes ${after:+"--dependency=$after"} "$1")',
            '  echo "$1: job ${job%%;*}"',
            "}",
        ]
        if self.prepare:
            lines += [f"submit {PREPARE}", 'after="afterok:${job%%;*}"']
        lines += [
            f"for link in $(seq {self.chain}); do  # a shard that is complete ends at once",
            f"  submit {SHARDS}",
            '  after="afterany:${job%%;*}"',
            "done",
            f"submit {AGGREGATE}",
            "",
        ]
        return "\n".join(lines)


def _directive(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True or value is None else f"{option}={value}"


def _plan(config: SlurmConfig, collecting: RowOptions, arguments: Sequence[str], folder: Path) -> SlurmPlan:
    output = Path(collecting.output_jsonl_fpath)
    own = _names(SlurmConfig)
    passed_on = [argument for argument in arguments if _key(argument) not in {*own, *_OF_SHARDS}]
    of_collecting = _names(type(collecting))
    servers = [argument for argument in passed_on if _key(argument) not in of_collecting]
    prepares = config.command == "ng_e2e_collect_rollouts"
    alone = [f"+{_REUSE}=true"] if prepares else []
    if prepares and not any(_key(argument) == HEAD_SERVER_KEY_NAME for argument in arguments):
        alone.append(f"+{HEAD_SERVER_KEY_NAME}.port=0")  # shards may start on one node at the same moment
    passed_on = [argument for argument in passed_on if _key(argument) != _REUSE]
    return SlurmPlan(
        name=output.stem,
        folder=Path.cwd(),
        logs=folder,
        num_shards=config.num_shards,
        collect=[
            *_program(config, config.command),
            *passed_on,
            *alone,
            "+resume_from_cache=true",
            f"+num_shards={config.num_shards}",
        ],
        aggregate=[
            *_program(config, "ng_aggregate_rollouts"),
            *servers,
            *(["+offline=true"] if prepares else []),
            f"+input_glob={Shard(0, config.num_shards).glob(output)}",
            f"+output_jsonl_fpath={output}",
        ],
        prepare=[*_program(config, config.command), *passed_on, "+dry_run=true"] if prepares else (),
        chain=config.chain,
        max_running=config.max_running_shards,
        wall_time=config.wall_time,
        stop_before_s=config.stop_before_s,
        sbatch_options=config.sbatch_options,
        setup=config.setup or "",
    )


def _collecting_config(config: SlurmConfig, global_config: DictConfig) -> RowOptions:
    """What the shards will be told, checked now: a mistake in it would show up only when the jobs run."""
    first_shard = {"shard": None, "shard_index": 0, "num_shards": config.num_shards}
    given = OmegaConf.merge(global_config, first_shard)
    assert isinstance(given, DictConfig)
    collecting = validate_options(_COLLECTING[config.command], given, config.command)
    if collecting.detach:
        raise ConfigError("+detach=true: a job whose command leaves it is over for Slurm; jobs have logs of their own")
    return collecting


def _program(config: SlurmConfig, name: str) -> list[str]:
    return [name if config.setup else str(Path(sys.executable).absolute().with_name(name))]


def _names(config_class: type[RowOptions] | type[SlurmConfig]) -> set[str]:
    return {name for option in options_of(config_class) for name in (*option.names, option.field)}


def _key(argument: str) -> str:
    """The top-level key that an argument is about."""
    return argument.lstrip("+~").partition("=")[0].partition(".")[0]


def _refuse_secrets(arguments: Sequence[str]) -> None:
    for argument in arguments:
        key = argument.lstrip("+").partition("=")[0]
        if is_secret_key(key.rpartition(".")[2]) and not argument.startswith("~"):
            raise ConfigError(
                f"+{key} is a secret, which does not belong into a script that others may read; put it into env.yaml "
                "in the folder where the jobs run"
            )
