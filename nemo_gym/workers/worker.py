"""The worker's side: a line of JSON in, a line of JSON out, again and again, and the two programs that are ours.

A worker ends by itself, also when nobody is left to stop it: at the end of its input, and by SIGPROF when it
has used more processor time on one request than it was granted.

Without arguments this program matches regular expressions, for `PatternMatcher`. With arguments it calls functions,
for `in_worker`: functions, arguments and results travel as pickles. A function of the server's main module, which has
another name here, is found by running that module's file once, as anything but the main module.
"""

import base64
import io
import json
import os
import pickle
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

READY = "ready"

Handle = Callable[[dict[str, Any]], dict[str, Any]]


def serve(load: Callable[[], Handle]) -> None:
    """Answer requests with what `load` returns until the input ends; what is printed meanwhile goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up among the answers
    handle = load()
    _write(answers, READY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_limit_s"])
        answer = handle(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, json.dumps(answer))


def _write(answers: Any, line: str) -> None:
    answers.write(line + "\n")
    answers.flush()


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


def last_match(request: dict[str, Any]) -> dict[str, Any]:
    """The last match and its groups; none without a match."""
    found = None
    for match in re.finditer(request["pattern"], request["text"], request["flags"]):
        found = match
    return {"found": None if found is None else [found[0], *found.groups()]}


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.path[:] = json.loads(sys.argv[1])
        serve(lambda: partial(called, sys.argv[2]))
    else:
        serve(lambda: last_match)
