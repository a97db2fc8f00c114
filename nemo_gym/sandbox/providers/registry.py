"""Providers by name: those that a program registered, those built in, those of installed packages, in this order.

A provider is loaded when it is asked for. Those of packages are entry points of the group `nemo_gym.sandbox_providers`.
"""

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any, TypeAlias

from nemo_gym.sandbox.providers.base import SandboxProvider

logger = logging.getLogger(__name__)

ProviderClass: TypeAlias = type[SandboxProvider]
ProviderLoader: TypeAlias = Callable[[], ProviderClass]
ENTRY_POINT_GROUP = "nemo_gym.sandbox_providers"
BUILT_IN = {"apptainer": "ApptainerProvider", "docker": "DockerProvider", "local": "LocalProvider"}
ELSEWHERE = ("daytona", "ecs_fargate", "enroot", "opensandbox", "openshell")
"""Names that configs written for other distributions use."""
_REGISTERED: dict[str, ProviderClass] = {}


def register_provider(name: str, provider_class: ProviderClass, *, override: bool = False) -> None:
    """Offer a provider under a name in this process.

    Raises:
        ValueError: the name is taken, and it was not said to `override` it.
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"a sandbox provider must have a name, not {name!r}")
    if not override and name in {*_REGISTERED, *BUILT_IN}:
        raise ValueError(f"there is a sandbox provider {name!r} already; pass override=True to replace it")
    _REGISTERED[name] = provider_class


def get_provider_class(name: str) -> ProviderClass:
    """The class behind a name.

    Raises:
        ValueError: there is no such provider, or two packages offer it.
    """
    installed = _installed()
    if name in _REGISTERED:
        _warn_if_shadowed(name, installed, "one that this program registered")
        return _REGISTERED[name]
    if name in BUILT_IN:
        _warn_if_shadowed(name, installed, "the built-in one")
        module = import_module(f"nemo_gym.sandbox.providers.{name}")
        return _checked(getattr(module, BUILT_IN[name]))
    if name in installed:
        return _loaded(name, installed[name])
    raise ValueError(_unknown(name))


def create_provider(config: Mapping[str, Any]) -> SandboxProvider:
    """Make the provider that `{name: settings}` describes; the settings are its keyword arguments, or null.

    Raises:
        ValueError: not exactly one provider is named, it does not exist, or it does not take these settings.
    """
    if not isinstance(config, Mapping) or len(config) != 1:
        what = sorted(config) if isinstance(config, Mapping) else config
        raise ValueError(f"a sandbox provider is given as one name with its settings, such as {{docker: {{}}}}: {what}")
    ((name, settings),) = config.items()
    if settings is not None and not isinstance(settings, Mapping):
        raise ValueError(f"the settings of the sandbox provider {name!r} must be a mapping, not {settings!r}")
    provider_class = get_provider_class(str(name))
    try:
        return provider_class(**dict(settings or {}))
    except TypeError as error:
        why = f"the sandbox provider {name!r} does not take these settings: {error}"
        known = ", ".join(signature(provider_class).parameters)
        raise ValueError(f"{why}; there are {known}" if known else why) from error


def list_providers() -> list[str]:
    """The names of all providers, sorted."""
    return sorted({*_REGISTERED, *BUILT_IN, *_installed()})


def _installed() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point not in found.setdefault(point.name, []):
            found[point.name].append(point)
    return found


def _warn_if_shadowed(name: str, installed: Mapping[str, list[EntryPoint]], winner: str) -> None:
    for point in installed.get(name, []):
        logger.warning("the sandbox provider %r of %s is not used: %s goes first", name, point.value, winner)


def _loaded(name: str, points: list[EntryPoint]) -> ProviderClass:
    if len(points) > 1:
        places = ", ".join(sorted(point.value for point in points))
        raise ValueError(f"several packages offer a sandbox provider {name!r} ({places}); uninstall all but one")
    try:
        return _checked(points[0].load())
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the sandbox provider {name!r} ({points[0].value}) cannot be loaded: {error}") from error


def _checked(provider_class: Any) -> ProviderClass:
    if not isinstance(provider_class, type):
        raise ValueError(f"a sandbox provider must be a class, not {provider_class!r}")
    return provider_class


def _unknown(name: str) -> str:
    message = f"there is no sandbox provider {name!r}; available: {', '.join(list_providers())}. "
    if name in ELSEWHERE:
        message += f"{name} is not part of this distribution: choose one of those, or install a package that brings it"
    else:
        message += "Others come with packages that bring them"
    return f"{message} (entry point {ENTRY_POINT_GROUP}), or by register_provider({name!r}, <class>)"
