"""The texts of the Slurm scripts."""

import shutil
import subprocess
from pathlib import Path

from nemo_gym.executors.slurm import SlurmPlan

PLAN = SlurmPlan(
    name="run",
    folder=Path("/shared/work"),
    logs=Path("/shared/logs"),
    num_shards=16,
    collect=["ng_collect_rollouts", "+note=a b"],
    aggregate=["ng_aggregate_rollouts", "+input_glob=x-shard*.jsonl"],
    max_running=4,
    sbatch_options={"gpus_per_node": 1, "exclusive": True, "mail_user": False},
    setup="module load python\nsource venv/bin/activate",
)


def test_options_of_sbatch_are_spelled_as_it_reads_them() -> None:
    job = PLAN.scripts()["shards.sbatch"].splitlines()

    assert "#SBATCH --array=0-15%4" in job
    assert "#SBATCH --gpus-per-node=1" in job
    assert "#SBATCH --exclusive" in job
    assert not any("mail" in line or "--time" in line for line in job)


def test_a_job_sets_up_its_environment_and_then_becomes_the_command() -> None:
    job = PLAN.scripts()["shards.sbatch"].splitlines()

    assert job[-3:-1] == ["module load python", "source venv/bin/activate"]
    assert job[-1] == "exec ng_collect_rollouts '+note=a b' \"+shard_index=$SLURM_ARRAY_TASK_ID\""


def test_without_preparation_the_shards_come_first() -> None:
    scripts = PLAN.scripts()

    assert list(scripts) == ["shards.sbatch", "aggregate.sbatch", "submit.sh"]
    assert "prepare" not in scripts["submit.sh"]


def test_bash_can_read_every_script() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    for text in PLAN.scripts().values():
        assert subprocess.run([bash, "-n"], input=text, text=True, capture_output=True).stderr == ""
