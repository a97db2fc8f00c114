"""The fields of a model that somebody set, without copying what they hold.

A request for training carries the token ids of every earlier turn. `model_dump` would copy each of
them, and validating what was built here would look at each again: a tenth of a second for a long
conversation, during which the server does nothing else.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def given_fields(value: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """What `model_dump(exclude_unset=True)` holds, in new dicts around the same values."""
    if isinstance(value, Mapping):
        return dict(value)
    given = {name: field for name, field in value.__dict__.items() if name in value.__pydantic_fields_set__}
    given |= value.__pydantic_extra__ or {}
    return {name: _plain(field) for name, field in given.items()}


def _plain(field: Any) -> Any:
    if isinstance(field, BaseModel):
        return given_fields(field)
    if isinstance(field, list) and field and isinstance(field[0], BaseModel | dict):
        return [given_fields(part) if isinstance(part, BaseModel | Mapping) else part for part in field]
    return field
