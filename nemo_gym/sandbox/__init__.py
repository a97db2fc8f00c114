"""PUBLIC: running what a model wrote without trusting it.

Two things. A sandbox is a place where an agent runs shell commands, wherever that is: `AsyncSandbox` (and `Sandbox`,
which blocks) is one of whatever provider, wanted as a `SandboxSpec` says.

    api.py          sandboxes, and terminals in them
    config.py       how a configuration names a provider
    utils.py        images under other names
    providers/      what a provider must offer, the registry, and those built in: docker, apptainer, local
    reaper.py       removes containers that their run has left behind
    keeper.py       the first process inside a local sandbox

A confined process runs one function of ours on what a model wrote: `IsolatedPool` runs a piece of `Work` within
`Limits` and returns its `Outcome`; `IsolatedProcess` is one process of it.

    process.py      the server's side: isolated processes, started, asked and killed, a bounded number of them shared
    wire.py         what the two sides say to each other
    zygote.py       the other side: confined once, it forks a child for every call, and watches it
    child.py        that child: what it begins with, its limits, its result
    confine.py      the layers it is confined by: namespaces, Landlock, and the order in which they are put on
    seccomp.py      which system calls may be made

Confined processes, and the sandboxes of the provider `local`, which are made of the same layers, need no privileges,
no helper program and no library: Linux offers all of it to ordinary processes. The names are loaded when they are first
asked for, since confined processes live in this package, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gym.sandbox.api import AsyncSandbox, Sandbox, SandboxPty
    from nemo_gym.sandbox.child import Limits
    from nemo_gym.sandbox.config import resolve_provider_config, resolve_provider_metadata
    from nemo_gym.sandbox.confine import LAYERS
    from nemo_gym.sandbox.process import (
        IsolatedPool,
        IsolatedProcess,
        Outcome,
        SandboxError,
        SandboxUnavailableError,
        Work,
    )
    from nemo_gym.sandbox.providers.base import (
        ConnectableProvider,
        ExecResult,
        SandboxCreateError,
        SandboxCreateVerificationError,
        SandboxEndpoint,
        SandboxExecResult,
        SandboxHandle,
        SandboxProvider,
        SandboxPtyError,
        SandboxPtySession,
        SandboxPtySpec,
        SandboxResources,
        SandboxSpec,
        SandboxStatus,
        SupportsSandboxEndpoint,
        SupportsSandboxPty,
        SupportsSandboxPtyAttach,
    )
    from nemo_gym.sandbox.providers.registry import (
        create_provider,
        get_provider_class,
        list_providers,
        register_provider,
    )
    from nemo_gym.sandbox.utils import rewrite_image

_NAMES = {
    "api": ("AsyncSandbox", "Sandbox", "SandboxPty"),
    "child": ("Limits",),
    "config": ("resolve_provider_config", "resolve_provider_metadata"),
    "confine": ("LAYERS",),
    "process": ("IsolatedPool", "IsolatedProcess", "Outcome", "SandboxError", "SandboxUnavailableError", "Work"),
    "providers.base": (
        "ConnectableProvider",
        "ExecResult",
        "SandboxCreateError",
        "SandboxCreateVerificationError",
        "SandboxEndpoint",
        "SandboxExecResult",
        "SandboxHandle",
        "SandboxProvider",
        "SandboxPtyError",
        "SandboxPtySession",
        "SandboxPtySpec",
        "SandboxResources",
        "SandboxSpec",
        "SandboxStatus",
        "SupportsSandboxEndpoint",
        "SupportsSandboxPty",
        "SupportsSandboxPtyAttach",
    ),
    "providers.registry": ("create_provider", "get_provider_class", "list_providers", "register_provider"),
    "utils": ("rewrite_image",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "LAYERS",
    "AsyncSandbox",
    "ConnectableProvider",
    "ExecResult",
    "IsolatedPool",
    "IsolatedProcess",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxCreateError",
    "SandboxCreateVerificationError",
    "SandboxEndpoint",
    "SandboxError",
    "SandboxExecResult",
    "SandboxHandle",
    "SandboxProvider",
    "SandboxPty",
    "SandboxPtyError",
    "SandboxPtySession",
    "SandboxPtySpec",
    "SandboxResources",
    "SandboxSpec",
    "SandboxStatus",
    "SandboxUnavailableError",
    "SupportsSandboxEndpoint",
    "SupportsSandboxPty",
    "SupportsSandboxPtyAttach",
    "Work",
    "create_provider",
    "get_provider_class",
    "list_providers",
    "register_provider",
    "resolve_provider_config",
    "resolve_provider_metadata",
    "rewrite_image",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
