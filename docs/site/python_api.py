"""The reference of the Python API: what the public modules offer, with signatures and docstrings."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from docs.site.commands import described
from docs.site.markdown import block, code, contents, escaped, first_sentence, page, table
from nemo_gym.config.options import meanings_of
from nemo_gym.paths import PARENT_DIR

FOLDER = "reference/python-api"
_MARK = "PUBLIC:"
_PACKAGES = {"nemo_gym": "The package itself.", "nemo_gym.rl": ""}
_NO_STORY = (BaseModel, object)


def modules() -> list[str]:
    """The public modules: those whose docstring begins so, and the packages that list what they offer."""
    found = set(_PACKAGES)
    for file in sorted((PARENT_DIR / "nemo_gym").rglob("*.py")):
        if file.read_text(encoding="utf-8").lstrip("r").startswith(f'"""{_MARK}'):
            parts = file.relative_to(PARENT_DIR).with_suffix("").parts
            found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


def pages() -> dict[str, str]:
    """Path and text of every page."""
    made, rows = {}, []
    for name in modules():
        module = import_module(name)
        made[f"{FOLDER}/{name}.md"] = _page(module)
        rows.append((f"[`{name}`]({name}.md)", escaped(first_sentence(_about(module)))))
    made[f"{FOLDER}/index.md"] = page(
        "# The Python API",
        "Names in these modules stay where they are: programs elsewhere import them. Anything else may move.",
        table(("Module", "Is"), rows),
        contents(modules()).replace("\n\n", "\n:hidden:\n\n", 1),
    )
    return made


def _about(module: ModuleType) -> str:
    text = cleandoc(module.__doc__ or "").removeprefix(_MARK).strip()
    return text[:1].upper() + text[1:]


def _page(module: ModuleType) -> str:
    parts = [f"# {module.__name__}", described(_about(module))]
    constants = []
    for name in sorted(_names(module), key=str.lower):
        value = getattr(module, name)
        if inspect.isclass(value):
            parts += list(_class(name, value))
        elif inspect.isroutine(value):
            parts += [f"## {name}", block(_signature(name, value), "python"), _doc(value)]
        elif not inspect.ismodule(value):
            constants.append((f"`{name}`", _shown(value)))
    if constants:
        parts += ["## Constants", table(("Name", "Value"), constants)]
    return page(*parts)


def _names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not name.startswith("_")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _class(name: str, value: type[Any]) -> Iterator[str]:
    yield f"## {name}"
    bases = [base.__name__ for base in value.__bases__ if base not in _NO_STORY]
    yield block(f"class {name}({', '.join(bases)})" if bases else f"class {name}", "python")
    yield _doc(value)
    if issubclass(value, BaseModel):
        yield _fields(value)
    for method, function in vars(value).items():
        routine = function.__func__ if isinstance(function, classmethod | staticmethod) else function
        if method.startswith("_") or not inspect.isfunction(routine) or not routine.__doc__:
            continue
        yield f"### {name}.{method}"
        yield block(_signature(method, routine), "python")
        yield _doc(routine)


def _fields(value: type[BaseModel]) -> str:
    meanings = meanings_of(value)
    rows = []
    for name, info in value.model_fields.items():
        default = "" if info.default_factory is not None else code(repr(info.default))
        kind = code(_short(inspect.formatannotation(info.annotation, base_module=value.__module__)))
        shown = "**required**" if info.is_required() else default
        rows.append((code(name), kind, shown, escaped(meanings.get(name, ""))))
    return table(("Field", "Type", "Unless given", "Meaning"), rows)


def _doc(value: Any) -> str:
    return described(vars(value).get("__doc__") or "" if inspect.isclass(value) else value.__doc__ or "")


def _signature(name: str, function: Any) -> str:
    is_async = "async " if inspect.iscoroutinefunction(function) else ""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return f"{is_async}def {name}(...)"
    text = _short(f"{is_async}def {name}{signature}")
    if len(text) <= 100:
        return text
    inside = _short(",\n    ".join(_with_marks(list(signature.parameters.values()))))
    returned = text.rpartition(" -> ")[2] if " -> " in text else ""
    return f"{is_async}def {name}(\n    {inside},\n)" + (f" -> {returned}" if returned else "")


def _short(text: str) -> str:
    """Types by their names alone."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", re.sub(r"<(?:class|function|object) '?([\w.]+).*?>", r"\1", text))


def _with_marks(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Parameters, with the star before those that can only be given by name."""
    kinds = [parameter.kind for parameter in parameters]
    for number, parameter in enumerate(parameters):
        is_named = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if is_named and not {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL} & set(kinds[:number]):
            yield "*"
        yield str(parameter)


def _shown(value: Any) -> str:
    if isinstance(value, Path):
        return "a path"
    text = repr(value)
    is_plain = isinstance(value, str | int | float | bool | tuple | frozenset) and len(text) <= 80
    return f"`{text}`".replace("|", "\\|") if is_plain and "`" not in text else f"a `{type(value).__name__}`"
