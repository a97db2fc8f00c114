"""The tests of all servers, one after another, and what came of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym.cli.module_tests import EXIT_NO_TESTS, ModulePythons, Outcome, ServerModule, run_tests
from nemo_gym.keys import SERVER_TYPES
from nemo_gym.paths import PARENT_DIR
from nemo_gym.tables import new_table, print_table
from nemo_gym.terminal import print_line

_FAILED = (1, 2)


@dataclass(frozen=True)
class Modules:
    """The servers below a folder."""

    tested: list[ServerModule]
    without_readme: list[str]


@dataclass
class Report:
    """How all of it went."""

    outcomes: list[Outcome] = field(default_factory=list)
    data_problems: dict[str, list[str]] = field(default_factory=dict)

    def names(self, kind: str) -> list[str]:
        """The servers that passed, failed, have no tests, or whose tests ended in an odd way."""
        return [outcome.module.entrypoint for outcome in self.outcomes if _kind(outcome.exit_code) == kind]

    @property
    def is_good(self) -> bool:
        """Whether every server has tests that pass and data that is complete."""
        return len(self.names("passed")) == len(self.outcomes) and not self.data_problems


def find_modules() -> Modules:
    """The servers of the current folder; when it has none, those of this distribution."""
    for root in (Path.cwd(), PARENT_DIR):
        folders = sorted(
            path
            for server_type in SERVER_TYPES
            for path in (root / server_type).glob("*")
            if path.is_dir() and not path.name.startswith((".", "__"))
        )
        if folders:
            tested = [ServerModule(path.parent.name, path) for path in folders if (path / "README.md").is_file()]
            without = [f"{path.parent.name}/{path.name}" for path in folders if not (path / "README.md").is_file()]
            return Modules(tested, without)
    return Modules([], [])


def run_all(modules: Iterable[ServerModule], pythons: ModulePythons, *, delete_environments: bool) -> Report:
    """Test one server after another."""
    report = Report()
    for module in modules:
        print_line(f"== {module.entrypoint}")
        report.outcomes.append(run_tests(module, pythons.get(module)))
        problems = module.data_problems()
        if problems:
            report.data_problems[module.entrypoint] = problems
        if delete_environments:
            pythons.delete(module)
    return report


def print_report(report: Report) -> None:
    """Print times, counts, and what to run again."""
    table = new_table("Server", "Tests", "Seconds")
    for outcome in sorted(report.outcomes, key=lambda each: -each.seconds):
        table.add_row(outcome.module.entrypoint, _kind(outcome.exit_code), f"{outcome.seconds:.1f}")
    print_table(table)
    total = len(report.outcomes)
    for kind in ("passed", "failed", "missing", "unrecognized"):
        names = report.names(kind)
        share = f" ({100 * len(names) / total:.0f} %)" if total else ""
        print_line(f"{kind}: {len(names)} of {total}{share}{''.join(f' {name}' for name in names if kind != 'passed')}")
    for name, problems in report.data_problems.items():
        print_line("\n- ".join([f"The example data of {name} is not complete:", *problems]))
    for name in dict.fromkeys([*report.names("failed"), *report.names("unrecognized"), *report.data_problems]):
        print_line(f"Again: ng_test +entrypoint={name} +should_validate_data=true")


def _kind(exit_code: int) -> str:
    if exit_code == 0:
        return "passed"
    if exit_code in _FAILED:
        return "failed"
    return "missing" if exit_code == EXIT_NO_TESTS else "unrecognized"
