"""Notes when a process sends a request to a model endpoint: Python loads this when its folder is on the path.

One line each in the file SENT_LOG: the time of the monotonic clock, which all processes of a machine share, and the
process. Only what is in front of sending is looked at; the call itself goes on as it is.
"""

import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_WATCHED = "nemo_gym.http.model_endpoint"
_LOG = os.open(os.environ["SENT_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _watch(module: ModuleType) -> None:
    send = module.try_once

    async def noted(*arguments: Any, **options: Any) -> Any:
        os.write(_LOG, f"{time.monotonic()} {os.getpid()}\n".encode())
        return await send(*arguments, **options)

    module.try_once = noted  # type: ignore[attr-defined]


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, which also watches it once it is loaded."""
        spec = PathFinder.find_spec(name, path, target) if name == _WATCHED else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_watch(module: ModuleType) -> None:
            load(module)
            _watch(module)

        spec.loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)
