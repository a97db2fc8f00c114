"""A file of machines, services and benchmarks becomes one job that runs, with stand-ins for Slurm and its tools."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.errors import ConfigError
from nemo_gym.executors.submission import SubmissionError, hand_in, read_submission, sbatch_script

JOBS: dict[str, Any] = {
    "compute": {
        "cluster": {
            "type": "slurm",
            "account": "me",
            "walltime": "04:00:00",
            "node_pools": {"gpus": {"partition": "batch", "gpus_per_node": 8}, "cpus": {"partition": "cpu"}},
        }
    },
    "services": {
        "policy": {
            "type": "vllm",
            "container": "vllm.sqsh",
            "model": "my/model",
            "node_pool": "gpus",
            "tensor_parallel_size": 8,
            "mounts": ["/data:/data"],
            "env": {"HF_HOME": "/data/hf", "HF_TOKEN": None},
            "health_check": {"timeout_s": 20, "interval_s": 1},
        },
        "cluster": {"type": "ray", "container": "ray.sqsh", "node_pool": "cpus", "port": 8265},
    },
    "benchmarks": {
        "math": {"benchmark": "gsm8k", "service": "policy", "output": "out.jsonl", "overrides": ["+limit=3"]}
    },
    "setup": "PATH=$PWD/bin:$PATH",
}
STAND_INS = {
    "scontrol": "echo node7; echo node8",
    "srun": 'echo "$@" >> srun.txt; exec sleep 60',
    "curl": 'echo "$@" >> curl.txt; [ -e up ] || { touch up; exit 7; }',
    "gym": 'echo "$@" > gym.txt',
    "sbatch": 'cat > job.txt; echo "$@" > sbatch.txt; echo "4711;cluster"',
    "ssh": 'echo "$@" > ssh.txt; cat > job.txt; echo 4712',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def written(folder: Path, jobs: dict[str, Any]) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump(jobs, sort_keys=False))
    return path


def test_the_job_starts_services_waits_for_them_and_runs_the_benchmarks(folder: Path) -> None:
    submission = read_submission(written(folder, JOBS), ["compute.cluster.account=you", "services.policy.port=9000"])
    script = sbatch_script(submission, "night")
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        *("--job-name=night", "--account=you", f"--chdir={folder}", "--output=%x-%j.log", "--time=04:00:00"),
        *("--partition=batch", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=8"),
        *("hetjob", "--partition=cpu", "--nodes=1", "--ntasks-per-node=1"),
    ]
    names = {"SLURM_JOB_NODELIST_HET_GROUP_0": "node[7-8]", "SLURM_JOB_NODELIST_HET_GROUP_1": "node9"}
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | names, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    asked = (folder / "gym.txt").read_text()
    assert asked == (
        "eval run --benchmark gsm8k --model-type vllm_model -o out.jsonl --resume -m my/model "
        "--model-url http://node7:9000/v1 +policy_api_key=EMPTY +limit=3\n"
    )
    services = (folder / "srun.txt").read_text()
    assert (
        "--container-mounts=/data:/data --export=ALL,HF_HOME=/data/hf vllm serve my/model --port=9000 --tensor-"
        in services
    )
    assert "ray start --head" in services
    assert "HF_TOKEN" not in script
    assert (folder / "curl.txt").read_text().count("http://node7:9000/health") == 2  # it was not up at once
    assert "http://node7:8265/api/version" in (folder / "curl.txt").read_text()


def test_a_service_that_ends_ends_the_job(folder: Path) -> None:
    (folder / "bin/srun").write_text("#!/bin/bash\nexit 3\n")
    (folder / "bin/curl").write_text("#!/bin/bash\nexit 7\n")
    jobs = {**JOBS, "services": {"policy": JOBS["services"]["policy"]}}
    script = sbatch_script(read_submission(written(folder, jobs)), "night")
    nodes = {"SLURM_JOB_NODELIST_HET_GROUP_0": "node7"}
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | nodes, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "policy has ended: see policy.log\n")
    assert not (folder / "gym.txt").exists()


def test_the_job_is_handed_in_here_or_from_another_host(folder: Path) -> None:
    here = read_submission(written(folder, JOBS))
    assert hand_in(here, "#!/bin/bash\n") == "4711"
    assert (folder / "sbatch.txt").read_text() == "--parsable\n"
    assert (folder / "job.txt").read_text() == "#!/bin/bash\n"
    there = read_submission(folder / "jobs.yaml", ["compute.cluster.hostname=login"])
    assert hand_in(there, "#!/bin/bash\n") == "4712"
    assert (folder / "ssh.txt").read_text() == "-o BatchMode=yes -- login sbatch --parsable\n"


def test_what_slurm_says_and_a_missing_slurm_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submission = read_submission(written(folder, JOBS))
    (folder / "bin/sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    with pytest.raises(SubmissionError, match="did not take the job: sbatch: error: invalid account"):
        hand_in(submission, "")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ConfigError, match="sbatch is not installed here"):
        hand_in(submission, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("compute.cluster.acount=x", r"compute\.cluster\.acount: Extra inputs are not permitted"),
        ("services.policy.type=sglang", r"services\.policy\.type: Input should be 'vllm' or 'ray'"),
        ("services.policy.node_pool=gpu", "there is no such pool; did you mean 'gpus'"),
        ("benchmarks.math.service=polcy", "there is no such vllm service; did you mean 'policy'"),
        ("services.policy.env.HF_TOKEN=hf_1", "leave its value out"),
        ("benchmarks.math.overrides=[+policy_api_key=x]", r"\+policy_api_key is a secret"),
        ("benchmarks.math.environment=mcqa", "either a benchmark or an environment"),
        ("services.cluster.model=m", "one of type ray has none"),
        ("compute={}", r"compute: Dictionary should have at least 1 item|compute"),
    ],
)
def test_what_a_file_says_wrongly_is_one_line(folder: Path, change: str, said: str) -> None:
    jobs = written(folder, JOBS)
    if change == "compute={}":
        jobs, change = written(folder, {**JOBS, "compute": {}}), "setup=''"
    with pytest.raises(ConfigError, match=said) as caught:
        read_submission(jobs, [change])
    assert "\n" not in str(caught.value)
    assert "hf_1" not in str(caught.value)
