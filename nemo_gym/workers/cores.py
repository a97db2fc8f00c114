"""The processors of this machine, and whose turn it is to have one.

Work that keeps a processor busy is done in other processes: mathematics, regular expressions, what models programmed,
functions of authors. All of it that a server process has done goes through one `Cores`, which lets no more go at a
time than there are processors, however many environments there are; replicas of the process divide them, also those
that are added while it runs. What has to wait takes turns: one piece of work of each environment, and within an
environment one of each session. A thousand slow verdicts of one keep another waiting for one of them, not for all.

Waiting is not working: limits of time begin when the work does. Who is cancelled while he waits is forgotten.
"""

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from typing import TypeVar

from nemo_gym.process_inputs import num_replicas, num_workers
from nemo_gym.runtime import usable_cores

WORKS_FOR: ContextVar[tuple[str, str]] = ContextVar("nemo_gym_works_for", default=("", ""))
"""The server and its session that the running code works for."""

_AT_LEAST = 2
"""Pieces of work at a time, also on one processor: one that gets stuck is not to hold up all."""
_SHARE_HOLDS_S = 1.0
"""How long a share of the processors is taken for granted: replicas are added while others run."""
_Result = TypeVar("_Result")


def own_share() -> int:
    """How many pieces of work this process may have under way: the replicas and workers of a server divide them."""
    return max(1, -(-max(_AT_LEAST, usable_cores()) // _processes()))


def _processes() -> int:
    return num_replicas() * num_workers()


class _Lane:
    """What waits for the threads of one pool on behalf of one environment: one of each session in turn."""

    def __init__(self, most: int) -> None:
        self.most, self.under_way = most, 0
        self._of_session: dict[str, deque[Future[None]]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._of_session

    def add(self, session: str, turn: Future[None]) -> None:
        self._of_session.setdefault(session, deque()).append(turn)

    def pop(self) -> Future[None] | None:
        """Whose turn it is; his session goes to the end. Those who were cancelled are passed over."""
        while self._of_session:
            session = next(iter(self._of_session))
            turns = self._of_session.pop(session)
            turn = turns.popleft()
            if turns:
                self._of_session[session] = turns
            if turn.set_running_or_notify_cancel():
                return turn
        return None


class Cores:
    """Lets so much work go at a time, whoever wants it; it belongs to no event loop."""

    def __init__(self, size: int, processes: int = 1, share: Callable[[], int] | None = None) -> None:
        """`size` is for this process; `processes` do the same; `share` says what `size` has become since."""
        self.size, self.everywhere = size, size * processes
        """How much work goes at a time in this process, at most, and in all together."""
        self._share, self._part, self._holds_until_s = share or (lambda: size), size, 0.0
        self._under_way = 0
        self._lock = threading.Lock()
        self._lanes: dict[tuple[Executor, str], _Lane] = {}

    async def run(self, threads: Executor, most: int, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, done in one of `threads` when it is its turn; at most `most` in these at a time.

        Raises:
            RuntimeError: the threads were shut down meanwhile.
        """
        server, session = WORKS_FOR.get()
        key = (threads, server)
        turn: Future[None] = Future()
        with self._lock:
            lane = self._lanes.setdefault(key, _Lane(most))
            lane.add(session, turn)
        self._let_go()
        if not turn.done():
            await self._wait(key, turn)
        try:
            done = threads.submit(work)
        except BaseException:
            self._over(key)
            raise
        done.add_done_callback(lambda _: self._over(key))  # also if nobody waits for it any more
        return await asyncio.wrap_future(done)

    async def _wait(self, key: tuple[Executor, str], turn: Future[None]) -> None:
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # its turn came at the same moment
                self._over(key)
            raise

    def _over(self, key: tuple[Executor, str]) -> None:
        with self._lock:
            self._under_way -= 1
            self._lanes[key].under_way -= 1
        self._let_go()

    def _let_go(self) -> None:
        """Let everybody go whose turn has come."""
        going = []
        with self._lock:
            part = self._own_part()
            while self._under_way < part and (turn := self._next(part)) is not None:
                self._under_way += 1
                going.append(turn)
            idle = [key for key, lane in self._lanes.items() if lane.is_empty and not lane.under_way]
            for key in idle:
                del self._lanes[key]
        for turn in going:
            turn.set_result(None)

    def _own_part(self) -> int:
        now_s = time.monotonic()
        if now_s >= self._holds_until_s:
            self._part, self._holds_until_s = min(self.size, self._share()), now_s + _SHARE_HOLDS_S
        return self._part

    def _next(self, part: int) -> Future[None] | None:
        for key, lane in self._lanes.items():
            most = -(-lane.most * part // self.size)  # a cap of a pool shrinks as the share does
            if lane.under_way < most and (turn := lane.pop()) is not None:
                lane.under_way += 1
                self._lanes[key] = self._lanes.pop(key)
                return turn
        return None


@functools.cache
def own_cores() -> Cores:
    """Those of this process."""
    return Cores(own_share(), _processes(), own_share)
