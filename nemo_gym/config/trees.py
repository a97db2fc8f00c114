"""Configurations as plain dicts and lists: walking them, paths into them, laying one over another, changing them.

Everything up to the finished config happens on plain data, because OmegaConf costs a hundred times
as much per value. `${...}` stays text here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple, TypeAlias

from nemo_gym.keys import COPY_KEY_NAME, INHERIT_FROM_KEY_NAME, MISSING

Tree: TypeAlias = dict[str, Any]
"""A configuration, or a part of one, as plain data."""
ABSENT: Final = object()
"""Stands for a value that is not there, where None could be one."""

_PART = re.compile(r"[^.\[\]]+")
_WHOLE_REFERENCE = re.compile(
    r"\s*+\$\{\s*+(?:(?P<directive>inherit_from|copy)\s*+:\s*+)?(?P<path>[^\s.:${}](?:[^:${}]*[^\s:${}])?)\s*+\}\s*+"
)


def path_parts(path: str) -> tuple[str, ...]:
    """`a.b[0]` as `("a", "b", "0")`."""
    return tuple(_PART.findall(path))


def child_path(path: str, node: Any, key: Any) -> str:
    """The path of what `node`, itself at `path`, holds under `key`."""
    if isinstance(node, list):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key) or "''"


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """Keys (or positions) and values of a mapping or a list; nothing for anything else."""
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, list):
        yield from enumerate(node)


class Place(NamedTuple):
    """One value of a configuration, and where it stands."""

    path: str
    """As people write it: `a.b[0]`."""
    keys: tuple[Any, ...]
    """The keys and positions that lead there."""
    value: Any


def walk(node: Any, path: str = "", keys: tuple[Any, ...] = ()) -> Iterator[Place]:
    """Everything below `node`, in its order: a mapping or a list first, then what it holds."""
    for key, value in children(node):
        place = Place(child_path(path, node, key), (*keys, key), value)
        yield place
        if isinstance(value, Mapping | list):
            yield from walk(value, place.path, place.keys)


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every single value below `tree` with its path."""
    return ((place.path, place.value) for place in walk(tree) if not isinstance(place.value, Mapping | list))


def key_for(node: Any, part: str) -> Any:
    """The key or position that one part of a path means in `node`; ABSENT when there is nothing."""
    if isinstance(node, Mapping) and part in node:
        return part
    number = int(part) if part.isdecimal() else None
    if number is None:
        return ABSENT
    exists = number in node if isinstance(node, Mapping) else isinstance(node, list) and number < len(node)
    return number if exists else ABSENT


def value_at(tree: Any, path: str) -> Any:
    """What stands at `path`; ABSENT when there is nothing."""
    node = tree
    for part in path_parts(path):
        key = key_for(node, part)
        if key is ABSENT:
            return ABSENT
        node = node[key]
    return node


def has_path(tree: Any, keys: Sequence[Any]) -> bool:
    """Whether something stands where `keys`, positions in lists as numbers or text, lead."""
    for key in keys:
        found = key_for(tree, str(key))
        if found is ABSENT:
            return False
        tree = tree[found]
    return True


def as_block(reference: str) -> Tree | None:
    """`${a.b}`, `${copy:a.b}` or `${inherit_from:a.b}` as the block that can take further keys; None for other text."""
    match = _WHOLE_REFERENCE.fullmatch(reference)
    if match is None:
        return None
    return {INHERIT_FROM_KEY_NAME if match["directive"] == "inherit_from" else COPY_KEY_NAME: match["path"]}


def lay_over(base: Any, over: Any, expand: Callable[[str], Any] = as_block) -> Any:
    """`over` on top of `base`: mappings key by key, anything else replaces what was there.

    `???` replaces nothing. A mapping on top of a reference to another block changes a copy of that block:
    `expand` turns the reference into something that can be changed.
    """
    if base is ABSENT:
        return over
    if over == MISSING:
        return base
    if not isinstance(over, Mapping):
        return over
    if isinstance(base, str):
        base = expand(base)
    if not isinstance(base, Mapping):
        return over
    return {**base, **{key: lay_over(base.get(key, ABSENT), value, expand) for key, value in over.items()}}


def merge_trees(trees: Sequence[Mapping[Any, Any]]) -> Tree:
    """All trees in a new one, later ones on top; names at the top are text even where YAML reads a number."""
    merged: Tree = {}
    for tree in trees:
        merged = lay_over(merged, {str(key): deepcopy(value) for key, value in tree.items()})
    return merged


def set_at(tree: Tree, path: str, value: Any) -> None:
    """Put `value` at `path`, making the mappings on the way.

    Raises:
        LookupError: saying why there cannot be anything at that path.
    """
    *above, last = path_parts(path)
    node: Any = tree
    walked = ""
    for part in above:
        walked = child_path(walked, node, part)
        node = _enter(node, part, walked)
    key = key_for(node, last)
    if key is not ABSENT:
        node[key] = lay_over(node[key], value)
    elif isinstance(node, list):
        raise LookupError(f"{walked} is a list of {len(node)}, so it has no {last!r}")
    else:
        node[last] = value


def _enter(node: Any, part: str, path: str) -> Any:
    """The container at `part` of `node`, made on the spot where there is none."""
    key = key_for(node, part)
    child = node[key] if key is not ABSENT else None
    if isinstance(child, str) and child != MISSING:
        child = as_block(child) or child
    elif child is None or child == MISSING:
        child = {}
    if not isinstance(child, Mapping | list):
        raise LookupError(f"{path} is a single value ({type(child).__name__}), not a mapping")
    if key is ABSENT and isinstance(node, list):
        raise LookupError(f"there is no {path} in a list of {len(node)}")
    node[part if key is ABSENT else key] = child
    return child


def delete_at(tree: Tree, path: str) -> None:
    """Remove what stands at `path`, if there is anything."""
    *above, last = path_parts(path)
    node = value_at(tree, ".".join(above))
    key = key_for(node, last)
    if key is not ABSENT:
        del node[key]
