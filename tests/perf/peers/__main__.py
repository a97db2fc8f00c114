"""`python -m tests.perf.peers`: play the same tasks with us and with others, in turn; print, write docs/performance*.

It needs Linux, and the environments that `make bench-peers` makes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.perf.peers import report
from tests.perf.peers.contenders import CONTENDERS, Contender
from tests.perf.peers.findings import Findings, Round
from tests.perf.peers.meter import Usage
from tests.perf.peers.tasks import ROOT, TASKS, Task
from tests.perf.side_by_side import processes

ROUNDS = 3
TIMEOUT_S = 300.0


class CannedModel:
    """An endpoint that plays a task while its block lasts; then it knows how often and how long it was called."""

    def __init__(self, task: Task) -> None:
        self.calls, self.seconds = 0, 0.0
        self._command = [sys.executable, "-m", "tests.perf.peers.endpoint", task.name]

    def __enter__(self) -> "CannedModel":
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.base_url = f"http://127.0.0.1:{int(self._process.stdout.readline())}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        said = self._process.communicate(timeout=processes.START_TIMEOUT_S)[0]
        calls, seconds = said.split()
        self.calls, self.seconds = int(calls), float(seconds)


def run(contender: Contender, task: Task, rollouts: int, parent: Path) -> tuple[Usage, float]:
    """One run, and the seconds from its first model call to its last.

    It is an error if not every rollout was played as meant, scored as right and written.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{contender.name}-", dir=parent))
    with CannedModel(task) as model:
        command = contender.command(task, rollouts, model.base_url, folder)
        used = Usage.of(command, folder, contender.results, TIMEOUT_S, env=contender.environment())
    found = (model.calls, *contender.scored(folder))
    if found != (rollouts * task.model_calls, rollouts, 1.0):
        raise RuntimeError(
            f"{contender.name}, {rollouts} rollouts of {task.name}: {found[0]} model calls, {found[1]} results, "
            f"mean reward {found[2]}: that was not the same work, the figures are worthless"
        )
    return used, model.seconds


def measure(contenders: Sequence[Contender], rounds: int, scale: float, folder: Path) -> Iterator[Findings]:
    """Everybody in turn, as often as asked; after each round, what is found so far."""
    rollouts = {one.name: max(2, int(one.rollouts * scale)) for one in contenders}
    findings = Findings(
        versions={one.name: one.version() for one in contenders},
        rollouts=rollouts,
        in_flight={one.name: min(one.in_flight, rollouts[one.name]) for one in contenders},
        cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
    )
    for contender in contenders:  # what is compiled, cached or installed at the first start
        run(contender, TASKS["single_tool_call"], 1, folder)
    began_s, stolen_s = time.monotonic(), processes.stolen_s()
    for number in range(rounds):
        for contender in contenders:
            one, _ = run(contender, TASKS["single_tool_call"], 1, folder)
            for task in TASKS.values():
                many, calling_s = run(contender, task, rollouts[contender.name], folder)
                found = Round(rollouts[contender.name], calling_s, one, many)
                findings.add(task.name, contender.name, found)
                print(
                    f"round {number + 1}, {task.name}, {findings.versions[contender.name]} ({contender.name}): "
                    f"{found.cpu_ms:.2f} CPU ms, {found.per_s:.1f}/s, {found.many.peak_mb:.0f} MB, "
                    f"first after {one.first_result_s:.2f} s",
                    flush=True,
                )
        cores_s = (time.monotonic() - began_s) * findings.cores
        findings.stolen_share = (processes.stolen_s() - stolen_s) / cores_s
        yield findings


def main() -> int:
    """Measure, show, publish: after every round, so that a run that is broken off keeps its whole rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="rollouts per measurement, as a multiple")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dry", action="store_true", help="do not write docs/performance*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nemo_gym_peers_") as folder:
        for findings in measure(CONTENDERS, given.rounds, given.scale, Path(folder)):
            print(report.tables(findings), flush=True)
            if not given.dry:
                report.publish(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
