"""PUBLIC: running what a model wrote without trusting it.

`IsolatedPool` runs a piece of `Work` within `Limits` and returns its `Outcome`; `IsolatedProcess` is one process of it.
These names are loaded when they are first asked for, since the confined processes live in this package, too.

    process.py      the server's side: isolated processes, started, asked and killed, a bounded number of them shared
    wire.py         what the two sides say to each other
    zygote.py       the other side: confined once, it forks a child for every call, and watches it
    child.py        that child: what it begins with, its limits, its result
    confine.py      the layers it is confined by: namespaces, Landlock, and the order in which they are put on
    seccomp.py      which system calls may be made

Needs no privileges, no helper program and no library: Linux offers all of it to ordinary processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gym.sandbox.child import Limits
    from nemo_gym.sandbox.confine import LAYERS
    from nemo_gym.sandbox.process import (
        IsolatedPool,
        IsolatedProcess,
        Outcome,
        SandboxError,
        SandboxUnavailableError,
        Work,
    )

_HOMES = {
    "LAYERS": "confine",
    "IsolatedPool": "process",
    "IsolatedProcess": "process",
    "Limits": "child",
    "Outcome": "process",
    "SandboxError": "process",
    "SandboxUnavailableError": "process",
    "Work": "process",
}

__all__ = [
    "LAYERS",
    "IsolatedPool",
    "IsolatedProcess",
    "Limits",
    "Outcome",
    "SandboxError",
    "SandboxUnavailableError",
    "Work",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
