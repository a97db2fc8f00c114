"""`${...}` in a configuration: what it names, what it stands for, and why it may stand for nothing."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationToMissingValueError, OmegaConfBaseException

from nemo_gym.config.trees import Tree, child_path, children, leaves, path_parts
from nemo_gym.errors import ConfigError, ConfigInterpolationError, did_you_mean, listed
from nemo_gym.keys import MISSING, WELL_KNOWN_KEYS

_REFERENCE = re.compile(
    r"""\$\{\s*
    (?:oc\.(?:select|deprecated|dict\.keys|dict\.values)\s*:\s*)?
    (?P<path>\.*[^\s.:,${}'"\[\]][^\s:,${}'"]*)
    (?=\s*[,}$])""",
    re.VERBOSE,
)
_MISSING_KEY = re.compile(r"Interpolation key '(?P<key>[^'\n]+)' not found")
_MISSING_VARIABLE = re.compile(r"Environment variable '(?P<name>[^'\n]+)' not found")
_PLACES_SHOWN = 3


def references(text: str) -> Iterator[str]:
    """The paths that `${...}` in `text` refer to, relative ones with their leading dots."""
    if "${" in text:
        for match in _REFERENCE.finditer(text):
            yield match["path"].rstrip(".")


def names_used_by_interpolations(tree: Any) -> set[str]:
    """Top-level names that some `${name...}` in the tree refers to."""
    return {path_parts(path)[0] for _, value in leaves(tree) if isinstance(value, str) for path in references(value)}


def plain_tree(config: DictConfig | None) -> Tree:
    """`config` as plain data, `${...}` left as text."""
    return {} if config is None else cast(Tree, OmegaConf.to_container(config, resolve=False))


def to_config(tree: Mapping[str, Any]) -> DictConfig:
    """`tree` as an OmegaConf config."""
    try:
        return OmegaConf.create(dict(tree))
    except GrammarParseError as error:
        raise ConfigInterpolationError(
            f"{error.full_key} holds a ${{...}} that cannot be read ({_first_line(error)}); "
            "correct it, or write \\${ for text that only looks like one"
        ) from error
    except OmegaConfBaseException as error:
        place = error.full_key or "a name"
        raise ConfigError(
            f"{place} in the configuration is neither text, a number, true, false, null, a list nor a mapping: "
            f"{_first_line(error)}"
        ) from error


@dataclass
class Resolved:
    """A configuration with every `${...}` replaced by what it stands for."""

    tree: Tree
    problems: list[ConfigError] = field(default_factory=list)
    """One error per thing that some `${...}` needs and that is not there."""
    unsettled: set[str] = field(default_factory=set)
    """Top-level names with a value somewhere below that is missing or could not be resolved."""


def resolve(config: DictConfig, tree: Tree, *, unused: Collection[str] = ()) -> Resolved:
    """Resolve `config`, whose plain data is `tree`; what cannot be resolved stays as it is written.

    Below the top-level names in `unused` an environment variable may be unset: nobody will read what needs it.
    """
    resolver = _Resolver()
    resolved: Tree = {}
    unsettled: set[str] = set()
    for name, value in tree.items():
        before = resolver.unsettled
        resolver.is_used = name not in unused
        resolved[name] = resolver.value(config, tree, name, value, "")
        if resolver.unsettled > before:
            unsettled.add(name)
    return Resolved(resolved, resolver.problems(tree), unsettled)


class _Resolver:
    def __init__(self) -> None:
        self.unsettled = 0
        self.is_used = True
        self._failures: list[tuple[str, str, OmegaConfBaseException]] = []

    def _resolve(self, live: DictConfig | ListConfig, node: Any, path: str) -> Any:
        """Plain data for `node`; `live` is its counterpart in the config."""
        values = ((key, self.value(live, node, key, value, path)) for key, value in children(node))
        return [value for _, value in values] if isinstance(node, list) else dict(values)

    def value(self, live: Any, node: Any, key: Any, value: Any, path: str) -> Any:
        """What `value`, which `node` holds under `key`, stands for; `live` is the counterpart of `node`."""
        here = child_path(path, node, key)
        if value == MISSING:
            self.unsettled += 1
            return value
        if not _may_need_resolving(value):
            return value
        try:
            stands_for = live[key]
            if not isinstance(value, str):
                return self._resolve(stands_for, value, here)
            return OmegaConf.to_container(stands_for, resolve=True) if OmegaConf.is_config(stands_for) else stands_for
        except OmegaConfBaseException as error:
            if not self.is_used and _MISSING_VARIABLE.search(str(error)):
                return value
            self.unsettled += 1
            self._failures.append((here, value, error))
            return value

    def problems(self, tree: Tree) -> list[ConfigError]:
        """What went wrong, each missing thing once however many values need it."""
        places: dict[tuple[str, str], list[str]] = {}
        for path, text, error in self._failures:
            if isinstance(error, InterpolationToMissingValueError):
                continue  # the value it refers to is reported itself
            reason = str(error)
            if match := _MISSING_KEY.search(reason):
                places.setdefault(("key", match["key"]), []).append(f"{path} ({text!r})")
            elif match := _MISSING_VARIABLE.search(reason):
                places.setdefault(("variable", match["name"]), []).append(f"{path} ({text!r})")
            else:
                places.setdefault((_first_line(error), path), []).append(f"{path} is {text!r}")
        return [_problem(kind, name, where, tree) for (kind, name), where in places.items()]


def _may_need_resolving(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    return any(inner == MISSING or _may_need_resolving(inner) for _, inner in children(value))


def _problem(kind: str, name: str, where: list[str], tree: Tree) -> ConfigError:
    places = listed(where, _PLACES_SHOWN)
    needs = "needs it" if len(where) == 1 else "need it"
    if kind == "key":
        hint = "" if name in WELL_KNOWN_KEYS else did_you_mean(name, tree)
        return ConfigInterpolationError(
            f"{name!r} is not set, but {places} {needs}; set it in env.yaml or with ++{name}=<value>{hint}"
        )
    if kind == "variable":
        return ConfigInterpolationError(
            f"the environment variable {name!r} is not set, but {places} {needs}; "
            f"export it, or give a default: ${{oc.env:{name},<default>}}"
        )
    return ConfigInterpolationError(f"{places}, which cannot be resolved: {kind}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
