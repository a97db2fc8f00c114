"""The tests of one server: its folder, the Python that has what it requires, pytest.

The environment of a server is the one `ng_run` would start it in: this one when it has everything the
server requires, else one that is built once and kept.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.cli.environment import COMPLETE_MARK, Workshop, environment_key, prepare_environment
from nemo_gym.cli.installed import unmet
from nemo_gym.cli.installer import Installer, python_of
from nemo_gym.cli.plan import find_server_folder
from nemo_gym.cli.pythons import environments_folder
from nemo_gym.cli.requirements import Requirements, read_requirements
from nemo_gym.cli.search_path import own_root_for_path, search_path
from nemo_gym.cli.validation import validate_options
from nemo_gym.data.example_data import example_problems
from nemo_gym.errors import ConfigError
from nemo_gym.keys import HEAD_SERVER_DEPS_KEY_NAME, RESOURCES_TYPE, SERVER_TYPES
from nemo_gym.schemas.run_config import RunConfig

EXIT_NO_TESTS = 5


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
        parts = Path(entrypoint).parts
        if len(parts) != 2 or parts[0] not in SERVER_TYPES:
            raise ConfigError(
                f"+entrypoint={entrypoint}: name the folder of a server, <type>/<name>, where the type is one of "
                f"{', '.join(SERVER_TYPES)}"
            )
        return cls(parts[0], find_server_folder(*parts).absolute())

    @property
    def entrypoint(self) -> str:
        """As it is named on a command line."""
        return f"{self.server_type}/{self.folder.name}"

    @property
    def requirements(self) -> Requirements:
        """What it asks for."""
        return read_requirements(self.folder)

    def data_problems(self) -> list[str]:
        """What is wrong with its example data; only resources servers have any."""
        return example_problems(self.folder) if self.server_type == RESOURCES_TYPE else []


@dataclass(frozen=True)
class ModulePythons:
    """Finds, or builds, the Python of a server."""

    workshop: Workshop

    @classmethod
    def of(cls, global_config: Any, program: str) -> "ModulePythons":
        """With the settings that `ng_run` has for environments."""
        settings = validate_options(RunConfig, global_config, program)
        pins = tuple(str(pin) for pin in global_config.get(HEAD_SERVER_DEPS_KEY_NAME) or ())
        return cls(
            Workshop(
                folder=environments_folder(global_config, settings),
                installer=Installer.find(settings.python_version, verbose=settings.pip_install_verbose),
                pins=pins,
                variables={"UV_CACHE_DIR": settings.uv_cache_dir} if settings.uv_cache_dir else {},
                timeout_s=settings.environment_timeout_s,
            )
        )

    def present(self, module: ServerModule) -> Path | None:
        """The Python of a server, None when its environment is yet to be built."""
        own = python_of(module.folder / ".venv")
        if own.exists():
            return own
        if not unmet(module.requirements):
            return Path(sys.executable)
        environment = self._environment(module)
        return python_of(environment) if (environment / COMPLETE_MARK).is_file() else None

    def get(self, module: ServerModule) -> Path:
        """The Python of a server, its environment built if need be."""
        present = self.present(module)
        return present or prepare_environment(module.requirements, [module.entrypoint], self.workshop)

    def delete(self, module: ServerModule) -> None:
        """Remove the environment that was built for a server; the running one is never touched."""
        if unmet(module.requirements):
            shutil.rmtree(self._environment(module), ignore_errors=True)

    def _environment(self, module: ServerModule) -> Path:
        return self.workshop.folder / environment_key(module.requirements, self.workshop)


@dataclass(frozen=True)
class Outcome:
    """How the tests of a server went."""

    module: ServerModule
    exit_code: int
    """Of pytest: 0 passed, 1 or 2 failed, 5 no tests."""
    seconds: float


def run_tests(module: ServerModule, python: Path) -> Outcome:
    """Run pytest in a server's folder; what it prints goes where ours goes.

    Raises:
        ConfigError: pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("tests need pytest, which is not installed here: pip install pytest")
    root = module.folder.parents[1]
    own_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": search_path([root, own_root_for_path(), *own_path])}
    started = time.monotonic()
    sys.stdout.flush()
    done = subprocess.run(
        [python, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", "."],
        cwd=module.folder,
        env=environment,
        check=False,
    )
    return Outcome(module, done.returncode, time.monotonic() - started)
