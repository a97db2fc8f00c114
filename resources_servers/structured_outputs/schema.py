"""JSON schemas, as far as tasks use them: whether a value fits, and whether every keyword is understood.

A keyword that is not known here is refused when the row is read: a value must never pass because nobody looked.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "format",
        "deprecated", "readOnly", "writeOnly",
    }
)  # fmt: skip
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_int(value),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_BOUNDS: dict[str, tuple[type, Callable[[Any, Any], bool]]] = {
    "minimum": (float, lambda value, bound: value >= bound),
    "maximum": (float, lambda value, bound: value <= bound),
    "exclusiveMinimum": (float, lambda value, bound: value > bound),
    "exclusiveMaximum": (float, lambda value, bound: value < bound),
    "multipleOf": (float, lambda value, bound: _is_multiple(value, bound)),
    "minLength": (str, lambda value, bound: len(value) >= bound),
    "maxLength": (str, lambda value, bound: len(value) <= bound),
    "pattern": (str, lambda value, bound: re.search(bound, value) is not None),
    "minItems": (list, lambda value, bound: len(value) >= bound),
    "maxItems": (list, lambda value, bound: len(value) <= bound),
    "uniqueItems": (
        list,
        lambda value, bound: not bound or len({json.dumps(each, sort_keys=True) for each in value}) == len(value),
    ),
    "minProperties": (dict, lambda value, bound: len(value) >= bound),
    "maxProperties": (dict, lambda value, bound: len(value) <= bound),
}
_SEVERAL, _PARTS = ("allOf", "anyOf", "oneOf"), ("items", "not", "additionalProperties")
KNOWN = frozenset(
    {*ANNOTATIONS, *_BOUNDS, *_SEVERAL, *_PARTS, "$ref", "type", "enum", "const", "properties", "required"}
)
_DEEPEST = 64
_LONGEST_NAME = 100


class SchemaError(ValueError):
    """A schema that cannot be checked against."""


class Place(NamedTuple):
    """Where a value stands in an answer; written out only where something does not fit."""

    name: str = "$"
    outer: "Place | None" = None

    def __str__(self) -> str:
        name = self.name if len(self.name) <= _LONGEST_NAME else f"{self.name[:_LONGEST_NAME]}..."
        return name if self.outer is None else f"{self.outer}{name}"


def problem_with(text: str, schema: Any, *, strict: bool) -> str | None:
    """Return the first thing for which a text is no JSON value that fits; None when it fits.

    A text can be made over which this takes longer than anybody waits: call it where it can be stopped.
    """
    try:
        value = json.loads(text.strip(), parse_float=_number, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return f"the answer is no JSON: {error}"
    try:
        return next(Checker(schema, strict=strict).problems(value), None)
    except RecursionError:
        return "the answer is nested too deep"


class Checker:
    """Checks values against one schema."""

    def __init__(self, schema: Any, *, strict: bool) -> None:
        """Read a schema.

        Args:
            schema: As an object.
            strict: Whether every property that is named must be there, and no other.

        Raises:
            SchemaError: it has something that is not understood here.
        """
        self._root = schema
        self._strict = strict
        for where, part in parts_of(schema):
            if isinstance(part, Mapping):
                _check_part(part, where)
                if "$ref" in part:
                    self._target(part["$ref"])

    def problems(self, value: Any) -> Iterator[str]:
        """What does not fit, one line each."""
        yield from self._problems(value, self._root, Place(), 0)

    def _problems(self, value: Any, schema: Any, where: Place, depth: int) -> Iterator[str]:
        if depth > _DEEPEST:
            yield f"{where} is nested too deep"
            return
        if isinstance(schema, bool):
            if not schema:
                yield f"{where} must not be there"
            return
        if "$ref" in schema:
            yield from self._problems(value, self._target(schema["$ref"]), where, depth + 1)
        yield from _plain_problems(value, schema, where)
        if isinstance(value, dict):
            yield from self._of_object(value, schema, where, depth)
        if isinstance(value, list) and "items" in schema:
            for number, each in enumerate(value):
                yield from self._problems(each, schema["items"], Place(f"[{number}]", where), depth + 1)
        yield from self._of_several(value, schema, where, depth)

    def _of_object(self, value: dict[str, Any], schema: Mapping[str, Any], where: Place, depth: int) -> Iterator[str]:
        properties = schema.get("properties", {})
        required = properties if self._strict and properties else schema.get("required", ())
        for name in required:
            if name not in value:
                yield f"{where}.{name} is missing"
        others: Any = False if self._strict and properties else schema.get("additionalProperties", True)
        for name, each in value.items():
            if name in properties:
                yield from self._problems(each, properties[name], Place(f".{name}", where), depth + 1)
            elif others is not True:
                yield from self._problems(each, others, Place(f".{name}", where), depth + 1)

    def _of_several(self, value: Any, schema: Mapping[str, Any], where: Place, depth: int) -> Iterator[str]:
        for part in schema.get("allOf", ()):
            yield from self._problems(value, part, where, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                fitting = sum(self._fits(value, part, where, depth) for part in schema[keyword])
                if not fitting or (keyword == "oneOf" and fitting > 1):
                    yield f"{where} fits {fitting} of the schemas of {keyword}"
        if "not" in schema and self._fits(value, schema["not"], where, depth):
            yield f"{where} is what it must not be"

    def _fits(self, value: Any, schema: Any, where: Place, depth: int) -> bool:
        return next(self._problems(value, schema, where, depth + 1), None) is None

    def _target(self, reference: Any) -> Any:
        here = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(f"$ref {reference!r} leads out of the schema")
        for step in reference.lstrip("#/").split("/") if reference.strip("#/") else []:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(here, Mapping) or name not in here:
                raise SchemaError(f"$ref {reference!r} leads nowhere")
            here = here[name]
        return here


def parts_of(schema: Any, where: str = "#", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every schema in a schema, and where it is.

    Raises:
        SchemaError: something is no schema that should be one.
    """
    if depth > _DEEPEST:
        raise SchemaError(f"{where} is nested too deep")
    if not isinstance(schema, Mapping | bool):
        raise SchemaError(f"{where} must be an object")
    yield where, schema
    if isinstance(schema, bool):
        return
    for keyword in ("properties", "$defs", "definitions"):
        for name, part in _of_kind(schema, keyword, Mapping, where).items():
            yield from parts_of(part, f"{where}/{keyword}/{name}", depth + 1)
    for keyword in _SEVERAL:
        for number, part in enumerate(_of_kind(schema, keyword, list, where)):
            yield from parts_of(part, f"{where}/{keyword}/{number}", depth + 1)
    for keyword in _PARTS:
        if keyword in schema:
            yield from parts_of(schema[keyword], f"{where}/{keyword}", depth + 1)


def _of_kind(schema: Mapping[str, Any], keyword: str, kind: type, where: str) -> Any:
    value = schema.get(keyword, {} if kind is Mapping else [])
    if not isinstance(value, kind):
        raise SchemaError(f"{where}: {keyword} must be {'an object' if kind is Mapping else 'a list'}")
    return value


def _check_part(part: Mapping[str, Any], where: str) -> None:
    if unknown := sorted(set(part) - KNOWN):
        raise SchemaError(f"{where} uses {', '.join(unknown)}, which cannot be checked here")
    kinds = part.get("type", [])
    listed = kinds if isinstance(kinds, list) else [kinds]
    if unknown := [kind for kind in listed if not isinstance(kind, str) or kind not in _TYPES]:
        raise SchemaError(f"{where}: there is no type {unknown[0]!r}")
    for keyword in ("enum", "required"):
        _of_kind(part, keyword, list, where)
    if "pattern" in part:
        _check_pattern(part["pattern"], where)
    for keyword in set(part) & set(_BOUNDS) - {"uniqueItems", "pattern"}:
        if not _is_number(part[keyword]) or (keyword == "multipleOf" and part[keyword] <= 0):
            raise SchemaError(f"{where}: {keyword} must be a number, not {part[keyword]!r}")


def _check_pattern(pattern: Any, where: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise SchemaError(f"{where}: {pattern!r} is not a regular expression: {error}") from error


def _plain_problems(value: Any, schema: Mapping[str, Any], where: Place) -> Iterator[str]:
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_TYPES[kind](value) for kind in kinds):
            yield f"{where} must be of type {' or '.join(kinds)}"
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        yield f"{where} must be one of {schema['enum']}"
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{where} must be {schema['const']!r}"
    for keyword, (kind, fits) in _BOUNDS.items():
        is_meant = _is_number(value) if kind is float else isinstance(value, kind)
        if keyword in schema and is_meant and not fits(value, schema[keyword]):
            yield f"{where} does not keep to {keyword} {schema[keyword]}"


def _number(text: str) -> int | float:
    """1.0 is the whole number that 1 is."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_multiple(value: Any, of: Any) -> bool:
    if _is_int(value) and _is_int(of):
        return bool(value % of == 0)
    try:
        return float(value / of).is_integer()
    except OverflowError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
