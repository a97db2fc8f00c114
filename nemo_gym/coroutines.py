"""What can be known about a coroutine function before it runs."""

import dis
from collections.abc import Callable
from typing import Any

_YIELD = dis.opmap["YIELD_VALUE"]
NEVER_WAITS = "never_waits"
"""Attribute of a wrapper whose code waits only for a function that never does."""


def never_waits(function: Callable[..., Any]) -> bool:
    """Whether a coroutine of this function runs to its end at once: its code has no place to be suspended at."""
    told = getattr(function, NEVER_WAITS, None)
    if told is not None:
        return bool(told)
    code = getattr(function, "__code__", None)
    return code is not None and _YIELD not in code.co_code[::2]
