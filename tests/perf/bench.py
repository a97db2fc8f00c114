"""`python -m tests.perf.bench`, which is `make bench`: every measurement, whatever becomes of those before it.

First the files of `tests/perf`, then floor and product side by side. The last lines say which targets were missed,
which are undecided, and which tests failed; the exit code is 1 if there are any of the first or the last.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.perf.side_by_side.estimates import Outcome

PARTS = {
    "tests/perf": (sys.executable, "-m", "pytest", "-q", "-s", "-rfE", "tests/perf"),
    "side by side": (sys.executable, "-m", "tests.perf.side_by_side"),
}
LONGEST_S = 3600.0
_VERDICT = re.compile(r"^(?!E  )\|? ?(?P<target>.*?)(?::| \|) (?P<outcome>missed|undecided)(?: \|)?$")
_VERDICT_FIRST = re.compile(r"^(?P<outcome>missed|undecided) +(?P<target>.*)$")
_BROKEN = re.compile(r"^(?:FAILED|ERROR) (?P<test>\S+)(?: - (?P<why>.*))?$")


@dataclass
class Results:
    """What the lines of one part say."""

    part: str
    targets: dict[str, Outcome] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Tests that failed, whatever for."""
    exit_code: int = 0

    def read(self, line: str) -> None:
        """Note a verdict, or a test that failed."""
        if found := _BROKEN.match(line):
            self.broken.append(f"{found['test']}: {found['why'] or 'see above'}")
        elif found := _VERDICT.match(line) or _VERDICT_FIRST.match(line):
            self.targets[found["target"].replace(" | ", ": ")] = Outcome(found["outcome"])

    def of(self, outcome: Outcome) -> list[str]:
        """The targets that came to this."""
        return [target for target, each in self.targets.items() if each is outcome]


def measured(part: str, command: Sequence[str]) -> Results:
    """Run a part, pass on what it prints, and note what it found."""
    results = Results(part)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watchdog = threading.Timer(LONGEST_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            results.read(line.rstrip("\n"))
        results.exit_code = process.wait()
        watchdog.cancel()
    return results


def last_lines(found: Sequence[Results]) -> list[str]:
    """What a person, or a program that looks at the end only, has to know."""
    lines = []
    for results in found:
        for outcome in (Outcome.UNDECIDED, Outcome.MISSED):
            lines += [f"{outcome}: {target}" for target in results.of(outcome)]
    for results in found:
        lines += [f"failed: {test}" for test in results.broken]
        if results.exit_code and not results.broken and not results.of(Outcome.MISSED):
            lines.append(f"failed: {results.part} ended with exit code {results.exit_code}")
    if not any(results.exit_code for results in found):
        lines.append("No target was missed.")
    return lines


def main(parts: Mapping[str, Sequence[str]] | None = None) -> int:
    """Measure all parts; 1 if a target was missed or a measurement could not be made."""
    found = [measured(part, command) for part, command in (parts or PARTS).items()]
    print("", *last_lines(found), sep="\n", flush=True)
    return int(any(results.exit_code for results in found))


if __name__ == "__main__":
    sys.exit(main())
