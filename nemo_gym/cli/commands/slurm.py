"""`ng_slurm`: the scripts that run a collection as Slurm jobs."""

import sys

from nemo_gym.cli.command import command, whole_config
from nemo_gym.executors.base import Job, job_writer_named
from nemo_gym.executors.options import SlurmConfig


@command(SlurmConfig, needs_model=False, offline=True)
def main(config: SlurmConfig) -> None:
    r"""Write the Slurm scripts that collect rollouts in shards, and print them; submitting them is up to you.

    Give it the options of ng_e2e_collect_rollouts (or of +command). An array job runs one shard per task and resumes
    whatever it finds, so it may be submitted again at any time: +chain does so for runs that take longer than a job
    may. A last job combines the shards. submit.sh submits all of them, each waiting for the one before.

    Examples:
        ng_slurm +num_shards=16 +wall_time=04:00:00 +chain=3 '+sbatch_options={partition: batch, account: me}' \
            +split=benchmark +output_jsonl_fpath=results/gsm8k.jsonl "+config_paths=[benchmarks/gsm8k/config.yaml,...]"
        ng_slurm +num_shards=8 +command=ng_collect_rollouts +head_server.host=10.0.0.7 +agent_name=my_agent \
            +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=results/out.jsonl
    """
    written = job_writer_named("slurm").write(config, Job(whole_config(), sys.argv))
    for path, text in written.items():
        print(f"# ==> {path}")
        print(text)
    print(f"Submit with: bash {list(written)[-1]}", file=sys.stderr)
