"""Blocks made from other blocks: `_inherit_from`, `_copy` and `_delete_key`.

`_inherit_from: a.b` (or the value `${inherit_from:a.b}`) takes what stands at `a.b` and removes
it there; `_copy` leaves it. The rest of the block is laid over what was taken. Sources are
read from the config as it was before anything moved, so the result does not depend on the order
of keys; chains are followed, and a chain that comes back to itself is an error naming the path.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.errors import ConfigError, InheritPathNotFoundError
from nemo_gym.keys import COPY_KEY_NAME, DELETE_KEY_KEY_NAME, INHERIT_FROM_KEY_NAME, MISSING

_VALUE_DIRECTIVE = re.compile(r"\s*\$\{\s*(?P<name>inherit_from|copy)\s*:\s*(?P<path>[^${}]+?)\s*\}\s*")
_DIRECTIVE_KEYS = (INHERIT_FROM_KEY_NAME, COPY_KEY_NAME, DELETE_KEY_KEY_NAME)
_PATH_PART = re.compile(r"[^.\[\]]+")


def apply_directives(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of `config` (plain containers, interpolations unresolved) with every directive carried out."""
    return _Directives(config).run()


class _Directives:
    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot
        self._taken: dict[str, Any] = {}
        self._open: list[str] = []
        self._moved: set[str] = set()

    def run(self) -> dict[str, Any]:
        result: dict[str, Any] = self._build(self._snapshot, None)
        for path in self._moved:
            _remove(result, _parts(path))
        return result

    def _build(self, node: Any, base: Any) -> Any:
        """What `node` means when laid over `base` (already built, or None)."""
        if isinstance(node, Mapping):
            return self._build_mapping(node, base)
        if isinstance(node, list):
            return [self._build(item, None) for item in node]
        if isinstance(node, str) and (match := _VALUE_DIRECTIVE.fullmatch(node)):
            return _lay_over(base, self._take(match["path"], move=match["name"] == "inherit_from"))
        return node

    def _build_mapping(self, node: Mapping[Any, Any], base: Any) -> Any:
        sources = [(key, node[key]) for key in (INHERIT_FROM_KEY_NAME, COPY_KEY_NAME) if key in node]
        for key, path in sources:
            if not isinstance(path, str):
                raise InheritPathNotFoundError(f"{key} takes the dotted path of another block, not {path!r}")
            base = _lay_over(base, self._take(path, move=key == INHERIT_FROM_KEY_NAME))
        if sources and base == MISSING:
            return base
        result: dict[Any, Any] = dict(base) if isinstance(base, Mapping) else {}
        own = {key: value for key, value in node.items() if key not in _DIRECTIVE_KEYS}
        for key in _keys_to_delete(node):
            if key in own:
                del own[key]
            elif key in result:
                del result[key]
            elif sources:
                raise ConfigError(
                    f"{DELETE_KEY_KEY_NAME} names {key!r}, which neither the block nor {sources[0][1]!r} has; "
                    f"they have {sorted(map(str, {*own, *result}))}"
                )
        for key, value in own.items():
            result[key] = self._build(value, result.get(key))
        return result

    def _take(self, path: str, *, move: bool) -> Any:
        if move:
            self._moved.add(path)
        if path not in self._taken:
            if path in self._open:
                chain = " -> ".join([*self._open[self._open.index(path) :], path])
                raise InheritPathNotFoundError(f"blocks inherit from one another in a circle: {chain}")
            self._open.append(path)
            self._taken[path] = self._find(path)
            self._open.pop()
        return copy.deepcopy(self._taken[path])

    def _find(self, path: str) -> Any:
        node: Any = self._snapshot
        parts = list(_parts(path))
        for depth, part in enumerate(parts):
            if node == MISSING:
                return MISSING
            if _has_directive(node):
                return _select(self._build(node, None), parts[depth:], path)
            node = _select(node, [part], path)
        return self._build(node, None)


def _has_directive(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(key in node for key in _DIRECTIVE_KEYS)
    return isinstance(node, str) and _VALUE_DIRECTIVE.fullmatch(node) is not None


def _keys_to_delete(node: Mapping[Any, Any]) -> list[str]:
    return [key.strip() for key in str(node.get(DELETE_KEY_KEY_NAME) or "").split(",") if key.strip()]


def _parts(path: str) -> Iterator[str]:
    return (match.group() for match in _PATH_PART.finditer(path))


def _select(node: Any, parts: list[str], path: str) -> Any:
    for part in parts:
        if node == MISSING:
            return MISSING
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            has = f"; there is {', '.join(map(str, node))}" if isinstance(node, Mapping) and node else ""
            raise InheritPathNotFoundError(
                f"Path specified does not exist in config: {path!r} (nothing is called {part!r} there{has})"
            )
    return node


def _lay_over(base: Any, value: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(value, Mapping):
        return value
    return {**base, **{key: _lay_over(base.get(key), inner) for key, inner in value.items()}}


def _remove(tree: Any, parts: Iterator[str]) -> None:
    *above, last = parts
    for part in above:
        if not isinstance(tree, dict) or part not in tree:
            return
        tree = tree[part]
    if isinstance(tree, dict):
        tree.pop(last, None)
