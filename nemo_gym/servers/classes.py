"""Finding the server class in a module that somebody wrote."""

import inspect
from types import ModuleType

from nemo_gym.errors import GymError
from nemo_gym.servers.base import SimpleServer


class NotOneServerClassError(GymError):
    """A module defines no server class, or several."""


def one_server_class(module: ModuleType) -> type[SimpleServer]:
    """The one concrete server class that `module` itself defines."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, SimpleServer)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(found) != 1:
        names = ", ".join(sorted(item.__name__ for item in found)) or "none"
        raise NotOneServerClassError(f"{module.__name__} should define exactly one server class, it defines {names}")
    return found[0]
