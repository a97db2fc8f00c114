"""Collect rollouts under a tracer and print the code that runs about once per rollout, in order.

Real servers and a real collector run in processes of their own, with a canned model endpoint behind them. What
runs once at the start is no part of a rollout, so counts of two runs of different length are subtracted.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests import checkouts
from tests.perf.side_by_side import processes

OUR_FOLDERS = ("nemo_gym", "responses_api_agents", "responses_api_models", "resources_servers")
OFTEN_ENOUGH = 0.5
"""Calls per rollout from which a function counts as part of it; rarer ones belong to timers."""
LONGEST_WAIT_S = 120.0


class Function(NamedTuple):
    """A function of this project, by its place in the source."""

    file: str
    line: int
    name: str


@dataclass
class Counts:
    """What one side (host or collector) ran, per rollout once two of them are subtracted."""

    calls: dict[Function, float] = field(default_factory=dict)
    lines: dict[tuple[str, int], float] = field(default_factory=dict)
    order: list[Function] = field(default_factory=list)
    switches: float = 0.0

    @classmethod
    def read(cls, paths: list[Path]) -> "Counts":
        """Return the counts of all these processes together."""
        total = cls(defaultdict(float), defaultdict(float))
        for path in paths:
            counts = json.loads(path.read_bytes())
            for file, line, name, count in counts["calls"]:
                total.calls[Function(file, line, name)] += count
            for file, line, count in counts["lines"]:
                total.lines[file, line] += count
            total.order += [Function(*each) for each in counts["order"]]
            total.switches += counts["switches"]
        return total

    def per_rollout(self, earlier: "Counts", rollouts: int) -> "Counts":
        """Return what each of the rollouts since `earlier` ran, without what runs only now and then."""

        def grown(now: Mapping[Any, float], before: Mapping[Any, float]) -> dict[Any, float]:
            each = {key: (count - before.get(key, 0)) / rollouts for key, count in now.items()}
            return {key: count for key, count in each.items() if count >= OFTEN_ENOUGH}

        return Counts(
            grown(self.calls, earlier.calls),
            grown(self.lines, earlier.lines),
            switches=(self.switches - earlier.switches) / rollouts,
        )


class Walk:
    """Traced processes of one checkout, and the folder they write their counts into."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        injected = Path(__file__).parent / "injected"
        self.environment = {
            "NEMO_GYM_WALK_FOLDER": str(folder),
            "NEMO_GYM_WALK_TRACED": os.pathsep.join(f"{root / each}{os.sep}" for each in OUR_FOLDERS),
            "PYTHONPATH": os.pathsep.join([str(injected), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def collect(self, head_port: int, rollouts: int) -> Counts:
        """Collect so many rollouts one after the other; return what the collector ran."""
        before = set(self.folder.glob("end-*.json"))
        options = ("+limit=1", f"+num_repeats={rollouts}", "+num_samples_in_parallel=1")
        checkouts.collect(self.root, self.folder, head_port, *options, environment=self.environment)
        return Counts.read(sorted(set(self.folder.glob("end-*.json")) - before))

    def host(self, label: str) -> Counts:
        """Return what the host process has run so far."""
        (self.folder / f"ask-{label}").touch()
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not (answers := self._answers_of_hosts(label)):
            if time.monotonic() > deadline:
                raise SystemExit(f"the host process wrote no counts within {LONGEST_WAIT_S:.0f} s")
            time.sleep(0.05)
        return Counts.read(answers)

    def _answers_of_hosts(self, label: str) -> list[Path]:
        return [path for path in self.folder.glob(f"{label}-*.json") if b"host.py" in path.read_bytes()[:500]]


def walk(root: Path, rollouts: int) -> dict[str, Counts]:
    """Return what host and collector run per rollout, in the order of a first rollout."""
    with tempfile.TemporaryDirectory() as folder, processes.helper("endpoint.py") as (_, endpoint_port):
        walked = Walk(root, Path(folder))
        config = checkouts.single_tool_call_config(root, endpoint_port)
        with checkouts.servers_of(root, Path(folder), config, walked.environment) as servers:
            walked.collect(servers.head_port, 2)
            walked.host("warm")
            short = walked.collect(servers.head_port, 1)
            before = walked.host("before")
            long = walked.collect(servers.head_port, 1 + rollouts)
            after = walked.host("after")
    found = {
        "host": after.per_rollout(before, 1 + rollouts),
        "collector": long.per_rollout(short, rollouts),
    }
    for counts, order in ((found["host"], before.order), (found["collector"], short.order)):
        position = {function: number for number, function in reversed(list(enumerate(order)))}
        counts.order = sorted(counts.calls, key=lambda function: position.get(function, len(position)))
    return found


def modules_of(counts: Counts) -> dict[str, list[Function]]:
    """Return the functions by module, in the order in which a rollout comes to them."""
    modules: dict[str, list[Function]] = {}
    for function in counts.order:
        modules.setdefault(function.file, []).append(function)
    return modules


def total_lines(files: set[str]) -> int:
    """Return how many lines these files have together."""
    return sum(len(Path(file).read_bytes().splitlines()) for file in files)


def figures(found: Mapping[str, Counts]) -> dict[str, Any]:
    """Return the figures of both sides and of all together."""
    sides = {side: set(modules_of(counts)) for side, counts in found.items()}
    sides["together"] = set().union(*sides.values())
    sides["together without the model server's own"] = {
        file for file in sides["together"] if "/responses_api_models/" not in file
    }
    return {
        side: {
            "modules": len(files),
            "lines of these files": total_lines(files),
            "functions": len({f for counts in found.values() for f in counts.calls if f.file in files})
            if side not in found
            else len(found[side].calls),
            "lines run": len(found[side].lines) if side in found else None,
            "switches between modules": round(found[side].switches) if side in found else None,
        }
        for side, files in sides.items()
    }


def show(root: Path, found: Mapping[str, Counts], with_lines: bool) -> None:
    """Print every module and function in order, and the figures at the end."""
    for side, counts in found.items():
        print(f"\n== {side}, in the order of a first rollout")
        for file, functions in modules_of(counts).items():
            print(f"\n{Path(file).relative_to(root)}")
            source = Path(file).read_text().splitlines()
            for function in functions:
                print(f"  {counts.calls[function]:6.1f} x  {function.name}  (line {function.line})")
            if with_lines:
                for line in sorted(line for place, line in counts.lines if place == file):
                    print(f"           {line:4}  {source[line - 1]}")
    print()
    for side, values in figures(found).items():
        print(f"{side}: " + ", ".join(f"{value:,} {name}" for name, value in values.items() if value is not None))


def main() -> int:
    """Walk and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.walk", description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=checkouts.ROOT, help="a checkout with its own .venv (default: this one)"
    )
    parser.add_argument("--rollouts", type=int, default=20, help="rollouts that are counted (default: 20)")
    parser.add_argument("--lines", action="store_true", help="print the lines that run, too")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    root = options.root.resolve()
    found = walk(root, options.rollouts)
    if options.json:
        modules = {
            side: [str(Path(file).relative_to(root)) for file in modules_of(counts)] for side, counts in found.items()
        }
        print(json.dumps({"figures": figures(found), "modules": modules}, indent=2))
    else:
        show(root, found, options.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
