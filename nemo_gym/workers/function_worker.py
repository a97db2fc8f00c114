"""The program of a worker that calls functions, for `in_worker`.

Functions, arguments and results travel as pickles. A function of the server's main module, which has another name here,
is found by running that module's file once, as anything but the main module.
"""

import base64
import io
import json
import pickle
import runpy
import sys
import traceback
from functools import partial
from types import ModuleType
from typing import Any

from nemo_gym.workers.loop import serve

_MAIN, _MAIN_HERE = "__main__", "__nemo_gym_worker__"


class _Loader(pickle.Unpickler):
    def __init__(self, text: str, main_file: str) -> None:
        super().__init__(io.BytesIO(base64.b64decode(text)))
        self._main_file = main_file

    def find_class(self, module: str, name: str) -> Any:
        if module in (_MAIN, _MAIN_HERE):
            module = _main_module(self._main_file) if self._main_file else _MAIN
        return super().find_class(module, name)


def _main_module(path: str) -> str:
    """The name here of what is the main module there."""
    if _MAIN_HERE not in sys.modules:
        main = sys.modules[_MAIN_HERE] = ModuleType(_MAIN_HERE)
        main.__dict__.update(runpy.run_path(path, run_name=_MAIN_HERE))
    return _MAIN_HERE


def dumped(value: Any) -> str:
    """A value as text."""
    return base64.b64encode(pickle.dumps(value)).decode()


def loaded(text: str, main_file: str = "") -> Any:
    """The value in a text that a process with this main module wrote; empty: one of its workers did."""
    return _Loader(text, main_file).load()


def called(main_file: str, request: dict[str, Any]) -> dict[str, Any]:
    """What a function returned or raised."""
    try:
        function, arguments = loaded(request["call"], main_file)
        return {"returned": dumped(function(*arguments))}
    except Exception as error:  # noqa: BLE001 - it is the caller's
        told = traceback.format_exc()
        try:
            return {"raised": dumped(error), "traceback": told}
        except Exception:  # noqa: BLE001 - an error that holds what cannot be pickled
            return {"raised": "", "traceback": told}


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    serve(lambda: partial(called, sys.argv[2]))
