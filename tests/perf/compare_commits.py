"""Compare the CPU per rollout of two checkouts in turns: `python -m tests.perf.compare_commits BEFORE AFTER`.

Each is a folder of a checkout with a `.venv`, or a revision, which is then checked out and installed in a temporary
folder. Rounds alternate between the two, so that whatever else the machine does falls on both.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import checkouts
from tests.perf.side_by_side import processes
from tests.perf.side_by_side.estimates import Estimate

INSTALL_TIMEOUT_S = 600
ROWS = 5


@dataclass(frozen=True)
class Cpu:
    """CPU per rollout in milliseconds."""

    collector_ms: float
    servers_ms: float

    @property
    def total_ms(self) -> float:
        """CPU of collector and servers together."""
        return self.collector_ms + self.servers_ms


@contextmanager
def checkout_of(name: str) -> Iterator[Path]:
    """Yield the checkout's folder; a revision is installed into a temporary one."""
    if (Path(name) / ".venv/bin/ng_run").exists():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="commit-") as folder:
        root = Path(folder) / "tree"
        git = ["git", "-C", str(checkouts.ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), name], check=True)
        try:
            subprocess.run(["make", "--silent", "install"], cwd=root, check=True, timeout=INSTALL_TIMEOUT_S)
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def children_cpu_s() -> float:
    """Return the CPU seconds of all processes that this one started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def measure(root: Path, rollouts: int, in_flight: int, endpoint_port: int) -> Cpu:
    """Return the CPU per rollout of one checkout, without what starting costs."""
    with tempfile.TemporaryDirectory() as folder:
        config = checkouts.single_tool_call_config(root, endpoint_port)
        with checkouts.servers_of(root, Path(folder), config) as servers:
            family = processes.family(psutil.Process(servers.process.pid))

            def cpu_of(repeats: int) -> tuple[float, float]:
                own, theirs = children_cpu_s(), processes.cpu_s(family)
                options = (f"+num_repeats={repeats}", f"+num_samples_in_parallel={in_flight}")
                output = checkouts.collect(root, Path(folder), servers.head_port, *options)
                if output.read_bytes().count(b"\n") != ROWS * repeats:
                    raise SystemExit(f"{root}: rollouts are missing, so the measurement is worthless")
                return children_cpu_s() - own, processes.cpu_s(family) - theirs

            repeats = rollouts // ROWS
            cpu_of(repeats // 4)  # warms caches
            few, many = cpu_of(repeats // 10), cpu_of(repeats // 10 + repeats)
    collector_ms, servers_ms = (1000 * (b - a) / (ROWS * repeats) for a, b in zip(few, many, strict=True))
    return Cpu(collector_ms, servers_ms)


def main() -> int:
    """Measure both in turns and print the ratio."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.compare_commits", description=__doc__)
    parser.add_argument("before", help="a checkout with a .venv, or a revision")
    parser.add_argument("after", help="the other one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    readings: dict[str, list[Cpu]] = {"before": [], "after": []}
    with ExitStack() as stack:
        roots = {side: stack.enter_context(checkout_of(getattr(options, side))) for side in readings}
        _, endpoint_port = stack.enter_context(processes.helper("endpoint.py"))
        for number in range(options.rounds):
            for side in readings if number % 2 == 0 else reversed(readings):
                cpu = measure(roots[side], options.rollouts, options.in_flight, endpoint_port)
                readings[side].append(cpu)
                print(f"round {number + 1}, {side}: {cpu.total_ms:.3f} ms per rollout", flush=True)
    for part in ("collector_ms", "servers_ms", "total_ms"):
        before, after = (Estimate.of([getattr(cpu, part) for cpu in readings[side]]) for side in readings)
        print(f"{part.removesuffix('_ms'):9} {before} -> {after} ms per rollout, ratio {after.over(before)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
