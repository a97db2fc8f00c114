"""Weights & Biases through the command: offline mode, and a tracker that cannot be reached. Real processes."""

import json
import os
import socket
import subprocess
from pathlib import Path

from tests.collection.fakes import FakeRun, failing_with, keys_in, rows_of, write_rows
from tests.programs import run_program

API_KEY = "0123456789" * 4


def collect_with_tracker(fake_run: FakeRun, *options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return run_program(
        "ng_collect_rollouts",
        f"+head_server.port={fake_run.port}",
        "+agent_name=alpha",
        "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out.jsonl",
        f"+results_dir={Path.cwd() / 'results'}",
        "+wandb_project=gym",
        "+wandb_name=a_run",
        f"+wandb_api_key={API_KEY}",
        *options,
        environment={**os.environ, **environment},
    )


def test_rollouts_and_metrics_are_uploaded_without_secrets(fake_run: FakeRun) -> None:
    fake_run.answer = failing_with(422, lambda row: row["n"] == 1)
    write_rows(Path("in.jsonl"), rows_of(2))

    done = collect_with_tracker(fake_run, "+max_attempts=1", WANDB_MODE="offline")

    assert done.returncode == 1, done.stderr
    written = b"".join(path.read_bytes() for path in Path("results/wandb").rglob("*") if path.is_file())
    assert b"alpha/mean/reward" in written
    assert b"key_metrics/alpha/mean/reward" in written
    assert b"coverage/alpha/failed_rollouts" in written
    (table,) = Path("results/wandb").rglob("Rollouts*.table.json")
    uploaded = json.loads(table.read_text())
    assert uploaded["columns"] == ["Rollout"]
    assert [json.loads(rollout)["_ng_task_index"] for (rollout,) in uploaded["data"]] == [0, 1]  # 1 is the failed one
    assert API_KEY.encode() not in written
    assert API_KEY not in Path("out_manifest.json").read_text()


def test_a_tracker_that_cannot_be_reached_costs_a_warning(fake_run: FakeRun) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"

        done = collect_with_tracker(fake_run, WANDB_BASE_URL=address, WANDB_INIT_TIMEOUT="1")

    assert done.returncode == 0, done.stderr
    assert "Weights & Biases is configured but no run could be opened" in done.stderr
    assert "Rollouts: 2 of 2 finished" in done.stdout
    assert keys_in(Path("out.jsonl")) == [(0, 0), (1, 0)]
    assert Path("out_aggregate_metrics.json").exists()


def test_the_upload_of_rollouts_can_be_switched_off_by_its_former_name_too(fake_run: FakeRun) -> None:
    write_rows(Path("in.jsonl"), rows_of(1))

    done = collect_with_tracker(fake_run, "+upload_rollouts_to_wandb=false", WANDB_MODE="offline")

    assert done.returncode == 0, done.stderr
    assert list(Path("results/wandb").rglob("Rollouts*")) == []
    assert list(Path("results/wandb").rglob("*.wandb"))
