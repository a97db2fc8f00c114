"""How a configuration reaches the processes a command starts.

It travels in a file only its owner can read, named by an environment variable: nothing is
limited in size and nothing secret stands on a command line or in an environment. Launchers
other than ours may put the whole config into `NEMO_GYM_CONFIG_DICT`; that is always accepted.

Who wrote such a file keeps it locked until it removes it. A file that nobody has locked any more is what a process left
that was killed before it could remove it; whoever writes the next one removes that, too.
"""

import atexit
import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.files import load_yaml, parse_yaml
from nemo_gym.config.references import to_config
from nemo_gym.config.secrets import holds_secret
from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
)
from nemo_gym.process_inputs import common_book
from nemo_gym.sandbox.reaper import book_beside, reap_in_background

INLINE_LIMIT_BYTES = 64 * 1024

_PREFIX, _SUFFIX = "nemo_gym_config_held_", ".yaml"
_HELD: dict[Path, tuple[int, int]] = {}
"""The files that this process wrote: the descriptor that holds the lock, and the process that wrote it."""


def write_config_file(config: DictConfig) -> Path:
    """Write `config`, interpolations unresolved, to a 0600 file that is removed when this process exits."""
    remove_abandoned_files(Path(tempfile.gettempdir()))
    descriptor, path = _new_locked_file()
    if not _HELD:
        atexit.register(_remove_all)
    _HELD[path] = descriptor, os.getpid()
    with os.fdopen(descriptor, "w", encoding="utf-8", closefd=False) as file:
        file.write(OmegaConf.to_yaml(config))
    return path


def remove_config_file(path: Path) -> None:
    """Remove what `write_config_file` wrote, in the process that did: a fork inherits its exit handlers too."""
    descriptor, owner = _HELD.get(path, (-1, os.getpid()))
    if owner != os.getpid():
        return
    path.unlink(missing_ok=True)
    common_book(path).unlink(missing_ok=True)
    if _HELD.pop(path, None) is not None:
        os.close(descriptor)


def remove_abandoned_files(folder: Path) -> None:
    """Remove the files of this user in `folder` whose writers were killed; never one that is in use."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]  # noqa: PTH208
        for name in names:
            with contextlib.suppress(OSError):  # in use, somebody else's, or gone since
                _remove_if_abandoned(folder / name)


def _remove_if_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(found, path.lstat()):
            path.unlink()
            common_book(path).unlink(missing_ok=True)
            reap_in_background(book_beside(str(path)))
    finally:
        os.close(descriptor)


def _new_locked_file() -> tuple[int, Path]:
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX)  # mkstemp creates it 0600
        with contextlib.suppress(OSError):  # a file system without locks: then nobody else can lock it either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)  # taken for abandoned before it was locked


def _remove_all() -> None:
    for path in list(_HELD):
        remove_config_file(path)


def child_environment(
    config: DictConfig, config_file: Path, instance_name: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """`environment` with what a child needs to know its config and which server it is.

    `config_file` is what `write_config_file` made of `config`.
    """
    child = dict(environment)
    child[NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME] = str(config_file)
    child[NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = instance_name
    child.pop(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, None)
    if config_file.stat().st_size < INLINE_LIMIT_BYTES and not holds_secret(config):
        child[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = config_file.read_text(encoding="utf-8")
    return child


def config_from_environment(environment: Mapping[str, str]) -> DictConfig | None:
    """The config a launcher handed to this process, taken as it is; None when there was no launcher."""
    if text := environment.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME):
        return to_config(_parse(text))
    if name := environment.get(NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME):
        try:
            return to_config(load_yaml(Path(name)))
        except ConfigError as error:
            raise ConfigError(
                f"{error} (named by {NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME}, which the launcher of this process sets; "
                "unset it to start afresh)"
            ) from error
    return None


def _parse(text: str) -> dict[str, Any]:
    """Some JSON is no YAML (tabs, surrogate pairs), so JSON is tried first."""
    if text.lstrip().startswith("{"):
        try:
            loaded = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            pass
        else:
            return dict(loaded)
    return parse_yaml(text, NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME)
