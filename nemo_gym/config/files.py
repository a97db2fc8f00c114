"""The YAML files of a configuration: what `config_paths` lists, what those files include, and env.yaml.

A file overrides everything it includes, and a later entry of `config_paths` overrides
an earlier one with all it includes: the include tree flattened in post-order.

YAML is read as OmegaConf reads it, ten times as fast, since libyaml does the parsing where it is installed. The
dialect: `1e3` is a number, dates are text, a key given twice is an error.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym.config.references import to_config
from nemo_gym.config.trees import Tree, merge_trees
from nemo_gym.errors import (
    ConfigError,
    ConfigInterpolationError,
    ConfigPathNotFoundError,
    MalformedConfigPathsError,
    similar_names,
)
from nemo_gym.keys import CONFIG_PATHS_KEY_NAME, MISSING, NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME, SERVER_TYPES
from nemo_gym.paths import candidates, resolve_for_reading
from nemo_gym.schemas.path_text import refuse_url

logger = logging.getLogger(__name__)

_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_NO_CONFIGS = {".jsonl", ".csv", ".parquet", ".gz", ".zst", ".xlsx"}
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_STRING_TAG = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != _STRING_TAG:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _path_class in ("Path", "PosixPath", "WindowsPath"):  # the way OmegaConf writes the paths in a config
    _Loader.add_constructor(
        f"tag:yaml.org,2002:python/object/apply:pathlib.{_path_class}",
        lambda loader, node: Path(*loader.construct_sequence(node)),
    )


def parse_yaml(text: str, where: str) -> Tree:
    """The mapping that `text` spells, empty for empty text; `where` is how errors call it."""
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        is_tab = line[: mark.column + 1].strip(" ").startswith("\t") if mark else False
        reason = "a tab, where YAML wants spaces" if is_tab else error.problem or error.context
        raise ConfigError(f"Malformed YAML in {where}{place}: {reason}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"Malformed YAML in {where}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = "a list" if isinstance(loaded, list) else f"the single value {loaded!r}"
        raise ConfigError(f"{where} holds {kind}; a configuration is a mapping of names to values (`name: value`)")
    return loaded


def load_yaml(path: Path) -> Tree:
    """The mapping in one YAML file; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"Malformed YAML in {path}: not UTF-8 text ({error.reason} at {error.start})") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_yaml(text, str(path))


@dataclass
class ConfigFile:
    """One YAML file that was read."""

    path: Path
    tree: Tree
    included: set[Path] = field(default_factory=set)
    """Every file it pulled in, directly or not."""


@dataclass
class ConfigFiles:
    """All files of a configuration, lowest precedence first, and what was wrong with reading them."""

    files: list[ConfigFile] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    """`config_paths` in full: the listed entries, then the discovered ones, each file once."""
    problems: list[ConfigError] = field(default_factory=list)


def load_env_file(dotenv_path: Path | None) -> ConfigFile | None:
    """Read `dotenv_path`, or else the first env.yaml of the search roots; None when there is none."""
    path = Path(dotenv_path) if dotenv_path else resolve_for_reading("env.yaml", Path.is_file)
    return ConfigFile(path, load_yaml(path)) if path.is_file() else None


def config_paths_in(config: Mapping[Any, Any], where: str, context: Mapping[str, Any] | None = None) -> list[str]:
    """The `config_paths` entry of a config, checked to be a list of paths.

    `${...}` in it may use the config's own values and those of `context`, which win.
    """
    value = config.get(CONFIG_PATHS_KEY_NAME)
    if value is None or value == MISSING:
        return []
    if "${" in str(value):
        value = _resolved(merge_trees([config, context or {}, {CONFIG_PATHS_KEY_NAME: value}]), where)
    if isinstance(value, str):
        raise MalformedConfigPathsError(
            f"{CONFIG_PATHS_KEY_NAME} (from {where}) must be a list of paths, not the text {value!r}: "
            f'write "+config_paths=[{value}]" on a command line, `config_paths: [{value}]` in a file'
        )
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry.strip() for entry in value):
        raise MalformedConfigPathsError(
            f"{CONFIG_PATHS_KEY_NAME} (from {where}) must be a list of paths, not {value!r}; for example: "
            '"+config_paths=[a.yaml,b.yaml]"'
        )
    return value


def _resolved(tree: Tree, where: str) -> Any:
    try:
        value = to_config(tree)[CONFIG_PATHS_KEY_NAME]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigInterpolationError(
            f"{CONFIG_PATHS_KEY_NAME} (from {where}) is {tree[CONFIG_PATHS_KEY_NAME]!r}, which cannot be resolved: "
            f"{reason}; it can use values of the same file, of env.yaml, of the command line and of the environment"
        ) from error


def load_config_files(
    config_paths: Iterable[str], where: str = "config_paths", context: Mapping[str, Any] | None = None
) -> ConfigFiles:
    """Read the listed files and everything they include.

    `where` is what errors call the list's origin; `context` holds values that includes may use.
    """
    reader = _Reader(context or {})
    listed = list(config_paths)
    for entry in listed:
        reader.list_once(entry)
    for entry in listed:
        reader.visit(entry, where)
    return reader.result


class _Reader:
    def __init__(self, context: Mapping[str, Any]) -> None:
        self.result = ConfigFiles()
        self._context = context
        self._visited: dict[Path, ConfigFile | None] = {}
        self._listed: set[Path] = set()
        self._open: list[Path] = []

    def list_once(self, entry: str) -> None:
        identity = _locate(entry).resolve()
        if identity not in self._listed:
            self._listed.add(identity)
            self.result.given.append(entry)

    def visit(self, entry: str, where: str) -> ConfigFile | None:
        """Read a file after everything it includes; None when that failed or is still going on."""
        path = _locate(entry)
        identity = path.resolve()
        if identity in self._open:
            chain = " -> ".join(map(str, [*self._open[self._open.index(identity) :], identity]))
            logger.warning("config files include one another in a circle, each is read once: %s", chain)
        if identity in self._visited:
            return self._visited[identity]
        self._visited[identity] = None
        try:
            refuse_url(CONFIG_PATHS_KEY_NAME, entry)
            if not path.is_file():
                raise _not_found(entry, where)
            if path.suffix in _NO_CONFIGS:
                raise ConfigError(
                    f"config_paths entry {entry!r} (from {where}) is no configuration, which is a YAML file; rows are "
                    f"given as +input_jsonl_fpath={entry}"
                )
            file = ConfigFile(path, load_yaml(path))
            includes = config_paths_in(file.tree, str(path), self._context)
        except ConfigError as error:
            self.result.problems.append(error)
            return None
        self._open.append(identity)
        for included in includes:
            self._include(included, file)
        self._open.pop()
        self._visited[identity] = file
        self.result.files.append(file)
        return file

    def _include(self, entry: str, file: ConfigFile) -> None:
        self.list_once(entry)
        loaded = self.visit(entry, str(file.path))
        if loaded is not None:
            file.included |= {loaded.path, *loaded.included}


def _locate(entry: str) -> Path:
    return resolve_for_reading(entry, Path.is_file)


def _not_found(entry: str, where: str) -> ConfigPathNotFoundError:
    places = candidates(entry)
    correction = next(filter(None, (_corrected(place, entry) for place in places)), None)
    hint = f"; did you mean {correction!r}?" if correction else "."
    folder = " as a file (it is a folder)" if any(place.is_dir() for place in places) else ""
    inside = [f"{entry.rstrip('/')}/{file}" for place in places for file in _configs_in(place)]
    if inside:
        hint = f"; did you mean {inside[0]!r}?"
    looked = "".join(f"\n  {place}" for place in places) + _in_a_checkout(entry)
    return ConfigPathNotFoundError(
        f"config_paths entry {entry!r} (from {where}) was not found{folder}{hint} Looked for:{looked}"
    )


def _in_a_checkout(entry: str) -> str:
    """Where a component can be that is not part of this distribution."""
    if Path(entry).parts[:1] not in [(name,) for name in (*SERVER_TYPES, "benchmarks")]:
        return ""
    variable = NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME
    return f"\nIf you have it in another checkout, name that one: {variable}=<checkout> before the command"


def _corrected(place: Path, entry: str) -> str | None:
    """`entry` with each misspelled folder and file name replaced by the nearest one that exists at `place`."""
    steps = Path(entry).parts if not Path(entry).is_absolute() else place.parts[1:]
    here = place.parents[len(steps) - 1]
    names = []
    for step in steps:
        if not (here / step).exists():
            by_stem = {Path(name).stem: name for name in _names_in(here)}
            close = similar_names(Path(step).stem, by_stem)
            if not close:
                return None
            step = by_stem[close[0]]
        here /= step
        names.append(step)
    return str(Path(place.anchor if Path(entry).is_absolute() else "", *names)) if here.is_file() else None


def _configs_in(folder: Path) -> list[str]:
    """The configs in a folder or in its `configs`, the one that is called like the folder first."""
    found = sorted([*folder.glob("*.yaml"), *folder.glob("configs/*.yaml")], key=lambda path: path.stem != folder.name)
    return [path.relative_to(folder).as_posix() for path in found]


def _names_in(folder: Path) -> list[str]:
    try:
        return [child.name for child in folder.iterdir()]
    except OSError:
        return []
