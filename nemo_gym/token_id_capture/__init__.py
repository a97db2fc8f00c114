"""PUBLIC: the token ids of agents that do not know them: kept at the model server by call, and put together later.

A command-line agent talks to a model server as to any endpoint and reports only text. While it works, the server
keeps one `TokenEntry` per call (`records`), by way of a context variable (`sink`) into files (`store`) or wherever a
framework wants them (`protocols`). Afterwards the calls of a rollout are joined into the conversation they make
(`builder`), and its items get their ids back (`consumer`, `delivery`). Whatever is in doubt masks the rollout.
"""

from importlib import import_module
from typing import Any

_LATER = {"current_capture_context": "nemo_gym.token_id_capture.sink"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
