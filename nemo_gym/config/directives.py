"""Blocks made from other blocks: `_inherit_from`, `_copy` and `_delete_key`.

`_inherit_from: a.b` (or the value `${inherit_from:a.b}`) takes what stands at `a.b` and removes
it there; `_copy` leaves it. The rest of the block is laid over what was taken. Sources are
read from the config as it was before anything moved, so the result does not depend on the order
of keys; chains are followed, and a chain that comes back to itself is an error naming the path.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.config.trees import ABSENT, Tree, as_block, child_path, delete_at, key_for, lay_over, path_parts, value_at
from nemo_gym.errors import ConfigError, InheritPathNotFoundError, did_you_mean, listed
from nemo_gym.keys import COPY_KEY_NAME, DELETE_KEY_KEY_NAME, INHERIT_FROM_KEY_NAME, MISSING

_VALUE_DIRECTIVE = re.compile(r"\s*\$\{\s*(inherit_from|copy)\s*:.*", re.DOTALL)
_SOURCE_KEYS = (INHERIT_FROM_KEY_NAME, COPY_KEY_NAME)
_DIRECTIVE_KEYS = (*_SOURCE_KEYS, DELETE_KEY_KEY_NAME)


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
