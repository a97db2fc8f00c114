"""Texts with `{variables}`. Braces around anything else, as in LaTeX, stay as they are."""

import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"\{(\w+)\}")


def fill(template: str, variables: Mapping[str, str]) -> str:
    r"""`template` with the known variables put in: `\boxed{{answer}}` becomes `\boxed{7}`."""
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), template)


def fill_all(value: Any, variables: Mapping[str, str]) -> Any:
    """`value` with every text in it filled, at any depth."""
    if isinstance(value, str):
        return fill(value, variables)
    if isinstance(value, list):
        return [fill_all(item, variables) for item in value]
    if isinstance(value, dict):
        return {key: fill_all(item, variables) for key, item in value.items()}
    return value
