"""`+executor=ray` on a cluster of several nodes, all of them on this machine: `make test-ray` runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.executors.conftest import TASKS, clean_environment, keys_in, write_environment

pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` runs these tests")

NODES, REPEATS = 3, 3
ALL_KEYS = [(task, repeat) for task in range(TASKS) for repeat in range(REPEATS)]
WAIT_S = 180.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_AUTH_MODE": "disabled"}

pytestmark = pytest.mark.filterwarnings("ignore")


class Nodes:
    """A Ray cluster whose nodes can be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args=self._node())
        self.address: str = self._cluster.address
        self._workers = [self._cluster.add_node(wait=False, **self._node()) for _ in range(NODES - 1)]

    @staticmethod
    def _node() -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}

    def kill_one(self) -> None:
        self._cluster.remove_node(self._workers.pop(), allow_graceful=False)

    def stop(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    before = dict(os.environ)
    os.environ.update(QUIET)
    started = Nodes()
    yield started
    started.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def start(tmp_path: Path, nodes: Nodes) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start the command on the cluster; no shard of it outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*options: str, shards: int = 0) -> "subprocess.Popen[str]":
        spread = ["+executor=ray", f"+ray_address={nodes.address}", f"+num_shards={shards}"] if shards else []
        command = [str(Path(sys.executable).with_name("ng_e2e_collect_rollouts")), *spread]
        given = ["+config_paths=[config.yaml]", "+split=train", f"+num_repeats={REPEATS}", "+head_server.port=0"]
        started.append(
            subprocess.Popen(
                [*command, *given, *options],
                cwd=tmp_path,
                env=clean_environment() | QUIET,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield run
    for each in started:
        each.kill()
        each.communicate()
    wait_until(lambda: not shard_processes(tmp_path), "shards are left behind")


def shard_processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "nemo_gym.cli.shard_process" in line and str(folder) in line:
            found.append(process)
    return found


def wait_until(condition: Callable[[], object], why: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, why
        time.sleep(0.05)


def finish(run: "subprocess.Popen[str]") -> tuple[int, str, str]:
    printed, errors = run.communicate(timeout=WAIT_S)
    return run.returncode, printed, errors


def rollouts_in(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("out-shard00?of00?.jsonl"))


def logs_in(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.log"))


def test_the_loss_of_a_node_changes_nothing_about_the_result(
    start: Callable[..., "subprocess.Popen[str]"], nodes: Nodes, tmp_path: Path
) -> None:
    write_environment(tmp_path, latency_s=0.3)
    whole = start("+output_jsonl_fpath=whole/out.jsonl")
    code, _, errors = finish(whole)
    assert code == 0, errors

    results = tmp_path / "spread"
    run = start("+output_jsonl_fpath=spread/out.jsonl", "+num_samples_in_parallel=3", "+json=true", shards=4)
    wait_until(lambda: run.poll() is not None or rollouts_in(results) >= 4, "nothing was collected")
    assert run.poll() is None, finish(run)
    nodes.kill_one()
    code, printed, errors = finish(run)

    assert code == 0, errors + logs_in(results)
    assert "is run again and goes on with what it has written" in errors
    summary = json.loads(printed)
    assert (summary["finished"], summary["missing"]) == (len(ALL_KEYS), 0)
    assert keys_in(results / "out.jsonl") == keys_in(tmp_path / "whole/out.jsonl") == ALL_KEYS
    metrics = [
        json.loads((tmp_path / folder / "out_aggregate_metrics.json").read_text()) for folder in ("whole", "spread")
    ]
    for (of_agent,) in metrics:
        assert of_agent["percentiles"].pop("duration_s")["p50"] > 0  # no two runs take the same time
    assert metrics[0] == metrics[1]
    assert f"{len(ALL_KEYS)}/{len(ALL_KEYS)}" in errors  # the driver's one bar


def test_ctrl_c_stops_every_shard_and_the_run_can_be_resumed(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    write_environment(tmp_path, latency_s=0.4)
    results = tmp_path / "results"
    options = ["+output_jsonl_fpath=results/out.jsonl", "+num_samples_in_parallel=2"]
    run = start(*options, shards=2)
    wait_until(lambda: run.poll() is not None or rollouts_in(results) >= 2, "nothing was collected")
    run.send_signal(signal.SIGINT)
    code, _, errors = finish(run)
    assert code == 130, errors + logs_in(results)
    assert "Traceback" not in errors
    assert "+resume_from_cache=true" in errors
    assert not shard_processes(tmp_path)
    assert not (results / "out.jsonl").exists()
    assert not list(results.glob(".*token"))
    before = rollouts_in(results)
    assert 2 <= before < len(ALL_KEYS)

    write_environment(tmp_path)
    code, printed, errors = finish(start(*options, "+num_samples_in_parallel=64", "+resume_from_cache=true", shards=2))
    assert code == 0, errors + logs_in(results)
    assert f"{before} of them before" in printed
    assert keys_in(results / "out.jsonl") == ALL_KEYS
