"""The fields of a command's config class as options for people, and the configuration read into that class.

Help pages, error messages, completion and the set of text options all read this one description. Errors are written for
the person who typed the option.
"""

import ast
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from nemo_gym.errors import ConfigError, did_you_mean
from nemo_gym.keys import MASK
from nemo_gym.schemas.path_text import holds_paths

_PLAIN_NAMES: dict[object, str] = {
    str: "text",
    int: "int",
    float: "number",
    bool: "true|false",
    Path: "path",
    list: "list",
    dict: "mapping",
    Any: "value",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_SAFE_FACTORIES: tuple[object, ...] = (dict, list, set, tuple, str)
ConfigT = TypeVar("ConfigT", bound=BaseModel)
_UNION_TAG = re.compile(r"(constrained-)?(int|float|str|bool)|dict\[.*\]")
_BOUNDS_FOUND = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SAID_BY_THE_TYPE = {
    "literal_error",
    "enum",
    "bool_parsing",
    "bool_type",
    "int_parsing",
    "float_parsing",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
}


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    field: str
    """The field of the config class that holds it."""
    names: tuple[str, ...]
    """The name people use, then every other spelling that is accepted."""
    expects: str
    """Its type in words: `int, at least 1`, `bash|zsh`, `[text,...]`."""
    default: str | None
    """The default as it would be typed; None when the option is required."""
    is_text: bool
    """Whether its value is text and nothing else, so that it can be taken literally."""
    choices: tuple[str, ...]
    """The only values there are; empty when there is no such list."""
    is_path: bool

    @property
    def name(self) -> str:
        """The spelling to show."""
        return self.names[0]

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return self.choices == ("true", "false")


def options_of(config_class: type[BaseModel]) -> list[Option]:
    """The options of a command, in the order its config class declares them."""
    return [_option(name, field, config_class) for name, field in config_class.model_fields.items()]


def meanings_of(config_class: type[BaseModel]) -> dict[str, str]:
    """What each field is for: its description, or the docstring below it, on one line."""
    meanings: dict[str, str] = {}
    for parent in reversed(config_class.__mro__):
        if parent is not BaseModel and issubclass(parent, BaseModel):
            meanings |= _field_docstrings(parent)
    described = {name: field.description for name, field in config_class.model_fields.items() if field.description}
    return {name: " ".join(text.split()) for name, text in (meanings | described).items()}


def _field_docstrings(config_class: type[BaseModel]) -> dict[str, str]:
    file = getattr(sys.modules.get(config_class.__module__), "__file__", None)
    definition = _definition_of(file, config_class.__qualname__) if file else None
    docstrings = {}
    for statement, following in pairwise(definition.body if definition else ()):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docstrings[name] = text
    return docstrings


_WITHIN_A_BLOCK = (" ", "\n", "#", ")")
"""How lines begin that do not end the definition before them."""


def _definition_of(file: str, name: str) -> ast.ClassDef | None:
    """The definition of a class, of which only its own lines are parsed where they can be told from the others."""
    source = _source_of(file)
    start = end = source.find(f"\nclass {name}(") + 1
    while start and (end := source.find("\n", end) + 1) and source[end : end + 1] in _WITHIN_A_BLOCK:
        pass
    try:
        tree = ast.parse(source[start : end or None] if start else "")
    except (SyntaxError, ValueError):  # a text in it that starts at the margin
        tree = ast.Module([], [])
    alone = tree.body[0] if tree.body else None
    return alone if isinstance(alone, ast.ClassDef) else _class_definitions(file).get(name)


@cache
def _source_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):  # no source, no docstrings
        return ""


@cache
def _class_definitions(file: str) -> dict[str, ast.ClassDef]:
    """The classes of a source file by qualified name; each file is parsed once, however many classes it has."""
    try:
        tree = ast.parse(_source_of(file))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, ast.ClassDef] = {}
    open_nodes: list[tuple[ast.AST, str]] = [(tree, "")]
    while open_nodes:
        node, prefix = open_nodes.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[prefix + child.name] = child
                open_nodes.append((child, f"{prefix}{child.name}."))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                open_nodes.append((child, f"{prefix}{child.name}.<locals>."))
    return found


def _option(name: str, field: FieldInfo, config_class: type[BaseModel]) -> Option:
    members = list(_members(field.annotation))
    names = _spellings(name, field, config_class)
    return Option(
        field=name,
        names=names,
        expects=_type_in_words(members, field),
        default=None if field.is_required() else _default(field),
        is_text=bool(members) and all(_is_text(member) for member in members),
        choices=tuple(choice for member in members for choice in _choices(member)),
        is_path=holds_paths(field.annotation, field.metadata),
    )


def _spellings(name: str, field: FieldInfo, config_class: type[BaseModel]) -> tuple[str, ...]:
    alias = field.validation_alias or field.alias
    aliases = alias.choices if isinstance(alias, AliasChoices) else [alias]
    names = [spelling for spelling in aliases if isinstance(spelling, str)]
    settings = config_class.model_config
    if not names or settings.get("populate_by_name") or settings.get("validate_by_name"):
        names.append(name)
    return tuple(dict.fromkeys(names))


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union other than None, without their `Annotated` wrapping."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif annotation is not type(None):
        yield annotation


def _choices(member: Any) -> tuple[str, ...]:
    if get_origin(member) is Literal:
        return tuple(show_value(value) for value in get_args(member))
    if isinstance(member, type) and issubclass(member, Enum):
        return tuple(show_value(value) for value in member)
    return ("true", "false") if member is bool else ()


def _is_text(member: Any) -> bool:
    if get_origin(member) is Literal:
        return all(isinstance(value, str) for value in get_args(member))
    return isinstance(member, type) and issubclass(member, str | Path)


def _type_in_words(members: list[Any], field: FieldInfo) -> str:
    words = " or ".join(dict.fromkeys(_one_type_in_words(member) for member in members)) or "null"
    bounds = [
        f", {phrase} {getattr(limit, name)}"
        for limit in field.metadata
        for name, phrase in _BOUNDS.items()
        if getattr(limit, name, None) is not None
    ]
    return words + "".join(bounds)


def _one_type_in_words(member: Any) -> str:
    if choices := _choices(member):
        return "|".join(choices)
    arguments = [" or ".join(map(_one_type_in_words, _members(argument))) for argument in get_args(member)]
    origin = get_origin(member) or member
    if origin is dict and len(arguments) == 2:
        return f"{{{arguments[0]}: {arguments[1]}}}"
    if origin in (list, set, tuple) and arguments:
        return f"[{arguments[0]},...]"
    return _PLAIN_NAMES.get(origin) or str(getattr(origin, "__name__", origin)).removeprefix("typing.")


def _default(field: FieldInfo) -> str:
    if field.default_factory is None:
        return show_value(field.default)
    if field.default_factory in _SAFE_FACTORIES:
        return show_value(field.get_default(call_default_factory=True, validated_data={}))
    return "computed"


def show_value(value: object) -> str:
    """A value the way it is typed on a command line."""
    if isinstance(value, Enum):
        return show_value(value.value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set):
        return "[" + ",".join(map(show_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    return str(value) or '""'


def validate_options(config_class: type[ConfigT], config: Mapping[str, Any], program: str) -> ConfigT:
    """The arguments of a command, read from the whole configuration.

    Raises:
        ConfigError: naming every option that is missing or cannot be used.
    """
    options = {name: option for option in options_of(config_class) for name in option.names}
    values = _plain_values(config, options)
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        lines = _complaints(error, options, values, meanings_of(config_class))
        listed = "\n  ".join([f"{program} cannot run like this:", *lines])
        raise ConfigError(f"{listed}\nSee {program} --help.") from error


def _plain_values(config: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """The configuration as plain data, resolved where this command looks."""
    if isinstance(config, dict):
        return config
    import omegaconf.errors  # only configs that were parsed come here

    from_config = omegaconf.OmegaConf.to_container
    values: dict[str, Any] = from_config(config, resolve=False)  # type: ignore[assignment]
    for name in options:
        if name not in config:
            continue
        try:
            value = config[name]
            values[name] = from_config(value, resolve=True) if omegaconf.OmegaConf.is_config(value) else value
        except omegaconf.errors.OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the option {name!r} is {values[name]!r}, which cannot be resolved: {reason}") from error
    return values


def _complaints(
    error: ValidationError, options: Mapping[str, Option], values: Mapping[str, Any], meanings: Mapping[str, str]
) -> list[str]:
    found: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(str(item["loc"][0]) if item["loc"] else "", []).append(item)
    lines = []
    for name, details in found.items():
        option = options.get(name)
        if option is None:
            lines.append(f"{name}: {_reasons(details)}" if name else _reasons(details))
        elif details[0]["type"] == "missing" and len(details[0]["loc"]) == 1:
            lines.append(f"+{name}=<{option.expects}> is required. {meanings.get(option.field, '')}".rstrip())
        else:
            lines.append(_wrong_value(name, option, values.get(name), _reasons(details)))
    return lines


def _wrong_value(name: str, option: Option, value: object, reasons: str) -> str:
    from nemo_gym.config.secrets import is_secret_key, mask_url_passwords

    shown = MASK if is_secret_key(name) else mask_url_passwords(show_value(value))
    explained = f" ({reasons})" if reasons else ""
    begun = [choice for choice in option.choices if str(value) and choice.startswith(str(value))]
    hint = f"; did you mean {begun[0]!r}?" if begun else did_you_mean(str(value), option.choices)
    if isinstance(value, str) and ":" in value and "{" in option.expects:  # a shell takes {a:1,b:2} apart
        hint = f"; in quotes, '+{name}={{{shown}}}'"
    return f"+{name}={shown}: expected {option.expects}{explained}{hint}"


def _reasons(details: list[ErrorDetails]) -> str:
    """What is not said by the type that is expected; inside a mapping or a list, everything."""
    inside = [item for item in details if any(not _UNION_TAG.fullmatch(str(part)) for part in item["loc"][1:])]
    if inside:
        return "; ".join(dict.fromkeys(map(_reason, inside)))
    is_union = any(len(item["loc"]) > 1 for item in details)  # of which `expected` says no bounds
    said = {*_SAID_BY_THE_TYPE, "dict_type"} - _BOUNDS_FOUND if is_union else _SAID_BY_THE_TYPE
    return "; ".join(dict.fromkeys(_reason(item) for item in details if item["type"] not in said))


def _reason(details: ErrorDetails) -> str:
    """What pydantic found, with the place inside the option's value when it is not the value itself."""
    inner = [str(part) for part in details["loc"][1:] if not _UNION_TAG.fullmatch(str(part))]
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{'.'.join(inner)}: {message}" if inner else message
