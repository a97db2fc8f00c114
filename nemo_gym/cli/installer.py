"""The commands that make an environment and install into it: `uv` where there is one, else `venv` and `pip`."""

import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from nemo_gym.cli.launch_errors import EnvironmentBuildError
from nemo_gym.keys import PYTHON_VERSION_KEY_NAME


def python_of(environment: Path) -> Path:
    """The interpreter of an environment."""
    return environment / "bin" / "python"


def is_running_python(version: str | None) -> bool:
    """Whether this interpreter is the one a version such as `3.12` or `3.12.4` asks for."""
    return not version or f"{platform.python_version()}.".startswith(f"{version}.")


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
        """Make an empty environment."""
        if self.uv:
            python = sys.executable if is_running_python(self.python_version) else str(self.python_version)
            return [self.uv, "venv", "--quiet", "--python", python, str(environment)]
        # The running environment's pip, if it has one, serves the new one too; copying one takes seconds.
        lends_pip = is_running_python(self.python_version) and importlib.util.find_spec("pip") is not None
        return [self._find_python(), "-m", "venv", *(["--without-pip"] if lends_pip else []), str(environment)]

    def install(self, environment: Path, requirements: Path, constraints: Path) -> list[str]:
        """Install the lines of a requirements file."""
        return [*self._install(environment), "-r", str(requirements), "-c", str(constraints)]

    def install_project(self, environment: Path, project: Path) -> list[str]:
        """Install the server's own project, whose dependencies are there already."""
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
