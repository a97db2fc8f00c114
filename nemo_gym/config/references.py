"""What one place of a configuration takes from another: `_inherit_from`, `_copy` and `_delete_key`; `${...}`.

Directives make blocks from other blocks. `_inherit_from: a.b` (or the value `${inherit_from:a.b}`) takes what stands at
`a.b` and removes it there; `_copy` leaves it. The rest of the block is laid over what was taken. Sources are read from
the config as it was before anything moved, so the result does not depend on the order of keys; chains are followed, and
a chain that comes back to itself is an error naming the path.

Interpolations, `${...}`, stay text until the end: what each names, what it stands for, why it may stand for nothing.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationToMissingValueError, OmegaConfBaseException

from nemo_gym.config.trees import (
    ABSENT,
    Tree,
    as_block,
    child_path,
    children,
    delete_at,
    key_for,
    lay_over,
    leaves,
    path_parts,
    value_at,
)
from nemo_gym.errors import ConfigError, ConfigInterpolationError, InheritPathNotFoundError, did_you_mean, listed
from nemo_gym.keys import COPY_KEY_NAME, DELETE_KEY_KEY_NAME, INHERIT_FROM_KEY_NAME, MISSING, WELL_KNOWN_KEYS

_VALUE_DIRECTIVE = re.compile(r"\s*\$\{\s*(inherit_from|copy)\s*:.*", re.DOTALL)
_SOURCE_KEYS = (INHERIT_FROM_KEY_NAME, COPY_KEY_NAME)
_DIRECTIVE_KEYS = (*_SOURCE_KEYS, DELETE_KEY_KEY_NAME)
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


def apply_directives(config: Mapping[str, Any]) -> Tree:
    """A copy of `config` (plain data, interpolations unresolved) with every directive carried out."""
    return _Directives(config).run()


class _Directives:
    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot = snapshot
        self._found: dict[str, Any] = {}
        self._open: list[str] = []
        self._moved: set[str] = set()

    def run(self) -> Tree:
        result: Tree = self._build(self._snapshot, ABSENT, "")
        for path in sorted(self._moved, key=_later_positions_first):
            delete_at(result, path)
        return result

    def _build(self, node: Any, base: Any, where: str) -> Any:
        """What `node` means when laid over `base`, which is built already."""
        if isinstance(node, str) and _VALUE_DIRECTIVE.fullmatch(node):
            block = as_block(node)
            if block is None:
                raise InheritPathNotFoundError(f"{where} is {node!r}; after the colon stands a path like a.b.c")
            node = block
        if isinstance(node, Mapping):
            return self._build_mapping(node, base, where)
        if isinstance(node, list):
            return [self._build(item, ABSENT, child_path(where, node, i)) for i, item in enumerate(node)]
        return lay_over(base, node)

    def _build_mapping(self, node: Mapping[Any, Any], base: Any, where: str) -> Any:
        sources = _sources(node, where)
        for key, path in sources:
            if key == INHERIT_FROM_KEY_NAME:
                self._moved.add(path)
            base = lay_over(base, self._find(path, where), self._expand)
        own = {key: value for key, value in node.items() if key not in _DIRECTIVE_KEYS}
        if own and isinstance(base, str):
            base = self._expand(base)
        if sources and not own and not isinstance(base, Mapping):
            return base
        if sources and base == MISSING:
            return MISSING
        result: dict[Any, Any] = dict(base) if isinstance(base, Mapping) else {}
        for name in _names_to_delete(node):
            _delete(name, own, result, sources, where)
        for key, value in own.items():
            result[key] = self._build(value, result.get(key, ABSENT), child_path(where, node, key))
        return result

    def _find(self, path: str, where: str) -> Any:
        """A copy of what stands at `path` once its own directives are carried out."""
        found = self._look_up(path_parts(path))
        if found is ABSENT:
            raise InheritPathNotFoundError(
                f"Path specified does not exist in config: {path!r}, which {where or 'the config'} takes as its base"
                f"{self._what_is_there(path)}"
            )
        return copy.deepcopy(found)

    def _expand(self, reference: str) -> Any:
        """What a `${a.b}` that gets further keys stands for; the text itself when it is no such reference."""
        block = as_block(reference)
        found = ABSENT if block is None else self._look_up(path_parts(block[COPY_KEY_NAME]))
        return reference if found is ABSENT else copy.deepcopy(found)

    def _look_up(self, parts: tuple[str, ...]) -> Any:
        path = ".".join(parts)
        if path in self._found:
            return self._found[path]
        if path in self._open:
            chain = " -> ".join([*self._open[self._open.index(path) :], path])
            raise InheritPathNotFoundError(f"blocks inherit from one another in a circle: {chain}; break it somewhere")
        self._open.append(path)
        try:
            self._found[path] = self._descend(self._snapshot, ABSENT, parts, "")
        finally:
            self._open.pop()
        return self._found[path]

    def _descend(self, node: Any, base: Any, parts: Sequence[str], where: str) -> Any:
        """What stands at `parts` below `node` laid over `base`; only what is on the way is built."""
        if node is ABSENT and base is ABSENT:
            return ABSENT
        if not parts:
            return base if node is ABSENT else self._build(node, base, where)
        if node == MISSING or (node is ABSENT and base == MISSING):
            return MISSING
        if isinstance(node, str):
            node = as_block(node) if _VALUE_DIRECTIVE.fullmatch(node) else node
        part, *rest = parts
        inherited = value_at(base, part)
        own = value_at(node, part)
        if isinstance(node, Mapping):
            for _, path in _sources(node, where):
                inherited = lay_over(inherited, self._look_up_in_source(path, part), self._expand)
            if part in _names_to_delete(node):
                own, inherited = ABSENT, ABSENT if own is ABSENT else inherited
        return self._descend(own, inherited, rest, child_path(where, node, part))

    def _look_up_in_source(self, path: str, part: str) -> Any:
        """The part that a source contributes; none when the source is just being looked for in itself."""
        parts = (*path_parts(path), part)
        return ABSENT if ".".join(parts) in self._open else self._look_up(parts)

    def _what_is_there(self, path: str) -> str:
        node: Any = self._snapshot
        for part in path_parts(path):
            key = key_for(node, part)
            if key is ABSENT and isinstance(node, Mapping):
                return f" (nothing is called {part!r}; there is {listed(node)}{did_you_mean(part, node)})"
            if key is ABSENT:
                return f" (it ends before {part!r})"
            node = node[key]
        return ""


def _sources(node: Mapping[Any, Any], where: str) -> list[tuple[str, str]]:
    found = [(key, node[key]) for key in _SOURCE_KEYS if key in node]
    for key, path in found:
        if not isinstance(path, str) or not path_parts(path):
            raise InheritPathNotFoundError(
                f"{child_path(where, node, key)} is {path!r}; it takes the dotted path of another block"
            )
    return found


def _names_to_delete(node: Mapping[Any, Any]) -> list[str]:
    names = node.get(DELETE_KEY_KEY_NAME)
    if names is None:
        return []
    listed = names if isinstance(names, list) else str(names).split(",")
    return [str(name).strip() for name in listed if str(name).strip()]


def _delete(
    name: str, own: dict[Any, Any], inherited: dict[Any, Any], sources: list[tuple[str, str]], where: str
) -> None:
    for holder in (own, inherited):
        key = key_for(holder, name)
        if key is not ABSENT:
            del holder[key]
            return
    if sources:
        raise ConfigError(
            f"{DELETE_KEY_KEY_NAME} in {where or 'the config'} names {name!r}, which neither the block nor "
            f"{sources[0][1]!r} has; they have {listed({**own, **inherited})}"
        )


def _later_positions_first(path: str) -> tuple[tuple[int, str], ...]:
    """Sort key under which removing one entry of a list does not move the next one to be removed."""
    return tuple((-int(part), "") if part.isdecimal() else (0, part) for part in path_parts(path))


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
