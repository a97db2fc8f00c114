"""The tests of servers (`ng_test`, `ng_test_all`): a folder, the Python that has what it requires, pytest.

The environment of a server is the one `ng_run` would start it in: this one when it has everything the server requires,
else one that is built once and kept. Whether an environment comes with what people expect to find in its `data` folder
is checked along with them.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_gym.config.options import validate_options
from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import iter_lines
from nemo_gym.keys import HEAD_SERVER_DEPS_KEY_NAME, RESOURCES_TYPE, SERVER_TYPES
from nemo_gym.launch.plan import environments_folder, find_server_folder, is_bundled, root_of
from nemo_gym.launch.process import package_of
from nemo_gym.launch.requirements import (
    Requirements,
    canonical,
    own_root_for_path,
    read_requirements,
    search_path,
    unmet,
    unmet_package,
    with_compat,
)
from nemo_gym.launch.venvs import COMPLETE_MARK, Installer, Workshop, environment_key, prepare_environment, python_of
from nemo_gym.paths import OWN_PACKAGE_FIRST, PARENT_DIR
from nemo_gym.process_inputs import inherited_environment
from nemo_gym.schemas.cli_config import RunConfig
from nemo_gym.terminal import new_table, print_line, print_table

EXAMPLES = 5
EXIT_NO_TESTS = 5
PYTEST = "pytest"
PYTEST_ASYNCIO = "pytest-asyncio"
_FAILED = (1, 2)
WARNINGS_PASS = ("-W", "default")
"""For pytest: a warning of a library fails no test of a server, whatever version of it is installed."""
_PYTEST_SETTINGS = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")


def example_problems(folder: Path) -> list[str]:
    """What is missing or wrong in the `data` folder of a resources server, each with the command that makes it."""
    data = folder / "data"
    return [*_examples(data), *_metrics(data, folder), *_conflicts(data), *_rollouts(data, folder)]


def _examples(data: Path) -> Iterator[str]:
    path = data / "example.jsonl"
    found = _lines(path)
    if found != EXAMPLES:
        yield f"{path} {_found(found)}: write {EXAMPLES} example rows, one JSON object per line"


def _metrics(data: Path, folder: Path) -> Iterator[str]:
    path = data / "example_metrics.json"
    remedy = (
        f"make it with `ng_prepare_data +mode=example_validation +output_dirpath=results/{folder.name} "
        f'"+config_paths=[resources_servers/{folder.name}/configs/{folder.name}.yaml]"`'
    )
    if not path.is_file():
        yield f"{path} is missing: {remedy}"
        return
    try:
        content: Any = json.loads(path.read_bytes())
    except ValueError:
        content = None
    counted = content.get("Number of examples") if isinstance(content, dict) else None
    if counted != EXAMPLES:
        yield f"{path} counts {counted} examples instead of {EXAMPLES}: delete it and {remedy}"


def _conflicts(data: Path) -> Iterator[str]:
    for path in sorted(data.glob("*conflict*")):
        yield f"{path} says that metrics disagree with their data: settle it and delete the file"


def _rollouts(data: Path, folder: Path) -> Iterator[str]:
    path = data / "example_rollouts.jsonl"
    found = _lines(path)
    if found != EXAMPLES:
        yield (
            f"{path} {_found(found)}: collect them with `ng_e2e_collect_rollouts +split=example "
            f"+output_jsonl_fpath=results/{folder.name}.jsonl` and the configs of the environment and of a model, and "
            "copy the file"
        )


def _lines(path: Path) -> int | None:
    return sum(1 for _ in iter_lines(path)) if path.is_file() else None


def _found(lines: int | None) -> str:
    return "is missing" if lines is None else f"has {lines} lines instead of {EXAMPLES}"


@dataclass(frozen=True)
class ServerModule:
    """A server as its author sees it: a folder."""

    server_type: str
    folder: Path

    @classmethod
    def find(cls, entrypoint: str) -> "ServerModule":
        """The server that a path such as `resources_servers/my_env` names.

        Raises:
            ConfigError: it is not a path of that form, or there is no such folder.
        """
        server_type, _, name = entrypoint.rstrip("/").partition("/")
        if server_type not in SERVER_TYPES or not name:
            by_name = [f"{each}/{entrypoint}" for each in SERVER_TYPES if (PARENT_DIR / each / entrypoint).is_dir()]
            hint = f"; did you mean {by_name[0]!r}?" if by_name and entrypoint.strip("./") else ""
            raise ConfigError(
                f"+entrypoint={entrypoint}: name the folder of a server, <type>/<name>, where the type is one of "
                f"{', '.join(SERVER_TYPES)}{hint}"
            )
        return cls(server_type, find_server_folder(server_type, name).absolute())

    @property
    def entrypoint(self) -> str:
        """As it is named on a command line."""
        return self.folder.relative_to(self.root).as_posix()

    @property
    def root(self) -> Path:
        """The folder that its modules are imported from."""
        return root_of(self.folder, self.server_type)

    @property
    def requirements(self) -> Requirements:
        """What it asks for."""
        return read_requirements(self.folder)

    @cached_property
    def code(self) -> "Code":
        """What its files say about the packages they need."""
        return Code.of(self.folder)

    def environment(self) -> dict[str, str]:
        """The variables of a process that imports it."""
        inherited = inherited_environment()
        own_path = inherited.get("PYTHONPATH", "").split(os.pathsep)
        return {**inherited, "PYTHONPATH": search_path([OWN_PACKAGE_FIRST, self.root, own_root_for_path(), *own_path])}

    def data_problems(self) -> list[str]:
        """What is wrong with its example data; only resources servers have any."""
        return example_problems(self.folder) if self.server_type == RESOURCES_TYPE else []


@dataclass(frozen=True)
class Code:
    """What one can tell from a server's files without running them."""

    packages: frozenset[str]
    """The packages whose modules are imported somewhere."""
    has_async_tests: bool

    @classmethod
    def of(cls, folder: Path) -> "Code":
        """Look at every file that Python can read."""
        packages: set[str] = set()
        has_async_tests = False
        for file in folder.rglob("*.py"):
            if any(part.startswith(".") for part in file.relative_to(folder).parts):
                continue
            try:
                nodes = list(ast.walk(ast.parse(file.read_bytes())))
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue  # pytest will say what is wrong with it
            modules = [name for node in nodes for name in _imported(node)]
            packages |= {canonical(package_of(module)) for module in modules}
            has_async_tests |= any(isinstance(n, ast.AsyncFunctionDef) and n.name.startswith("test") for n in nodes)
        return cls(frozenset(packages), has_async_tests)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


@dataclass(frozen=True)
class ModulePythons:
    """Finds, or builds, the Python of a server."""

    workshop: Workshop
    compat_packages: bool = True

    @classmethod
    def of(cls, global_config: Any, program: str) -> "ModulePythons":
        """One with the settings that `ng_run` has for environments."""
        settings = validate_options(RunConfig, global_config, program)
        pins = tuple(str(pin) for pin in global_config.get(HEAD_SERVER_DEPS_KEY_NAME) or ())
        return cls(
            Workshop(
                folder=environments_folder(global_config, settings),
                installer=Installer.find(settings.python_version, verbose=settings.pip_install_verbose),
                pins=pins,
                variables={"UV_CACHE_DIR": settings.uv_cache_dir} if settings.uv_cache_dir else {},
                timeout_s=settings.environment_timeout_s,
            ),
            settings.compat_packages,
        )

    def present(self, module: ServerModule) -> Path | None:
        """The Python of a server, None when its environment is yet to be built."""
        own = python_of(module.folder / ".venv")
        if own.exists():
            return own
        if not self._is_short_of_something(module):
            return Path(sys.executable)
        environment = self._environment(module)
        return python_of(environment) if (environment / COMPLETE_MARK).is_file() else None

    def get(self, module: ServerModule) -> Path:
        """The Python of a server, its environment built if need be."""
        present = self.present(module)
        return present or prepare_environment(self._with_tools(module), [module.entrypoint], self.workshop)

    def delete(self, module: ServerModule) -> None:
        """Remove the environment that was built for a server; the running one is never touched."""
        if self._is_short_of_something(module):
            shutil.rmtree(self._environment(module), ignore_errors=True)

    def _is_short_of_something(self, module: ServerModule) -> bool:
        """Whether the running environment lacks what the server or its tests need."""
        if unmet(module.requirements):
            return True
        used = {*_tools(module), *(module.code.packages if self._expects_compat(module) else ())}
        return not used.isdisjoint(self._with_tools(module).expected)

    def _with_tools(self, module: ServerModule) -> Requirements:
        """What an environment for the tests of a server gets: the same for many servers, so that they share one."""
        requirements = module.requirements
        if self._expects_compat(module):
            requirements = with_compat(requirements, self.workshop.installer.python_version)
        missing = [tool for tool in _tools(module) if unmet_package(tool) and tool not in requirements.expected]
        return replace(requirements, expected=(*requirements.expected, *missing))

    def _expects_compat(self, module: ServerModule) -> bool:
        return self.compat_packages and not is_bundled(module.server_type, module.folder)

    def _environment(self, module: ServerModule) -> Path:
        return self.workshop.folder / environment_key(self._with_tools(module), self.workshop)


def _tools(module: ServerModule) -> list[str]:
    return [PYTEST, PYTEST_ASYNCIO] if module.code.has_async_tests else [PYTEST]


@dataclass(frozen=True)
class Outcome:
    """How the tests of a server went."""

    module: ServerModule
    exit_code: int
    """Of pytest: 0 passed, 1 or 2 failed, 5 no tests."""
    seconds: float


def run_tests(module: ServerModule, python: Path) -> Outcome:
    """Run pytest in a server's folder; what it prints goes where ours goes.

    Tests that are coroutines need no mark.
    """
    asynchronous = ["-o", "asyncio_mode=auto"] if module.code.has_async_tests else []
    lenient = [] if _has_own_settings(module.folder) else list(WARNINGS_PASS)
    started = time.monotonic()
    sys.stdout.flush()
    done = subprocess.run(
        [python, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", *lenient, *asynchronous, "."],
        cwd=module.folder,
        env=module.environment(),
        check=False,
    )
    return Outcome(module, done.returncode, time.monotonic() - started)


def _has_own_settings(folder: Path) -> bool:
    """Whether a server brings settings of pytest; those of the checkout around it are for nemo_gym's own tests."""
    return any((folder / name).is_file() for name in _PYTEST_SETTINGS)


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
