"""Everything that goes to the endpoint and comes back, one JSON line per call, for finding out what was asked.

Off unless `NEMO_GYM_VLLM_TRANSPORT_LOG` names a file. Headers `x-nemo-gym-log-<name>` of a request to the
model server stand in its lines under `context`, so that a caller can find its own.
"""

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.server_utils import json_bytes

TRANSPORT_LOG_ENV_VAR_NAME = "NEMO_GYM_VLLM_TRANSPORT_LOG"
_CONTEXT_PREFIX = "x-nemo-gym-log-"


@dataclass(frozen=True)
class TransportLog:
    """Writes to `path`, if there is one."""

    path: Path | None

    @classmethod
    def from_environment(cls) -> "TransportLog":
        """The log that the environment asks for."""
        given = os.environ.get(TRANSPORT_LOG_ENV_VAR_NAME)
        return cls(Path(given) if given else None)

    async def noted(
        self,
        call: Callable[..., Awaitable[dict[str, Any]]],
        body: dict[str, Any],
        base_url: str,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        """Make the call, and note request and answer, or the error it ended in."""
        if self.path is None:
            return await call(**body)
        started_s = time.time()
        line: dict[str, Any] = {"time": started_s, "base_url": base_url, "call": call.__name__}
        line |= {"context": _context(headers), "request": body}
        try:
            answer = await call(**body)
        except Exception as error:
            self._write({**line, "elapsed_s": time.time() - started_s, "error": repr(error)})
            raise
        self._write({**line, "elapsed_s": time.time() - started_s, "response": answer})
        return answer

    def _write(self, line: dict[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("ab") as file:
            file.write(json_bytes(line) + b"\n")


def _context(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name.lower().removeprefix(_CONTEXT_PREFIX): value
        for name, value in headers.items()
        if name.lower().startswith(_CONTEXT_PREFIX)
    }
