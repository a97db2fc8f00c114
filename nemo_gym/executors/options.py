"""What executors can be told that is no option of the collecting commands: the arguments of `ng_slurm`.

This module is imported for every help page, so it stays light.
"""

from typing import Any, Literal

from pydantic import Field

from nemo_gym.schemas.cli_config import ALL_SHORTCUTS, BaseNeMoGymCLIConfig


class SlurmConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_slurm`; everything else on its command line is for the command that the jobs run."""

    shortcuts = ALL_SHORTCUTS
    num_shards: int = Field(ge=1)
    """Into how many shards the run is cut; each is one task of the array job."""
    command: Literal["ng_e2e_collect_rollouts", "ng_collect_rollouts"] = "ng_e2e_collect_rollouts"
    """What a shard runs. ng_collect_rollouts needs servers that every node can reach (+head_server.host)."""
    script_dirpath: str | None = Field(default=None, min_length=1)
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
