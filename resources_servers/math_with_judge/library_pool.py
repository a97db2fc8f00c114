"""Answers compared by math-verify, in processes that can be killed when one gets stuck.

An answer that takes too much of the processor's time, or over which one process after the other crashes, counts as
not equal. Where processes cannot be started, do not get that time, or are killed, there is no verdict, and the rollout
fails rather than score 0.
"""

import logging
import sys
from pathlib import Path
from typing import NamedTuple

from nemo_gym.workers import WorkerDeathError, WorkerError, WorkerPool, WorkerStartError, WorkerTimeoutError

logger = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("library_worker.py")


class LibraryVerifierError(WorkerError):
    """math-verify gave no verdict, for reasons that are not the answer's."""


class LibraryVerdict(NamedTuple):
    """What math-verify says about an answer."""

    reward: float
    extracted_answer: str | None
    timed_out: bool = False
    """It took too long, and therefore counts as not equal."""


class LibraryPool:
    """Compares answers in at most `max_workers` processes, each in at most `timeout_s` of the processor's time."""

    def __init__(
        self, max_workers: int, timeout_s: float, program: Path = WORKER, clock_limit_s: float | None = None
    ) -> None:
        self._pool = WorkerPool("math-verify", program, max_workers, timeout_s, clock_limit_s)
        self.open, self.close = self._pool.open, self._pool.close

    async def grade(self, expected: str, generated: str) -> LibraryVerdict:
        """Compare `expected`, a formula, with the answer in the text `generated`.

        Raises:
            LibraryVerifierError: there is no verdict.
        """
        try:
            return LibraryVerdict(**await self._pool.ask(expected=expected, generated=generated))
        except WorkerTimeoutError:
            return LibraryVerdict(0.0, None, timed_out=True)
        except WorkerDeathError as error:
            logger.warning("an answer counts as not equal: %s; it ends in %r", error, generated[-200:])
            return LibraryVerdict(0.0, None)
        except WorkerStartError as error:
            remedy = f"`{sys.executable} -m pip install math-verify` installs the library"
            raise LibraryVerifierError(f"{error}; {remedy}") from error
        except WorkerError as error:
            raise LibraryVerifierError(f"{error}; the answer ends in {generated[-200:]!r}") from error

    @property
    def pids(self) -> set[int]:
        """The processes there are."""
        return self._pool.pids
