"""PUBLIC: work that may take for ever, in processes that can be killed.

`in_worker` calls a slow function of an environment on all processors, without blocking its server. `PatternMatcher` is
for the regular expressions of a data set. For programs of one's own `WorkerPool` is the server's side, `serve` the
other one, called in the worker's program with what makes a `Handle`. All of them share the processors of the machine
(`cores`). These names are loaded when they are first asked for, so that a worker loads no more than it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gym.workers.pool import (
        PATTERN_TIMEOUT_S,
        PatternMatcher,
        PatternTimeoutError,
        WorkerDeathError,
        WorkerError,
        WorkerFunctionError,
        WorkerKilledError,
        WorkerPool,
        WorkerStalledError,
        WorkerStartError,
        WorkerTimeoutError,
        captured,
        in_worker,
    )
    from nemo_gym.workers.worker import Handle, serve

_HOMES = {
    "PATTERN_TIMEOUT_S": "pool",
    "Handle": "worker",
    "PatternMatcher": "pool",
    "PatternTimeoutError": "pool",
    "WorkerDeathError": "pool",
    "WorkerError": "pool",
    "WorkerFunctionError": "pool",
    "WorkerKilledError": "pool",
    "WorkerPool": "pool",
    "WorkerStalledError": "pool",
    "WorkerStartError": "pool",
    "WorkerTimeoutError": "pool",
    "captured": "pool",
    "in_worker": "pool",
    "serve": "worker",
}

__all__ = [
    "PATTERN_TIMEOUT_S",
    "Handle",
    "PatternMatcher",
    "PatternTimeoutError",
    "WorkerDeathError",
    "WorkerError",
    "WorkerFunctionError",
    "WorkerKilledError",
    "WorkerPool",
    "WorkerStalledError",
    "WorkerStartError",
    "WorkerTimeoutError",
    "captured",
    "in_worker",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
