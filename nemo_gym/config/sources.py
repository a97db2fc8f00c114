"""Where a configuration comes from: YAML files, the files they include, and env.yaml.

A file overrides everything it includes, and a later entry of `config_paths` overrides
an earlier one with all it includes: the include tree flattened in post-order.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, DuplicateInstanceError, MalformedConfigPathsError
from nemo_gym.keys import CONFIG_PATHS_KEY_NAME
from nemo_gym.paths import candidates, resolve_for_reading
from nemo_gym.schemas.server_config import server_types_in

logger = logging.getLogger(__name__)


@dataclass
class ConfigFile:
    """One YAML file that was read."""

    given: str
    """The path as written in `config_paths`."""
    path: Path
    config: DictConfig
    included: set[Path] = field(default_factory=set)
    """Every file it pulled in, directly or not."""


@dataclass
class ConfigFiles:
    """All files of a configuration, lowest precedence first, and what was wrong with reading them."""

    files: list[ConfigFile] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    """`config_paths` in full: the listed entries, then the discovered ones."""
    problems: list[ConfigError] = field(default_factory=list)


def load_yaml(path: Path) -> DictConfig:
    """Read one YAML mapping; an empty file is an empty mapping."""
    try:
        loaded = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"Malformed YAML in {path}{where}: {error.problem or error}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"Malformed YAML in {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} holds a list or a single value; a config file is a mapping of names to values")
    return loaded


def load_env_file(dotenv_path: Path | None) -> DictConfig:
    """Read `dotenv_path`, or else the first env.yaml of the search roots; without one, an empty mapping."""
    path = Path(dotenv_path) if dotenv_path else resolve_for_reading("env.yaml", Path.is_file)
    return load_yaml(path) if path.is_file() else OmegaConf.create({})


def config_paths_in(config: Mapping[Any, Any], where: str) -> list[str]:
    """The `config_paths` entry of a config, checked to be a list of paths."""
    value = config.get(CONFIG_PATHS_KEY_NAME)
    if value is None:
        return []
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if not isinstance(plain, list) or not all(isinstance(entry, str) for entry in plain):
        raise MalformedConfigPathsError(
            f'{CONFIG_PATHS_KEY_NAME} in {where} must be a list of paths, for example "+config_paths=[a.yaml,b.yaml]", '
            f"not {plain!r}"
        )
    return plain


def load_config_files(config_paths: Iterable[str]) -> ConfigFiles:
    """Read the listed files and everything they include."""
    listed = list(config_paths)
    result = ConfigFiles(given=list(listed))
    visited: dict[Path, ConfigFile | None] = {}
    for entry in listed:
        _visit(entry, "the command line or env.yaml", result, visited)
    return result


def _visit(entry: str, where: str, result: ConfigFiles, visited: dict[Path, ConfigFile | None]) -> ConfigFile | None:
    path = resolve_for_reading(entry, Path.is_file)
    identity = path.resolve()
    if identity in visited:
        logger.debug("config file %s is named more than once; it is read once", path)
        return visited[identity]
    visited[identity] = None
    if not path.is_file():
        result.problems.append(_not_found(entry, where))
        return None
    try:
        file = ConfigFile(entry, path, load_yaml(path))
        children = config_paths_in(file.config, str(path))
    except ConfigError as error:
        result.problems.append(error)
        return None
    for child in children:
        if child not in result.given:
            result.given.append(child)
        loaded = _visit(child, str(path), result, visited)
        if loaded is not None:
            file.included |= {loaded.path, *loaded.included}
    visited[identity] = file
    result.files.append(file)
    return file


def _not_found(entry: str, where: str) -> ConfigPathNotFoundError:
    places = candidates(entry)
    nearby = [
        str(file.relative_to(place.parents[len(Path(entry).parts) - 1]))
        for place in places
        if not Path(entry).expanduser().is_absolute() and place.parent.parent.is_dir()
        for file in [*place.parent.parent.glob("*.yaml"), *place.parent.parent.glob("*/*.yaml")]
    ]
    close = get_close_matches(entry, nearby, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    looked = "".join(f"\n  {place}" for place in places)
    return ConfigPathNotFoundError(
        f"config_paths entry {entry!r} (from {where}) was not found{hint} Looked for:{looked}"
    )


def check_instance_conflicts(files: list[ConfigFile]) -> list[ConfigError]:
    """One error per instance that two files define as different servers.

    Files that define one server with different values are named in a warning, unless the later includes the earlier.
    """
    problems: list[ConfigError] = []
    first_seen: dict[str, tuple[ConfigFile, Any]] = {}
    for file in files:
        for name, block in file.config.items():
            if not isinstance(name, str) or OmegaConf.is_missing(file.config, name) or not server_types_in(block):
                continue
            plain = OmegaConf.to_container(block, resolve=False)
            earlier = first_seen.setdefault(name, (file, plain))
            if earlier[0] is file:
                continue
            problem = _compare(name, earlier, (file, plain))
            if problem is not None:
                problems.append(problem)
    return problems


def _implementations(block: Mapping[str, Any]) -> set[str]:
    return {
        f"{server_type}/{name}"
        for server_type in server_types_in(block)
        if isinstance(block[server_type], Mapping)
        for name in block[server_type]
    }


def _compare(name: str, earlier: tuple[ConfigFile, Any], later: tuple[ConfigFile, Any]) -> ConfigError | None:
    (first, first_block), (second, second_block) = earlier, later
    theirs, ours = _implementations(first_block), _implementations(second_block)
    if theirs and ours and theirs.isdisjoint(ours):
        return DuplicateInstanceError(
            f"server instance {name!r} is {', '.join(sorted(theirs))} in {first.path} and "
            f"{', '.join(sorted(ours))} in {second.path}; keep one of the two files or rename one instance"
        )
    if first_block != second_block and first.path not in second.included:
        logger.warning(
            "server instance %r is defined by %s and, differently, by %s; the values of the latter win",
            name,
            first.path,
            second.path,
        )
    return None
