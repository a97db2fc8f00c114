"""`python -m tests.perf.side_by_side`: measure floor and product, print the findings, write docs/performance.*."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson

from tests.perf.side_by_side import files, latency, payloads, processes, report, start_up, throughput
from tests.perf.side_by_side.estimates import Estimate, Outcome
from tests.perf.side_by_side.targets import MOST_KB_IN_FLIGHT, Findings, Load

TIMES = 3
"""How often floor and product are measured in turn; the cheaper readings of each count, as noise only ever adds."""
ROLLOUTS = {
    # model ms: in flight: rollouts
    0: {1: 300, 64: 3000, 256: 3000, 1024: 4000},
    200: {1: 40, 64: 900, 256: 3000, 1024: 6000},
}
LOADS = [
    (in_flight, delay_ms, replicas, rollouts)
    for replicas in (1, 2)
    for delay_ms, by_in_flight in ROLLOUTS.items()
    for in_flight, rollouts in by_in_flight.items()
]
LARGE = [(64, 0, 1, 600)]
LARGE_BYTES = 100_000


def measure_load(
    folder: Path, bodies: Path, load: tuple[int, int, int, int], scale: float, extra_bytes: int = 0
) -> Load:
    """Floor and product in turn, a few times where it does not take long."""
    in_flight, delay_ms, replicas, rollouts = load
    rollouts = max(10, int(rollouts * scale))
    endpoint_options = ("--delay", str(delay_ms / 1000), "--extra-bytes", str(extra_bytes))
    floors, readings = [], []
    with (
        processes.helper("endpoint.py", *endpoint_options) as (endpoint, port),
        processes.servers(folder, port, f"+num_replicas={replicas}") as launcher,
    ):
        for _ in range(1 if delay_ms else TIMES):
            floors.append(throughput.measure_floor(bodies, rollouts, in_flight, delay_ms / 1000))
            readings.append(throughput.measure_product(folder, launcher, endpoint, in_flight, rollouts))
    ours = min(readings, key=lambda reading: reading.cpu_ms)
    found = Load(
        in_flight,
        delay_ms,
        replicas,
        max(floor.per_second for floor in floors),
        max(reading.per_second for reading in readings),
        min(floor.cpu_ms for floor in floors),
        ours.cpu_ms,
        1000 * ours.endpoint_cpu_s / ours.rollouts,
        [reading.cpu_ms / floor.cpu_ms for reading, floor in zip(readings, floors, strict=True)],
        [reading.per_second for reading in readings],
        [floor.per_second for floor in floors],
    )
    print(
        f"{in_flight:5} in flight, {delay_ms:3} ms, {replicas} replicas: {found.per_s:6.0f}/s (floor "
        f"{found.floor_per_s:6.0f}/s), CPU {found.cpu_ms:.2f} ms (floor {found.floor_cpu_ms:.2f}): "
        f"{found.cpu_ratio} x; client {1000 * ours.client_cpu_s / ours.rollouts:.2f}, "
        f"servers {1000 * ours.server_cpu_s / ours.rollouts:.2f}, endpoint {found.endpoint_cpu_ms:.3f}",
        flush=True,
    )
    return found


def measure_loads(findings: Findings, folder: Path, scale: float) -> None:
    """Rollouts per second and CPU for each."""
    bodies = throughput.bodies_of_one_rollout(folder)
    findings.loads = [measure_load(folder, bodies, load, scale) for load in LOADS]
    large = throughput.bodies_of_one_rollout(folder, LARGE_BYTES)
    findings.large = [measure_load(folder, large, load, scale, LARGE_BYTES) for load in LARGE]
    findings.endpoint_per_s = throughput.endpoint_capacity()


def measure_latency(findings: Findings, folder: Path, scale: float) -> None:
    """What is added to a rollout of a model that takes its time."""
    with processes.helper("endpoint.py", "--delay", "0.2") as (_, port), processes.servers(folder, port):
        for in_flight, times in ((64, TIMES), (256, 1)):
            rollouts = int(20 * in_flight * scale) + 128
            found = [latency.added_ms(folder, port, 0.2, in_flight, rollouts) for _ in range(times)]
            findings.added_ms[in_flight] = found
            print(f"added to a rollout at {in_flight} in flight: {Estimate.of(found)} ms", flush=True)


def measure_memory(findings: Findings, folder: Path, scale: float) -> None:
    """What a rollout in flight occupies, in fresh servers; again if that is too much."""
    found: list[float] = []
    while not found or (len(found) < TIMES and Estimate.of(found).at_most(MOST_KB_IN_FLIGHT) is not Outcome.MET):
        with processes.helper("endpoint.py", "--delay", "3") as (_, port), processes.servers(folder, port) as launcher:
            found.append(latency.kb_per_rollout_in_flight(folder, launcher, 1024))
    findings.kb_in_flight = found
    print(f"memory per rollout in flight: {Estimate.of(found)} KB", flush=True)


def measure_start_up(findings: Findings, folder: Path, scale: float) -> None:
    """How long until something happens."""
    with processes.helper("endpoint.py") as (_, port):
        findings.start_up = start_up.measure(folder, port)


def measure_files(findings: Findings, folder: Path, scale: float) -> None:
    """Expansion, resume, merge."""
    findings.files = files.measure_all(folder / "files")


def measure_payloads(findings: Findings, folder: Path, scale: float) -> None:
    """Long texts, images, token ids."""
    findings.payloads = payloads.measure_all(folder / "payloads", scale)


PARTS = {
    "loads": measure_loads,
    "latency": measure_latency,
    "memory": measure_memory,
    "start_up": measure_start_up,
    "files": measure_files,
    "payloads": measure_payloads,
}


def measure(folder: Path, scale: float, only: str | None) -> Findings:
    """Everything, one part after another; or one part, and the rest as it was published."""
    if only:
        findings = Findings.from_json(orjson.loads(report.DATA.read_bytes()))
        PARTS[only](findings, folder, scale)
        findings.measured_again = sorted({*findings.measured_again, only})
        return findings
    findings = Findings()
    began_s, stolen_s = time.monotonic(), processes.stolen_s()
    for part in PARTS.values():
        part(findings, folder, scale)
    cores_s = (time.monotonic() - began_s) * (os.cpu_count() or 1)
    findings.stolen_share = (processes.stolen_s() - stolen_s) / cores_s
    return findings


def main() -> int:
    """Measure, show, and say with the exit code whether a target is missed by more than the error of its figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="rollouts per measurement, as a multiple")
    parser.add_argument("--dry", action="store_true", help="do not write docs/performance.*")
    parser.add_argument("--only", choices=PARTS, help="measure one part again and keep what is published of the rest")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nemo_gym_bench_") as folder:
        try:
            findings = measure(Path(folder), given.scale, given.only)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"{error}\n{error.stderr!r}\n")
            return 1
    print(report.tables(findings))
    if not given.dry:
        report.publish(findings)
    return int(any(outcome is Outcome.MISSED for *_, outcome in findings.verdicts()))


if __name__ == "__main__":
    sys.exit(main())
