"""PUBLIC: the shell commands that make a server's environment and run in it, for launchers of their own.

Nothing here starts servers that way: `ng_run` uses the running environment where it can, and no shell.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from subprocess import Popen
from typing import Any

from omegaconf import DictConfig

from nemo_gym._version import __version__
from nemo_gym.errors import GymError
from nemo_gym.global_config import maybe_get_global_config_dict
from nemo_gym.keys import (
    HEAD_SERVER_DEPS_KEY_NAME,
    NEMO_GYM_LOG_DIR_KEY_NAME,
    PIP_INSTALL_VERBOSE_KEY_NAME,
    PYTHON_VERSION_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_PIP_SET_PYTHON_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
)
from nemo_gym.paths import PARENT_DIR
from nemo_gym.process_inputs import inherited_environment

__all__ = ["run_command", "setup_env_command"]

_PROJECT, _REQUIREMENTS, _OVERRIDES = "pyproject.toml", "requirements.txt", "overrides.txt"
_WITHOUT_CHECKOUT = "grep -v -F '../..' requirements.txt"


class ServerRequirementsError(GymError, RuntimeError):
    """A server's folder does not say what it needs, or says it twice."""


def setup_env_command(dir_path: Path, global_config_dict: DictConfig, prefix: str) -> str:
    """One line of bash that enters a server's folder, makes its environment, and installs what it requires.

    What is printed on the way begins with `(<prefix>) `.

    Raises:
        RuntimeError: the folder has none of requirements.txt and pyproject.toml, or both.
    """
    folder = Path(dir_path).absolute()
    venv = _venv(folder, global_config_dict)
    enter = f"source {venv}/bin/activate"
    is_there = (venv / "bin/python").exists() and (venv / "bin/activate").exists()
    if global_config_dict.get(SKIP_VENV_IF_PRESENT_KEY_NAME) and is_there:
        return f"cd {folder} && {enter}"
    marked = f" > >(sed 's/^/({prefix}) /') 2> >(sed 's/^/({prefix}) /' >&2)"
    version = global_config_dict[PYTHON_VERSION_KEY_NAME]
    make = f"uv venv --seed --allow-existing --python {version} {venv}{marked}"
    return " && ".join([f"cd {folder}", make, enter, _install(folder, venv, global_config_dict) + marked])


def run_command(command: str, working_dir_path: Path, server_name: str = "") -> "Popen[Any]":
    """Start a line of bash in a folder, which is first on its PYTHONPATH; its output goes where ours goes.

    With `nemo_gym_log_dir` in this process's config, the output is also added to `<server_name>.log` there.
    """
    config: Mapping[Any, Any] = maybe_get_global_config_dict() or {}
    environment = inherited_environment()
    path = [str(Path(working_dir_path).absolute()), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    if cache := config.get(UV_CACHE_DIR_KEY_NAME):
        environment["UV_CACHE_DIR"] = str(cache)
    if log_folder := config.get(NEMO_GYM_LOG_DIR_KEY_NAME):
        Path(log_folder).mkdir(parents=True, exist_ok=True)
        log = Path(log_folder) / f"{server_name.replace('/', '_')}.log"
        command = f"set -o pipefail; {{ {command} ; }} 2>&1 | tee -a {quote(str(log))}"
    return subprocess.Popen(["/bin/bash", "-c", command], env=environment)


def _venv(folder: Path, config: DictConfig) -> Path:
    given = config.get(UV_VENV_DIR_KEY_NAME)
    if not given or Path(given).resolve() == PARENT_DIR.resolve():
        return folder / ".venv"
    return Path(given).absolute() / folder.parent.name / folder.name / ".venv"


def _install(folder: Path, venv: Path, config: DictConfig) -> str:
    has_project, has_list = (folder / _PROJECT).exists(), (folder / _REQUIREMENTS).exists()
    if has_project and has_list:
        raise ServerRequirementsError(f"Found both {_PROJECT} and {_REQUIREMENTS} in {folder}: keep one of them")
    if not has_project and not has_list:
        raise ServerRequirementsError(f"Missing {_PROJECT} or {_REQUIREMENTS} in {folder}")
    verbose = "-v " if config.get(PIP_INSTALL_VERBOSE_KEY_NAME) else ""
    python = f"--python {venv}/bin/python " if config.get(UV_PIP_SET_PYTHON_KEY_NAME) else ""
    install = f"uv pip install {verbose}{python}"
    further = " ".join(config.get(HEAD_SERVER_DEPS_KEY_NAME) or ())
    overrides = f"--override {_OVERRIDES} " if (folder / _OVERRIDES).exists() else ""
    is_checkout = (folder / "../.." / _PROJECT).exists()
    if is_checkout:
        return f"{install}{overrides}-r {_REQUIREMENTS} {further}" if has_list else f"{install}'-e .' {further}"
    own = f"nemo-gym=={__version__}"
    flags = _get_nemo_gym_install_flags()
    if has_list:
        listed = f"(echo '{own}' && {_WITHOUT_CHECKOUT})"
        return f"{listed} | {install}{flags}{overrides}-r /dev/stdin {further}"
    return f"{install}{flags}{own} && {install}--no-sources '-e .' {further}"


def _get_nemo_gym_install_flags() -> str:
    """Options for an installer that fetches nemo-gym from an index."""
    environment = inherited_environment()
    strategy = environment.get("UV_INDEX_STRATEGY")
    flags = []
    if environment.get("NEMO_GYM_ALLOW_PRERELEASE") == "true":
        flags += ["--pre", *([] if strategy else ["--index-strategy unsafe-best-match"]), "'fastapi<1.0'"]
    for option, variable in (("--index-url", "UV_INDEX_URL"), ("--extra-index-url", "UV_EXTRA_INDEX_URL")):
        if value := environment.get(variable):
            flags.append(f"{option} {value}")
    if strategy:
        flags.append(f"--index-strategy {strategy}")
    return "".join(f"{flag} " for flag in flags)
