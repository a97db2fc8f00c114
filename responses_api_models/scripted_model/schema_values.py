"""Values that fit a JSON schema, drawn from what a conversation offers.

What the user states comes first, then what earlier tools returned under the same name, then names
and numbers in the order they were mentioned, then the schema's own hints. Required fields are
always there; optional ones only when the conversation speaks of them.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.evidence import Evidence

_FREE_TEXT_NAMES = frozenset({"query", "question", "prompt", "text", "message", "content", "input", "sentence"})
_FORMATS = {
    "date": (re.compile(r"\b\d{4}-\d{2}-\d{2}\b"), "2025-01-01"),
    "date-time": (re.compile(r"\b\d{4}-\d{2}-\d{2}T[\d:.]+(?:Z|[+-]\d{2}:\d{2})?"), "2025-01-01T00:00:00Z"),
    "time": (re.compile(r"\b\d{2}:\d{2}(?::\d{2})?\b"), "12:00:00"),
    "email": (re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.-]*\w"), "someone@example.com"),
    "uri": (re.compile(r"\bhttps?://\S+[\w/]"), "https://example.com/"),
}
_MAX_DEPTH = 8
_MAX_TEXT = 500
_MAX_ITEMS = 20
_MAX_VALUES = 1000

Schema = dict[str, Any]


@dataclass
class Values:
    """Fills one tool call's arguments; names and numbers are used up in order."""

    user: Evidence
    returned: list[Any]
    """Outputs of earlier tools, parsed."""
    draws: Draws
    skip_names: int = 0
    """How many of the user's names are left to other calls of the same tool."""
    _definitions: Schema = field(default_factory=dict)
    _names_used: int = 0
    _numbers_used: int = 0
    _made: int = 0

    def arguments(self, parameters: Schema) -> dict[str, Any]:
        """An object for the schema of a tool's parameters."""
        self._definitions = parameters
        value = self._object("", parameters, 0)
        return value if isinstance(value, dict) else {}

    def _value(self, name: str, schema: Schema, depth: int) -> Any:
        self._made += 1
        if self._made > _MAX_VALUES:  # a schema that refers to itself, or wants lists of lists of lists
            depth = _MAX_DEPTH
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if options := _list_in(schema, "enum"):
            return self._enum(name, options)
        makers: dict[Any, Callable[[str, Schema, int], Any]] = {
            "object": self._object,
            "array": self._array,
            "integer": self._number,
            "number": self._number,
            "boolean": self._boolean,
            "null": lambda name, schema, depth: None,
        }
        return makers.get(_type_of(schema), self._string)(name, schema, depth)

    def _resolved(self, schema: Any) -> Schema:
        """The schema behind references and alternatives: the first alternative that is not null."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            if isinstance(reference := schema.get("$ref"), str):
                schema = _look_up(self._definitions, reference)
                continue
            alternatives = next(filter(None, (_list_in(schema, key) for key in ("anyOf", "oneOf", "allOf"))), None)
            if alternatives is None:
                return schema
            schema = next((option for option in alternatives if option != {"type": "null"}), alternatives[0])
        return schema if isinstance(schema, dict) else {}

    def _object(self, name: str, schema: Schema, depth: int) -> Any:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = [key for key in _list_in(schema, "required") if isinstance(key, str)]
        if depth >= _MAX_DEPTH:
            return {}
        wanted = [key for key in properties if key in required or self._is_spoken_of(key, properties[key])]
        wanted += [key for key in required if key not in properties]
        return {key: self._value(key, properties.get(key, {}), depth + 1) for key in wanted}

    def _is_spoken_of(self, name: str, schema: Any) -> bool:
        if self.user.stated(name) is not None:
            return True
        options = _list_in(self._resolved(schema), "enum")
        return any(isinstance(option, str) and self.user.mentions(option) for option in options)

    def _array(self, name: str, schema: Schema, depth: int) -> list[Any]:
        if depth >= _MAX_DEPTH:
            return []
        items = self._resolved(schema.get("items"))
        kind = _type_of(items)
        found: list[Any] = []
        if options := _list_in(items, "enum"):
            found = [option for option in options if self.user.mentions(option)]
        elif kind in ("integer", "number"):
            found = [_as_kind(number, kind) for number in self._all_numbers(name)]
        elif kind == "string":
            found = self._candidates()
        found = found[: _count_in(schema, "maxItems", _MAX_ITEMS)]
        missing = _count_in(schema, "minItems", 1) - len(found)
        return found + [self._value(name, items, depth + 1) for _ in range(missing)]

    def _all_numbers(self, name: str) -> list[int | float]:
        """Numbers that tools returned under the (singular) name, else all they returned, else the user's."""
        returned = [value for key in (name, name.removesuffix("s")) for value in self._returned(key)]
        numbers = [value for value in returned if isinstance(value, int | float) and not isinstance(value, bool)]
        anywhere = [n for value in self.returned for n in _numbers_in(value)]
        return numbers or anywhere or self.user.numbers

    def _number(self, name: str, schema: Schema, depth: int) -> Any:
        kind = _type_of(schema)
        value: Any
        stated = Evidence(self.user.stated(name) or "").numbers
        returned = [value for value in self._returned(name) if _is_number(value)]
        if stated or returned:
            value = (stated or returned)[-1]
        elif self.user.numbers:
            value = self.user.numbers[self._numbers_used % len(self.user.numbers)]
            self._numbers_used += 1
        else:
            value = next((hint for hint in (schema.get("default"), schema.get("minimum")) if _is_number(hint)), 1)
        bounds = [bound if _is_number(bound) else value for bound in (schema.get("minimum"), schema.get("maximum"))]
        return _as_kind(min(bounds[1], max(bounds[0], value)), kind)

    def _boolean(self, name: str, schema: Schema, depth: int) -> bool:
        stated = (self.user.stated(name) or "").lower()
        if stated in ("true", "yes", "on", "false", "no", "off"):
            return stated in ("true", "yes", "on")
        return bool(schema.get("default", self.user.mentions(name)))

    def _enum(self, name: str, options: list[Any]) -> Any:
        mentioned = [option for option in options if option is not None and self.user.mentions(option)]
        return mentioned[0] if mentioned else self.draws.choice(f"enum {name}", options)

    def _string(self, name: str, schema: Schema, depth: int) -> str:
        if (known := _FORMATS.get(str(schema.get("format")))) is not None:
            match = known[0].search(self.user.text)
            return match.group() if match else known[1]
        text = self._text_for(name, schema)
        return text[: _count_in(schema, "maxLength", _MAX_TEXT)].ljust(_count_in(schema, "minLength", 0), ".")

    def _text_for(self, name: str, schema: Schema) -> str:
        if (stated := self.user.stated(name)) is not None:
            return stated
        if returned := self._returned(name):
            return str(returned[-1])
        if name.lower() in _FREE_TEXT_NAMES:
            return next(iter(self.user.quotations), self.user.text.strip())
        candidates = self._candidates()
        if not candidates:
            return str(schema.get("default", self.user.topic()))
        position = self.skip_names + self._names_used
        self._names_used += 1
        return candidates[position % len(candidates)]

    def _candidates(self) -> list[str]:
        return self.user.quotations or self.user.names

    def _returned(self, name: str) -> list[Any]:
        return [value for output in self.returned for value in _values_at(output, name)]


def parsed_output(text: str) -> Any:
    """What a tool returned: JSON if it is, else the text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _list_in(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _count_in(schema: Schema, key: str, default: int) -> int:
    """A length that a schema demands, within reason."""
    value = schema.get(key)
    return min(max(value, 0), _MAX_TEXT) if isinstance(value, int) else default


def _type_of(schema: Schema) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((option for option in kind if option != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)


def _look_up(definitions: Schema, reference: str) -> Schema:
    node: Any = definitions
    for part in filter(None, reference.removeprefix("#").split("/")):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    return node if isinstance(node, dict) else {}


def _values_at(value: Any, name: str) -> Iterator[Any]:
    """Every simple value stored under `name`, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == name and not isinstance(inner, dict | list):
                yield inner
            else:
                yield from _values_at(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _values_at(inner, name)


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_kind(value: Any, kind: str) -> Any:
    return int(value) if kind == "integer" and math.isfinite(value) else value
