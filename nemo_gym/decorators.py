"""PUBLIC: marks for functions."""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["experimental"]

logger = logging.getLogger(__name__)

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def experimental(fn: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Say at every call that a function may change or go."""

    @functools.wraps(fn)
    def warned(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        logger.warning("%s is experimental: it may change without notice", fn.__qualname__)
        return fn(*args, **kwargs)

    return warned
