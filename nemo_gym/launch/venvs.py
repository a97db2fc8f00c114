"""A virtual environment for servers whose requirements the running one does not satisfy.

Environments are shared: one per content of requirements, Python version and pinned packages, built
once, marked when complete, and used by every later run. Without the mark nothing is trusted.

nemo-gym is never installed into them. A server in such an environment runs with the nemo-gym that
started it, and with that one's dependencies: a `.pth` file adds the running environment's
site-packages *after* the new environment's own, so that what the server asked for wins and
everything else is found. (`venv --system-site-packages` would not do: started from inside a virtual
environment it adds the site-packages of the Python below it.) What nemo-gym requires is given to the
installer as constraints, so that a server cannot get a version we do not work with.

With another Python the running environment's packages are of no use; then nemo-gym's dependencies
are installed too.

They are made with `uv` where there is one, else with `venv` and `pip`.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import platform
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from nemo_gym.errors import EnvironmentBuildError
from nemo_gym.keys import PYTHON_VERSION_KEY_NAME
from nemo_gym.launch.process import ChildProcess, CommandLine
from nemo_gym.launch.requirements import (
    PROJECT_FILES,
    Line,
    Requirements,
    is_python_allowed,
    is_running_python,
    own_root_for_path,
    running_site_packages,
    unmet_package,
)
from nemo_gym.launch.warden import Warden
from nemo_gym.paths import OWN_NAME, PARENT_DIR
from nemo_gym.process_inputs import inherited_environment

logger = logging.getLogger(__name__)

COMPLETE_MARK = ".nemo_gym_complete"
_FORMAT = "1"
_SHOWN_LINES = 20
_LOOK_EVERY_S = 0.1
_NOT_CONTENT = {"build", "dist", "__pycache__"}
_OWN_PACKAGES = ("nemo_gym", "resources_servers", "responses_api_agents", "responses_api_models", "benchmarks")


def python_of(environment: Path) -> Path:
    """The interpreter of an environment."""
    return environment / "bin" / "python"


@dataclass(frozen=True)
class Installer:
    """Spells the commands of one installer."""

    uv: str | None
    """The program, or None to use venv and pip."""
    python_version: str | None = None
    """The Python that environments get; None for the running one."""
    verbose: bool = False

    @classmethod
    def find(cls, python_version: str | None = None, *, verbose: bool = False) -> "Installer":
        """The installer of this machine."""
        return cls(shutil.which("uv"), python_version, verbose)

    def create(self, environment: Path) -> list[str]:
        """The command that makes an empty environment."""
        if self.uv:
            python = sys.executable if is_running_python(self.python_version) else str(self.python_version)
            return [self.uv, "venv", "--quiet", "--python", python, str(environment)]
        # The running environment's pip, if it has one, serves the new one too; copying one takes seconds.
        lends_pip = is_running_python(self.python_version) and importlib.util.find_spec("pip") is not None
        return [self._find_python(), "-m", "venv", *(["--without-pip"] if lends_pip else []), str(environment)]

    def install(
        self, environment: Path, requirements: Path, constraints: Path, overrides: Path | None = None
    ) -> list[list[str]]:
        """The commands that install the lines of a requirements file; `overrides` decides about the packages it names.

        pip knows no overrides: there these packages are put in place afterwards.
        """
        install = [*self._install(environment), "-r", str(requirements), "-c", str(constraints)]
        if overrides is None:
            return [install]
        if self.uv:
            return [[*install, "--override", str(overrides)]]
        return [install, [*self._install(environment), "--no-deps", "-r", str(overrides)]]

    def install_project(self, environment: Path, project: Path) -> list[str]:
        """The command that installs the server's own project, whose dependencies are there already."""
        return [*self._install(environment), "--no-deps", "-e", str(project)]

    def _install(self, environment: Path) -> list[str]:
        verbose = ["-v"] if self.verbose else []
        python = str(python_of(environment))
        if self.uv:
            return [self.uv, "pip", "install", *verbose, "--python", python]
        return [python, "-m", "pip", "install", *verbose, "--disable-pip-version-check", "--no-input"]

    def _find_python(self) -> str:
        if is_running_python(self.python_version):
            return sys.executable
        version = str(self.python_version)
        program = f"python{'.'.join(version.split('.')[:2])}"
        found = shutil.which(program)
        if found is None:
            raise EnvironmentBuildError(
                f"{PYTHON_VERSION_KEY_NAME} is {version}, this is Python {platform.python_version()} and there is "
                f"neither {program} nor uv, which could fetch it; install one of them, or do not set "
                f"{PYTHON_VERSION_KEY_NAME}"
            )
        return found


@dataclass(frozen=True)
class Workshop:
    """Where environments are kept, and with what they are made."""

    folder: Path
    installer: Installer
    pins: tuple[str, ...] = ()
    """Packages that must have the same version in every process (`head_server_deps`)."""
    variables: dict[str, str] = field(default_factory=dict)
    """Added to the installer's environment."""
    timeout_s: float = 3600.0
    warden: Warden | None = None
    should_stop: Callable[[], bool] = lambda: False
    """Asked now and then; True gives up with `KeyboardInterrupt`."""


def environment_key(requirements: Requirements, workshop: Workshop) -> str:
    """Names the environment for these requirements: equal content, equal name."""
    content = [
        _FORMAT,
        requirements.for_installer(),
        str(requirements.project or ""),
        workshop.installer.python_version or platform.python_version(),
        sys.prefix,
        *sorted(workshop.pins),
        *(fingerprint(line) for line in requirements.lines),
        *requirements.expected,
        requirements.overrides.read_text(encoding="utf-8") if requirements.overrides else "",
    ]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]


def fingerprint(line: Line) -> str:
    """Changes when the files that a line names change in a way that asks for another installation."""
    path = line.path
    if path is None:
        return ""
    if line.text.startswith("-e "):  # its code is used where it is; only what it asks for is installed
        files = [file for name in PROJECT_FILES if (file := path / name).is_file()]
    else:
        files = [path] if path.is_file() else sorted(_files_below(path))
    stats = ((file.relative_to(path), file.lstat()) for file in files)
    return "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def prepare_environment(requirements: Requirements, servers: Sequence[str], workshop: Workshop) -> Path:
    """The interpreter of a complete environment with these requirements, built now if there is none.

    Raises:
        EnvironmentBuildError: naming the servers, the file and what the installer said.
    """
    environment = workshop.folder / environment_key(requirements, workshop)
    if not _is_complete(environment):
        workshop.folder.mkdir(parents=True, exist_ok=True)
        with _locked(environment.with_name(environment.name + ".lock"), workshop):
            if not _is_complete(environment):
                _build(environment, requirements, servers, workshop)
    return python_of(environment)


def _is_complete(environment: Path) -> bool:
    return (environment / COMPLETE_MARK).is_file() and python_of(environment).exists()


@contextlib.contextmanager
def _locked(path: Path, workshop: Workshop) -> Iterator[None]:
    """Hold a lock between processes, so that an environment is built once."""
    deadline = time.monotonic() + workshop.timeout_s
    with path.open("a") as file:
        is_told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise EnvironmentBuildError(f"{path} stays locked; is another run stuck installing?") from error
            if not is_told:
                logger.info("waiting for another process that installs the same requirements (%s)", path)
                is_told = True
            if workshop.should_stop():
                raise KeyboardInterrupt
            time.sleep(_LOOK_EVERY_S)
        yield


def _build(environment: Path, requirements: Requirements, servers: Sequence[str], workshop: Workshop) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    logger.info(
        "installing the requirements of %s (%s)%s into %s",
        ", ".join(servers),
        requirements.file,
        _words_for_expected(requirements),
        environment,
    )
    started = time.monotonic()
    try:
        _run(workshop.installer.create(environment), requirements, servers, workshop)
        _add_running_packages(environment, workshop)
        wanted, constraints = _write_lists(environment, requirements, workshop)
        if wanted.read_text():
            for step in workshop.installer.install(environment, wanted, constraints, requirements.overrides):
                _run(step, requirements, servers, workshop)
        is_allowed = is_python_allowed(requirements.requires_python, workshop.installer.python_version)
        if requirements.project is not None and is_allowed:  # installers refuse it otherwise; it runs from its folder
            _run(workshop.installer.install_project(environment, requirements.project), requirements, servers, workshop)
    except BaseException:
        shutil.rmtree(environment, ignore_errors=True)
        raise
    built = {
        "requirements": requirements.for_installer(),
        "python": workshop.installer.python_version,
        "for": [*servers],
    }
    (environment / COMPLETE_MARK).write_text(json.dumps(built))
    logger.info("installed the requirements of %s in %.1f s", ", ".join(servers), time.monotonic() - started)


def _words_for_expected(requirements: Requirements) -> str:
    if not requirements.expected:
        return ""
    return (
        f" and what servers written elsewhere may use without listing it ({', '.join(requirements.expected)}; "
        "left out with +compat_packages=false)"
    )


def _remedy_for_expected(requirements: Requirements) -> str:
    return (
        f", or leave out {', '.join(requirements.expected)} with +compat_packages=false"
        if requirements.expected
        else ""
    )


def _run(command: list[str], requirements: Requirements, servers: Sequence[str], workshop: Workshop) -> None:
    """Run one step of the installer."""
    said: deque[str] = deque(maxlen=_SHOWN_LINES)

    def take_line(raw: bytes) -> None:
        said.append(raw.decode(errors="replace").rstrip())
        logger.log(logging.INFO if workshop.installer.verbose else logging.DEBUG, "(%s) %s", servers[0], said[-1])

    line = CommandLine(command, workshop.folder, {**inherited_environment(), **workshop.variables})
    try:
        child = ChildProcess(line, take_line, workshop.warden)
    except OSError as error:
        raise EnvironmentBuildError(f"cannot run {command[0]}: {error.strerror}") from error
    code = _wait(child, workshop)
    if code != 0:
        ending = f"did not finish within {workshop.timeout_s:g} s" if code is None else f"failed with exit code {code}"
        output = "".join(f"\n  | {text}" for text in said)
        raise EnvironmentBuildError(
            f"The requirements of {', '.join(map(repr, servers))} cannot be installed; correct {requirements.file}"
            f"{_remedy_for_expected(requirements)}. "
            f"`{' '.join(command)}` {ending}:{output}"
        )


def _wait(child: ChildProcess, workshop: Workshop) -> int | None:
    deadline = time.monotonic() + workshop.timeout_s
    try:
        while time.monotonic() < deadline:
            code = child.wait(_LOOK_EVERY_S)
            if code is not None:
                return code
            if workshop.should_stop():
                raise KeyboardInterrupt
        return None
    finally:
        child.kill()


def _add_running_packages(environment: Path, workshop: Workshop) -> None:
    """Let the environment find nemo-gym and, when it has the same Python, everything installed here."""
    if is_running_python(workshop.installer.python_version):
        lines = [f"import site; site.addsitedir({str(path)!r})" for path in running_site_packages()]
    elif own_root_for_path() is None:
        lines = [str(_link_own_packages(environment / "nemo_gym_root"))]
    else:
        return
    for packages in environment.glob("lib/python*/site-packages"):
        (packages / "zz_nemo_gym.pth").write_text("".join(f"{line}\n" for line in lines))


def _link_own_packages(folder: Path) -> Path:
    """A folder with nothing but our packages, for when they lie among the packages of another Python."""
    folder.mkdir()
    for name in _OWN_PACKAGES:
        if (PARENT_DIR / name).is_dir():
            (folder / name).symlink_to(PARENT_DIR / name)
    return folder


def _write_lists(environment: Path, requirements: Requirements, workshop: Workshop) -> tuple[Path, Path]:
    """What to install, and what limits it."""
    own = own_dependencies()
    is_same_python = is_running_python(workshop.installer.python_version)
    met_pins = [pin for pin in workshop.pins if is_same_python and not unmet_package(pin)]
    more = [pin for pin in workshop.pins if pin not in met_pins] + ([] if is_same_python else own)
    wanted, constraints = environment / "requirements.txt", environment / "constraints.txt"
    more += requirements.expected
    wanted.write_text(requirements.for_installer() + "".join(f"{line}\n" for line in more))
    constraints.write_text("".join(f"{line}\n" for line in without_extras([*own, *met_pins])))
    return wanted, constraints


def own_dependencies() -> list[str]:
    """What nemo-gym itself requires, without its extras."""
    try:
        return [line for line in requires(OWN_NAME) or () if "extra ==" not in line]
    except PackageNotFoundError:
        return []


def without_extras(lines: Iterable[str]) -> list[str]:
    """Requirement lines as constraints, which may not name extras."""
    constraints = []
    for line in lines:
        requirement = Requirement(line)
        requirement.extras = set()
        constraints.append(str(requirement))
    return constraints


def _files_below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(".") or path.name in _NOT_CONTENT or path.suffix == ".egg-info":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        else:
            yield path
