"""Rollouts per second and CPU per rollout: the floor's and the product's, at several numbers in flight."""

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil

from tests.perf.side_by_side import processes

ROWS = 5
"""Rows of the example input."""


@dataclass
class Reading:
    """One measurement of `rollouts` rollouts."""

    rollouts: int
    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    endpoint_cpu_s: float = 0.0

    def minus(self, other: "Reading") -> "Reading":
        """What the additional rollouts took: start-up falls out."""
        return Reading(
            *(mine - theirs for mine, theirs in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )

    @property
    def per_second(self) -> float:
        """Rollouts per second."""
        return self.rollouts / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU of both sides per rollout, without the endpoint."""
        return 1000 * (self.client_cpu_s + self.server_cpu_s) / self.rollouts


def measure_floor(bodies: Path, rollouts: int, in_flight: int) -> Reading:
    """Three echoes per rollout."""
    with processes.helper("floor.py", "serve", str(bodies)) as (server, port):
        command = [sys.executable, str(processes.HERE / "floor.py"), "drive", str(bodies)]
        command += ["--port", str(port), "--in-flight", str(in_flight)]
        subprocess.run([*command, "--rollouts", str(min(rollouts, 4 * in_flight))], check=True, capture_output=True)
        before = processes.cpu_s([server])
        done = subprocess.run([*command, "--rollouts", str(rollouts)], check=True, capture_output=True, text=True)
        seconds, client_cpu_s = map(float, done.stdout.split())
        return Reading(rollouts, seconds, client_cpu_s, processes.cpu_s([server]) - before)


def run_collector(
    folder: Path, launcher: psutil.Process, endpoint: psutil.Process, in_flight: int, repeats: int
) -> Reading:
    """One whole `ng_collect_rollouts`, start-up included."""
    output = f"rollouts-{time.monotonic_ns()}.jsonl"
    servers = processes.family(launcher)
    servers_before, endpoint_before = processes.cpu_s(servers), processes.cpu_s([endpoint])
    began, own_before = time.perf_counter(), os.times()
    command = processes.collect(folder, output, in_flight, repeats)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
    seconds, own = time.perf_counter() - began, os.times()
    found = (folder / output).read_bytes().count(b"\n")
    if found != ROWS * repeats:
        raise RuntimeError(f"{found} rollouts instead of {ROWS * repeats}: the measurement is worthless")
    return Reading(
        found,
        seconds,
        own.children_user + own.children_system - own_before.children_user - own_before.children_system,
        processes.cpu_s(servers) - servers_before,
        processes.cpu_s([endpoint]) - endpoint_before,
    )


def bodies_of_one_rollout(folder: Path) -> Path:
    """Collect one rollout and keep what was asked and answered, for the floor to echo."""
    from tests.perf.side_by_side import endpoint

    with processes.helper("endpoint.py") as (_, port), processes.servers(folder, port):
        command = processes.collect(folder, "one.jsonl", 1, 1)
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    record = orjson.loads((folder / "one.jsonl").read_bytes().splitlines()[0])
    asked = orjson.loads((folder / "one_materialized_inputs.jsonl").read_bytes().splitlines()[0])
    params = record["responses_create_params"]
    second = {**params, "input": [*params["input"], *record["response"]["output"][:2]]}
    exchanges = [
        [asked, record],
        [{**params, "model": "canned"}, orjson.loads(endpoint.CALL)],
        [{**second, "model": "canned"}, orjson.loads(endpoint.message())],
    ]
    path = folder / "bodies.json"
    path.write_bytes(orjson.dumps(exchanges))
    return path
