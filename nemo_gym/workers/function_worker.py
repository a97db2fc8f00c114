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
from types import ModuleType
from typing import Any

from nemo_gym.workers.loop import serve

MAIN_FILE = "__file__"
_MAIN, _MAIN_HERE = "__main__", "__nemo_gym_worker__"


class _Loader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == _MAIN and len(sys.argv) > 2 and _MAIN_HERE not in sys.modules and _is_worker():
            _run_main_file(sys.argv[2])
        if module in (_MAIN, _MAIN_HERE):
            module = _MAIN_HERE if _MAIN_HERE in sys.modules else _MAIN
        return super().find_class(module, name)


def _is_worker() -> bool:
    return getattr(sys.modules[_MAIN], MAIN_FILE, None) == __file__


def _run_main_file(path: str) -> None:
    main = sys.modules[_MAIN_HERE] = ModuleType(_MAIN_HERE)
    main.__dict__.update(runpy.run_path(path, run_name=_MAIN_HERE))


def dumped(value: Any) -> str:
    """A value as text."""
    return base64.b64encode(pickle.dumps(value)).decode()


def loaded(text: str) -> Any:
    """The value in a text."""
    return _Loader(io.BytesIO(base64.b64decode(text))).load()


def called(request: dict[str, Any]) -> dict[str, Any]:
    """What a function returned or raised."""
    try:
        function, arguments = loaded(request["call"])
        return {"returned": dumped(function(*arguments))}
    except Exception as error:  # noqa: BLE001 - it is the caller's
        told = traceback.format_exc()
        try:
            return {"raised": dumped(error), "traceback": told}
        except Exception:  # noqa: BLE001 - an error that holds what cannot be pickled
            return {"raised": "", "traceback": told}


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    serve(lambda: called)
