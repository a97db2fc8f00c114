"""Cookies of two sessions that a rollout carries along: the environment's and the model's."""

from collections.abc import Mapping
from http.cookies import Morsel
from typing import Any, TypeAlias

Cookies: TypeAlias = Mapping[str, Any]
"""Names to values, where a value is text or, as aiohttp reads it, a `Morsel`."""


def merged(known: Cookies | None, received: Cookies) -> Cookies:
    """What to send next: an answer that sets no cookie, such as a crashed tool's, ends no session."""
    if not known or set(known) <= set(received):
        return received
    return {**known, **received}


def cookie_text(value: Any) -> str:
    """The value of a cookie, however it was read."""
    return value.value if isinstance(value, Morsel) else str(value)
