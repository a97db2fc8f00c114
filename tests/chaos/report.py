"""What was measured: a line as each thing ends, one JSON object, and the tables of docs/reliability.md."""

import os
import platform
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from nemo_gym.paths import PARENT_DIR
from tests.chaos.ledger import Tally

PAGE = PARENT_DIR / "docs" / "reliability.md"
BEGIN, END = "<!-- measured by `make chaos` -->", "<!-- end of what `make chaos` measured -->"
_NAME_WIDTH = 62


class Row(Protocol):
    """A line of one of the tables."""

    @property
    def is_good(self) -> bool:
        """Whether the promise held."""

    def line(self) -> str:
        """For the terminal."""

    def cells(self) -> list[str]:
        """For the page."""


@dataclass
class ScenarioRow:
    """A fault and what became of the rollouts."""

    name: str
    tally: Tally
    took_s: float = 0.0
    skipped: str = ""

    @property
    def is_good(self) -> bool:
        """All found, none twice, none wrong."""
        return bool(self.skipped) or self.tally.is_good

    def line(self) -> str:
        """Numbers in columns; problems in full."""
        it = self.tally
        if self.skipped:
            return f"skip {self.name:<{_NAME_WIDTH}} {self.skipped}"
        numbers = f"{it.injected:>8} {it.expected:>8} {it.found:>6} {it.duplicated:>7} {it.lost:>5} {it.wrong:>5}"
        mark = "ok  " if self.is_good else "FAIL"
        problems = "".join(f"\n     {problem}" for problem in it.problems)
        return (
            f"{mark} {self.name:<{_NAME_WIDTH}} {numbers} {it.longest_wait_s:>6.1f} s {self.took_s:>6.1f} s{problems}"
        )

    def cells(self) -> list[str]:
        """The same without the time it took."""
        if self.skipped:
            return [self.name, f"skipped: {self.skipped}", "", "", "", "", ""]
        it = self.tally
        numbers = (it.injected, it.expected, it.found, it.duplicated, it.lost, it.wrong)
        return [self.name, *map(str, numbers), f"{it.longest_wait_s:.1f} s"]


_TABLES = {
    "ScenarioRow": (
        "Faults",
        ["fault", "injected", "expected", "found", "duplicated", "lost", "scored wrongly", "longest wait"],
    ),
    "HangRow": ("Never hangs", ["component", "is", "command", "ended after", "bound", "exit code", "says"]),
    "LoadRow": ("Load", ["what", "measured", "bound"]),
    "HonestyRow": ("Honesty", ["what", "measured", "bound"]),
    "AttackRow": ("Attacks", ["attack", "tried", "survived"]),
}


@dataclass
class Report:
    """Everything, as it comes in."""

    seed: int
    is_short: bool
    rows: list[Row] = field(default_factory=list)
    took_s: float = 0.0
    cpu_s: float = 0.0
    """Of all processes: what it would take on one core that nobody else uses."""

    def print_head(self) -> None:
        """The names of the columns."""
        names = f"{'injected':>8} {'expected':>8} {'found':>6} {'doubled':>7} {'lost':>5} {'wrong':>5}"
        print(f"     {'fault':<{_NAME_WIDTH}} {names} {'wait':>8} {'took':>8}", flush=True)

    def add(self, row: Row) -> None:
        """Take down a row and show it."""
        self.rows.append(row)
        print(row.line(), flush=True)

    @property
    def is_good(self) -> bool:
        """Whether every promise held."""
        return bool(self.rows) and all(row.is_good for row in self.rows)

    def closing_line(self) -> str:
        """All of it in one line."""
        bad = sum(not row.is_good for row in self.rows)
        kept = "every promise held" if self.is_good else f"{bad} of {len(self.rows)} FAILED"
        return f"{kept}: {self._totals()}, {self.took_s:.0f} s ({self.cpu_s:.0f} s of CPU time), seed {self.seed}"

    def _totals(self) -> str:
        tallies = [row.tally for row in self.rows if isinstance(row, ScenarioRow)]
        injected, expected, found = (
            sum(getattr(it, name) for it in tallies) for name in ("injected", "expected", "found")
        )
        return f"{injected:,} faults injected, {expected:,} rollouts expected, {found:,} found"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        rows = [{"table": type(row).__name__, "is_good": row.is_good, **asdict(row)} for row in self.rows]  # type: ignore[call-overload]
        return {"seed": self.seed, "short": self.is_short, "took_s": self.took_s, "cpu_s": self.cpu_s, "rows": rows}

    def as_markdown(self) -> str:
        """The tables of the page."""
        machine = (
            f"{os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"
        )
        parts = [
            f"Seed {self.seed}; {self.took_s:.0f} s, {self.cpu_s:.0f} s of CPU time ({machine}); {self._totals()}."
        ]
        for kind, (title, columns) in _TABLES.items():
            rows = sorted(row.cells() for row in self.rows if type(row).__name__ == kind)
            if rows:
                lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]
                parts += [f"### {title}", "\n".join(lines)]
        return "\n\n".join(parts)


def write_docs(report: Report) -> None:
    """Put the tables where the page has room for them."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{report.as_markdown()}\n\n{END}{after}")
