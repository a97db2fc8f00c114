"""A run in shards as Slurm jobs: the texts of the scripts, and nothing else.

The array job runs the shards, each of which resumes what it finds. It is submitted several times, one after the
other, for runs that are longer than a job may be; the job after them combines the shards.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREPARE, SHARDS, AGGREGATE, SUBMIT = "prepare.sbatch", "shards.sbatch", "aggregate.sbatch", "submit.sh"
_SHARD_OPTIONS = '"+shard_index=$SLURM_ARRAY_TASK_ID"'


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
