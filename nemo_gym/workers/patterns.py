"""Regular expressions that come with data: matched where one that takes for ever blocks nobody.

A pattern such as `(a+)+b` can take longer than the universe on a text of a hundred letters, and nothing
but the end of its process stops it.
"""

import re
from http import HTTPStatus
from pathlib import Path

from starlette.exceptions import HTTPException

from nemo_gym.workers.pool import WorkerPool, WorkerTimeoutError

PATTERN_TIMEOUT_S = 10.0
_PROCESSES = 2


class PatternTimeoutError(HTTPException, TimeoutError):
    """A regular expression took too long on a text. As the answer of a server: status 422, the row is at fault."""

    def __init__(self, detail: str) -> None:
        super().__init__(HTTPStatus.UNPROCESSABLE_ENTITY, detail)


class PatternMatcher:
    """Looks for patterns in texts, each time within `timeout_s`."""

    def __init__(self, timeout_s: float = PATTERN_TIMEOUT_S, processes: int = _PROCESSES) -> None:
        self._timeout_s = timeout_s
        self._pool = WorkerPool("pattern", Path(__file__).with_name("pattern_worker.py"), processes, timeout_s)
        self.open, self.close = self._pool.open, self._pool.close

    async def last_match(self, pattern: str, text: str, flags: int = 0) -> list[str | None] | None:
        """The last match and its groups; None without a match.

        Raises:
            re.error: it is no regular expression.
            PatternTimeoutError: it takes too long.
        """
        re.compile(pattern, flags)
        try:
            answer = await self._pool.ask(pattern=pattern, text=text, flags=int(flags))
        except WorkerTimeoutError as error:
            raise PatternTimeoutError(
                f"the regular expression {pattern!r} took longer than {self._timeout_s:g} s on a text of {len(text)} "
                "characters and was given up; write it without repetitions inside repetitions"
            ) from error
        found: list[str | None] | None = answer["found"]
        return found


def captured(found: list[str | None]) -> str:
    """The first group of a match that is not empty, else all of it."""
    whole, *groups = found
    return next((group for group in groups if group), whole) or ""
