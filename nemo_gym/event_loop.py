"""Running an event loop: uvloop's where it is installed, Python's own otherwise; and what it runs beside."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ALLOCATIONS_BETWEEN_COLLECTIONS = 20_000


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, as `asyncio.run` would run it."""
    collect_garbage_less_often()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def collect_garbage_less_often() -> None:
    """For a process that has loaded its libraries: leave those alone, and look for cycles now and then.

    What a request leaves behind is freed without the collector; with Python's own settings it ran every few
    requests and took a tenth of a server's time.
    """
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, 10, 10)
