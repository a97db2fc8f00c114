"""What this process was started with: the one place below the commands that reads the environment and the arguments.

Commands, and the programs that child processes run, read both for themselves and hand values down. Programs that call
this library, and launchers that are not ours, have no command to do that for them: what they may say by environment
variables is listed here, each in a function that reads it when it is asked.

Which server the running code belongs to is one of these where a server is alone in its process; of servers that are
hosted together each is named by a context variable.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from struct import Struct

from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    MAX_ROLLOUT_ATTEMPTS_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME,
    NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME,
    NEMO_GYM_PARENT_PID_ENV_VAR_NAME,
    NEMO_GYM_RUN_ID_ENV_VAR_NAME,
    NUM_WORKERS_ENV_VAR_NAME,
)

HOSTS, HOSTS_AT = Struct("<q"), 8
"""How many host processes there are, and where in their common book that is written."""
RUNNING_INSTANCE: ContextVar[str | None] = ContextVar("nemo_gym_instance_name", default=None)
"""The server that the running code belongs to, in a process that hosts several."""


def command_line() -> list[str]:
    """The program and its arguments, for `parse` without arguments of its own and for the record of a run."""
    return list(sys.argv)


def inherited_environment() -> dict[str, str]:
    """A copy of every variable: what a child process begins with, and where a launcher leaves the config."""
    return dict(os.environ)


def extra_roots() -> list[str]:
    """The folders in `NEMO_GYM_EXTRA_ROOTS`, in which relative paths are looked for first."""
    text = os.environ.get(NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME, "")
    return [entry for entry in text.split(os.pathsep) if entry.strip()]


def max_rollout_attempts() -> str:
    """The attempt cap in `NEMO_GYM_MAX_ROLLOUT_ATTEMPTS`, as it is written there; empty when it is not set."""
    return os.environ.get(MAX_ROLLOUT_ATTEMPTS_ENV_VAR_NAME, "").strip()


def instance_name() -> str | None:
    """The server instance that a launcher said this process is."""
    return os.environ.get(NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME) or None


def num_workers() -> int:
    """How many worker processes serve this server, in this replica of it."""
    return int(os.environ.get(NUM_WORKERS_ENV_VAR_NAME) or 1)


def num_replicas() -> int:
    """How many replicas of this process's servers there are now: a launcher may add some."""
    return max(int(os.environ.get(NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME) or 1), _hosts_told(config_file()))


def _hosts_told(config: Path | None) -> int:
    if config is None:
        return 0
    try:
        with common_book(config).open("rb", buffering=0) as file:
            file.seek(HOSTS_AT)
            return int.from_bytes(file.read(HOSTS.size), "little")
    except OSError:
        return 0


def config_file() -> Path | None:
    """The file by which a launcher handed the config to this process, if it did."""
    name = os.environ.get(NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME)
    return Path(name) if name else None


def common_book(config: Path) -> Path:
    """The file in which the processes that were handed this config keep what they have in common."""
    return config.with_suffix(".pace")


def run_id() -> str | None:
    """The run that this process belongs to, if a launcher named one."""
    return os.environ.get(NEMO_GYM_RUN_ID_ENV_VAR_NAME) or None


def launcher_pid() -> int | None:
    """The process whose end this one is not to survive, if a launcher named one."""
    return int(os.environ.get(NEMO_GYM_PARENT_PID_ENV_VAR_NAME) or 0) or None


def hub_address() -> str | None:
    """The hub in `HF_ENDPOINT`, the variable by which its own tools are told."""
    return os.environ.get("HF_ENDPOINT")


def is_dumb_terminal() -> bool:
    """Whether `TERM` says that the terminal can only show one line after the other."""
    return os.environ.get("TERM") == "dumb"


def runtime_folder() -> str | None:
    """The user's own folder for sockets and the like, if `XDG_RUNTIME_DIR` names one."""
    return os.environ.get("XDG_RUNTIME_DIR") or None


def current_instance() -> str | None:
    """The instance this code runs for, if it runs for one."""
    return RUNNING_INSTANCE.get() or instance_name()


def require_instance() -> str:
    """The instance this code runs for."""
    name = current_instance()
    if name is None:
        raise ConfigError(
            f"this process does not know which server it is: set {NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME} to the name of an "
            "instance in the config, or start servers with ng_run"
        )
    return name


@contextmanager
def running_as(name: str) -> Iterator[None]:
    """Run a block of code as the instance `name`."""
    token = RUNNING_INSTANCE.set(name)
    try:
        yield
    finally:
        RUNNING_INSTANCE.reset(token)
