"""The scripts of `ng_slurm`, run for real under a stand-in for Slurm's scheduler."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
AGENT = "example_single_tool_call_simple_agent"
BIN = Path(sys.executable).parent

SBATCH = '''#!{python}
"""Runs every job when it is submitted: each depends on jobs submitted before. What it did is in jobs.jsonl."""

import json, os, re, signal, subprocess, sys, time
from pathlib import Path

*options, name = sys.argv[1:]
script = str(Path(name).absolute())
text = Path(script).read_text()
directives = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.M)
given = dict(directives) | dict(re.findall(r"--([a-z-]+)=?(.*)", " ".join(options).replace(" ", "\\n")))
journal = Path(os.environ["STAND_IN"]) / "jobs.jsonl"
before = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
kind, _, other = given.get("dependency", "").partition(":")
if kind == "afterok":
    assert all(code == 0 for job in before if str(job["id"]) == other for code in job["codes"])
job = {{"id": 100 + len(before), "script": Path(script).name, "given": given, "codes": []}}
first, _, last = given.get("array", "0-0").partition("%")[0].partition("-")
is_first_array = "array" in given and not any("array" in other["given"] for other in before)
for task in range(int(first), int(last) + 1):
    ids = {{"SLURM_JOB_ID": str(job["id"]), "SLURM_ARRAY_TASK_ID": str(task)}}
    log = given["output"].replace("%x", given["job-name"]).replace("%A", str(job["id"])).replace("%a", str(task))
    with open(log.replace("%j", str(job["id"])), "a") as output:
        process = subprocess.Popen(
            ["bash", script], env=os.environ | ids, cwd=given["chdir"], stdout=output, stderr=subprocess.STDOUT
        )
        wall_time_is_over = is_first_array and given["signal"].startswith("B:TERM")
        shard = Path(given["chdir"]) / f"results/out-shard{{task + 1:03}}of002.jsonl"
        while process.poll() is None:
            if wall_time_is_over and shard.exists() and shard.read_bytes().count(b"\\n"):
                process.send_signal(signal.SIGTERM)
                wall_time_is_over = False
            time.sleep(0.02)
    job["codes"].append(process.returncode)
with journal.open("a") as file:
    file.write(json.dumps(job) + "\\n")
print(f"{{job['id']}};cluster")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An environment with six training rows and a model that takes its time; `sbatch` is the stand-in."""
    rows = [{"responses_create_params": {"input": [{"role": "user", "content": f"task {n}"}]}} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets = [{"name": "t", "type": "train", "jsonl_fpath": "train.jsonl", "license": "MIT"}]
    model = {"entrypoint": "app.py", "script": {"latency_s": 0.3}}
    config = {
        "config_paths": [ENVIRONMENT],
        "head_server": {"port": 0},
        AGENT: {"responses_api_agents": {"simple_agent": {"datasets": datasets}}},
        "policy_model": {"responses_api_models": {"scripted_model": model}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    scheduler = tmp_path / "scheduler"
    scheduler.mkdir()
    (scheduler / "sbatch").write_text(SBATCH.format(python=sys.executable))
    (scheduler / "sbatch").chmod(0o755)
    return tmp_path


def run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    scheduler = folder / "scheduler"
    environment = os.environ | {"STAND_IN": str(scheduler), "PATH": f"{scheduler}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300)


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jobs_that_reach_their_wall_time_go_on_in_the_next_and_are_combined(folder: Path) -> None:
    options = ["+split=train", "+config_paths=[config.yaml]", "+output_jsonl_fpath=results/out.jsonl"]
    slurm = ["+num_shards=2", "+chain=2", "+wall_time=00:10:00", "+sbatch_options={partition: debug, exclusive: true}"]
    written = run(folder, str(BIN / "ng_slurm"), *slurm, *options, "+num_repeats=2", "+num_samples_in_parallel=1")
    assert written.returncode == 0, written.stderr
    submit = folder / "results/out_slurm/submit.sh"
    assert submit.read_text() in written.stdout
    assert not (folder / "scheduler/jobs.jsonl").exists()  # submitting is the user's choice

    submitted = run(folder, "bash", str(submit))
    logs = "".join(path.read_text() for path in sorted(submit.parent.glob("*.log")))
    assert submitted.returncode == 0, submitted.stderr + logs
    jobs = lines_in(folder / "scheduler/jobs.jsonl")
    expected = ["prepare.sbatch", "shards.sbatch", "shards.sbatch", "aggregate.sbatch"]
    assert [job["script"] for job in jobs] == expected, logs
    assert [job["codes"] for job in jobs] == [[0], [130, 130], [0, 0], [0]], logs
    assert [job["given"].get("dependency") for job in jobs] == [None, "afterok:100", "afterany:101", "afterany:102"]
    assert {(job["given"]["partition"], job["given"]["time"]) for job in jobs} == {("debug", "00:10:00")}

    rollouts = lines_in(folder / "results/out.jsonl")
    keys = [(rollout["_ng_task_index"], rollout["_ng_rollout_index"]) for rollout in rollouts]
    assert keys == [(task, repeat) for task in range(6) for repeat in range(2)]
    [metrics] = json.loads((folder / "results/out_aggregate_metrics.json").read_text())
    assert metrics["coverage"]["scored"]["rollouts"] == 12
    assert not list(folder.glob("results/out-shard*/preprocessed_datasets"))  # one job prepared for all


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["+split=trian"], "did you mean 'train'?"),
        (["+split=train", "+num_repeats=0"], "num_repeats must be >= 1"),
        (["+split=train", "+policy_api_key=secret-value"], "put it into env.yaml"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(folder: Path, options: list[str], says: str) -> None:
    given = ["+num_shards=2", "+config_paths=[config.yaml]", "+output_jsonl_fpath=results/out.jsonl", *options]
    refused = run(folder, str(BIN / "ng_slurm"), *given)

    assert refused.returncode == 2
    assert says in refused.stderr
    assert "secret-value" not in refused.stderr
    assert not (folder / "results").exists()
