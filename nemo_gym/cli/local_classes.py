"""Loading the class of a server into this process, with the surroundings its author expects."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_gym.cli.plan import find_server_folder
from nemo_gym.errors import GymError
from nemo_gym.schemas.server_config import ServerInstanceConfig
from nemo_gym.servers.base import SimpleServer
from nemo_gym.servers.classes import one_server_class


class WrongModuleError(GymError):
    """Another module of the same name is already loaded."""


@contextlib.contextmanager
def load_server_class(instance: ServerInstanceConfig) -> Iterator[type[SimpleServer]]:
    """The class behind an instance; its folder is the current one and first on the path while the block runs.

    Modules that it finds beside itself (`import helpers`) are its own: the next server gets others of that name.

    Raises:
        GymError: there is no such folder or file, or it does not define exactly one server class.
        ImportError: it needs something that is not installed here.
    """
    folder = find_server_folder(instance.SERVER_TYPE, instance.implementation)
    entrypoint = folder / instance.get_inner_run_server_config().entrypoint
    stem = entrypoint.relative_to(folder).with_suffix("")
    with _surroundings(folder), contextlib.chdir(folder):
        module = importlib.import_module(".".join([instance.SERVER_TYPE, instance.implementation, *stem.parts]))
        found = Path(module.__file__ or "")
        if found.resolve() != entrypoint.resolve():
            raise WrongModuleError(f"{module.__name__} was loaded from {found} before, it should be {entrypoint}")
        yield one_server_class(module)


@contextlib.contextmanager
def _surroundings(folder: Path) -> Iterator[None]:
    added = [str(path) for path in (folder, folder / "src", folder.parent.parent) if path.is_dir()]
    before = set(sys.modules)
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            sys.path.remove(entry)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if not name.startswith(f"{folder.parent.name}.") and file and Path(file).is_relative_to(folder):
                del sys.modules[name]
