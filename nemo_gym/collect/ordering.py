"""The order in which rollouts start, where it is not that of the input: longest first, and repeat by repeat.

What takes longest goes first, so that the end of a run does not wait for it alone. How long a task takes is known from
an earlier run, or from its repeats that have ended; of tasks of which nothing is known one repeat goes before all
else, and the others wait until it has ended, or has taken longer than any task that is known. Where tasks may be
decided before all of their repeats are made, each task's first repeat goes first, then each one's second.

Rows stay in their file until it is their turn: kept of each are the place where it is and which comes next, 16 bytes.
"""

import asyncio
import heapq
import math
from array import array
from collections.abc import Hashable, Iterator, Mapping

from nemo_gym.collect.failures import Attempt, PendingAttempt
from nemo_gym.collect.policies import Policy
from nemo_gym.collect.stopping import Stop
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.runs.record import Row
from nemo_gym.runs.resume import Plan

_NONE = -1


class OwedTasks:
    """The rows that a plan owes, task by task."""

    def __init__(self, plan: Plan) -> None:
        self.ordinals: dict[Hashable, int] = {}
        """The tasks, numbered as they come."""
        self._first, self._last = array("q"), array("q")
        self._place, self._after = array("q"), array("q")
        for place, row in plan.places():
            task = row.get(TASK_INDEX_KEY_NAME)
            number = len(self._place)
            self._place.append(place)
            self._after.append(_NONE)
            ordinal = self.ordinals.setdefault(task, len(self.ordinals))
            if ordinal == len(self._first):
                self._first.append(number)
                self._last.append(number)
            else:
                self._after[self._last[ordinal]] = number
                self._last[ordinal] = number

    def take(self, ordinal: int) -> int:
        """The place of the next row of a task, which then is taken."""
        number = self._first[ordinal]
        self._first[ordinal] = self._after[number]
        return self._place[number]

    def has_more(self, ordinal: int) -> bool:
        """Whether rows of a task are left."""
        return self._first[ordinal] != _NONE


class RowOrder(Policy):
    """The rows of a plan in another order, which it learns as attempts end."""

    def __init__(
        self, plan: Plan, *, longest_first: bool, in_waves: bool, durations: Mapping[Hashable, float] | None = None
    ) -> None:
        """`in_waves`: one repeat of each task after the other; `durations` are what tasks took earlier, in seconds."""
        self._plan, self._longest_first, self._in_waves = plan, longest_first, in_waves
        self._owed = OwedTasks(plan)
        ordinals = self._owed.ordinals
        self._took: dict[int, tuple[float, int]] = {
            ordinals[task]: (seconds, 1) for task, seconds in (durations or {}).items() if task in ordinals
        }
        self._fresh = array("q", sorted(range(len(ordinals)), key=lambda number: (-self._expected_s(number), number)))
        self._next_fresh = 0
        self._wave: dict[int, int] = {}
        self._ready: list[tuple[int, float, int]] = []
        self._unknown: dict[int, float] = {}
        """Tasks of which one repeat is out and nothing known, with when it started."""

    def __iter__(self) -> Iterator[Row]:
        with self._plan.reading() as row_at:
            while (ordinal := self._next()) is not None:
                row = row_at(self._owed.take(ordinal))
                if self._owed.has_more(ordinal):
                    self._put_back(ordinal)
                yield row

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """Learn how long its task takes."""
        ordinal = self._owed.ordinals.get(pending.row.get(TASK_INDEX_KEY_NAME))
        if ordinal is not None and self._longest_first and attempt.failure is None:
            seconds, count = self._took.get(ordinal, (0.0, 0))
            took_s = asyncio.get_running_loop().time() - pending.started_s
            self._took[ordinal] = (seconds + took_s, count + 1)
            if self._unknown.pop(ordinal, None) is not None:
                self._put_back(ordinal)
        return None

    def _expected_s(self, ordinal: int) -> float:
        if not self._longest_first:
            return 0.0
        seconds, count = self._took.get(ordinal, (math.inf, 1))
        return seconds / count

    def _put_back(self, ordinal: int) -> None:
        expected_s = self._expected_s(ordinal)
        if self._in_waves:
            self._wave[ordinal] = wave = self._wave.get(ordinal, 0) + 1
            heapq.heappush(self._ready, (wave, -expected_s, ordinal))
        elif expected_s == math.inf:
            self._unknown.setdefault(ordinal, asyncio.get_running_loop().time())
        else:
            heapq.heappush(self._ready, (0, -expected_s, ordinal))

    def _next(self) -> int | None:
        fresh = self._fresh[self._next_fresh] if self._next_fresh < len(self._fresh) else None
        ready_s = -self._ready[0][1] if self._ready else -math.inf
        if fresh is not None and (self._in_waves or self._expected_s(fresh) >= ready_s):
            self._next_fresh += 1
            return fresh
        oldest = next(iter(self._unknown), None)
        if oldest is not None:
            started_s = self._unknown[oldest]
            if not self._ready or asyncio.get_running_loop().time() - started_s >= ready_s:
                del self._unknown[oldest]
                return oldest
        return heapq.heappop(self._ready)[2] if self._ready else None
