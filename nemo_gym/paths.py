"""Where things are: the install root, the folders work goes to, and how a relative path is looked up.

Components of users come before ours: a relative path is looked for in the folders of
`NEMO_GYM_EXTRA_ROOTS`, then in the current folder, then beside the installed package.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from nemo_gym.errors import ConfigError
from nemo_gym.keys import NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME

ROOT_DIR = Path(__file__).absolute().parent
"""The `nemo_gym` package."""
PARENT_DIR = ROOT_DIR.parent
"""The install root: the checkout, or site-packages."""
WORKING_DIR = PARENT_DIR if (PARENT_DIR / "pyproject.toml").exists() else Path.cwd()
CACHE_DIR = WORKING_DIR / "cache"
RESULTS_DIR = WORKING_DIR / "results"


_STEP = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00]+"
_NAME = re.compile(_STEP)
_PATH_INSIDE = re.compile(f"{_STEP}(?:/{_STEP})*")


class PathTraversalError(ConfigError, ValueError):
    """A name that leads somewhere else than names do."""


def require_name(name: str, what: str) -> None:
    """Refuse what is not the name of one file or folder: a name must not choose where it is looked for."""
    if not _NAME.fullmatch(name):
        raise PathTraversalError(f"{what} {name!r} must be the name of a folder: without slashes, and not a path")


def require_path_inside(path: str, what: str) -> None:
    """Refuse a relative path that is absolute after all, or steps out of the folder it is relative to."""
    if not _PATH_INSIDE.fullmatch(path):
        raise PathTraversalError(f"{what} {path!r} must be a path below its folder: relative, and without `..`")


def component_search_roots() -> list[Path]:
    """The folders a relative path is looked for in, first match wins, without repetition."""
    extra = os.environ.get(NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME, "")
    named = [Path(entry).expanduser().absolute() for entry in extra.split(os.pathsep) if entry.strip()]
    unique: dict[Path, Path] = {}
    for root in [*named, Path.cwd(), PARENT_DIR]:
        unique.setdefault(root.resolve(), root)
    return list(unique.values())


def candidates(path: str | Path) -> list[Path]:
    """Every place `path` may be, in search order."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:  # `~name` of nobody: then it is a name like any other
        expanded = Path(path)
    if expanded.is_absolute():
        return [expanded]
    return [root / expanded for root in component_search_roots()]


def resolve_for_reading(path: str | Path, accept: Callable[[Path], bool] = Path.exists) -> Path:
    """Where to read `path` from: the first candidate that `accept` likes.

    Without any, the candidate in the first root, so that the error names a place the user controls.
    Never use this to choose where to write.
    """
    places = candidates(path)
    return next((place for place in places if accept(place)), places[0])
