"""What is done in isolated processes: run a submitted program on one input.

Only those processes import this module. They are told the inputs of the tests and never the expected
outputs, so that a program gains nothing by looking around. Programs find the usual modules and names
already imported, as on the sites whose tasks these are.
"""

import builtins
import importlib
import sys
import types
from json import dumps  # by name: a program may replace json.dumps
from typing import Any

_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
_RECURSION_LIMIT = 50_000


def _usual_names() -> dict[str, Any]:
    """What `from x import *` of all modules gives, the modules themselves, and every builtin as it was."""
    modules = {name: importlib.import_module(name) for name in _MODULES}
    names: dict[str, Any] = {}
    for module in modules.values():
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names |= {name: getattr(module, name) for name in public}
    for name in vars(builtins):
        names.pop(name, None)
    return {**names, "datetime": modules["datetime"].datetime, **{k: v for k, v in modules.items() if k != "datetime"}}


_USUAL_NAMES = _usual_names()


def run(payload: dict[str, Any]) -> Any:
    """Run the program, which reads standard input and writes standard output; or call the function it defines.

    The value of a call is returned as JSON text: it is compared elsewhere, where its own `__eq__` has no say.
    """
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.argv = ["solution.py"]
    function_name = payload.get("fn_name")
    name = "__main__" if function_name is None else "solution"
    module = types.ModuleType(name)
    vars(module).update(_USUAL_NAMES)
    sys.modules[name] = module
    try:
        exec(compile(payload["code"], "solution.py", "exec"), vars(module))
    except SystemExit:
        if function_name is not None:
            raise
    if function_name is None:
        return None
    return dumps(_function(module, function_name)(*payload["arguments"]), default=_not_json)


def _function(module: types.ModuleType, name: str) -> Any:
    """The method of a class `Solution`, as some sites want it, or the function."""
    solution = vars(module).get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    return vars(module)[name]


def _not_json(value: Any) -> str:
    return f"<{type(value).__name__}>"
