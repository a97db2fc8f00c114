"""PUBLIC: the entry points of the commands, and `RunHelper` for programs that start servers themselves.

Importing this package loads nothing; both names are resolved on first use.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "GlobalConfigDictParserConfig": "nemo_gym.global_config",
    "RunHelper": "nemo_gym.cli.run_helper",
}

__all__ = ["GlobalConfigDictParserConfig", "RunHelper"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
