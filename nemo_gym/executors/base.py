"""The socket for executors: who runs a collection, and who writes one down as jobs that somebody else runs later.

An executor is one module of this package and one line of `EXECUTORS`, which is a choice of `+executor`; a job writer is
one module and one line of `JOB_WRITERS`, and has a command of its own. Only the one that was chosen is loaded: the
others may need what is not installed. The plain one, which needs nothing more than whoever asks for it, is here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemo_gym import runtime
from nemo_gym.collect.summary import RunSummary
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Job:
    """What a command knows of a run beside its options."""

    global_config: "DictConfig"
    command: Sequence[str]
    """The command line, with the program's name."""
    long_way: Sequence[str] | None = None
    """Its arguments without short ways, for processes that know none."""

    @property
    def arguments(self) -> Sequence[str]:
        """The command line without the program's name."""
        return self.command[1:] if self.long_way is None else self.long_way


class Executor(Protocol):
    """Runs a collection to its end and says what it came to; None after a dry run."""

    def collect(self, config: RolloutCollectionConfig, job: Job) -> RunSummary | None:
        """Collect the rollouts of rows that are there."""

    def collect_prepared(self, config: E2ERolloutCollectionConfig, job: Job) -> RunSummary | None:
        """Prepare the data sets of a split, start the configured servers, collect, stop."""


class JobWriter(Protocol):
    """Writes a collection down as jobs for a scheduler; submitting them is up to people."""

    def write(self, config: Any, job: Job) -> dict[Path, str]:
        """Write the files as `config`, the writer's own options, says; their texts by path, the one to start last."""


class LocalExecutor:
    """`+executor=local`: this process collects, from servers that run already or that it starts."""

    def collect(self, config: RolloutCollectionConfig, job: Job) -> RunSummary:
        """Collect rollouts from servers that run already."""
        return runtime.run(RolloutCollectionHelper().collect(config, job.command))

    def collect_prepared(self, config: E2ERolloutCollectionConfig, job: Job) -> RunSummary | None:
        """Prepare the data, start the servers, collect, stop; None after a dry run."""
        from nemo_gym.launch.end_to_end import run_end_to_end  # with all that servers need

        return run_end_to_end(config, job.global_config, job.command)


EXECUTORS = {
    "local": "nemo_gym.executors.base:LocalExecutor",
    "ray": "nemo_gym.executors.ray:RayExecutor",
}
JOB_WRITERS = {"slurm": "nemo_gym.executors.slurm:SlurmWriter"}


def executor_named(name: str) -> Executor:
    """The executor of that name."""
    found: Executor = _load(EXECUTORS[name])
    return found


def job_writer_named(name: str) -> JobWriter:
    """The job writer of that name."""
    found: JobWriter = _load(JOB_WRITERS[name])
    return found


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)()
