"""Send rows to their agents, so many at a time, and hand back every attempt as it ends.

    async with Dispatch(rows, post, settings) as attempts:
        async for attempt in attempts:
            store.append(attempt.row, attempt.record())

A failed call is an attempt like any other: it is handed out, and the rollout is tried again after a
pause in which others run. Rows are read as room for them appears, and only while the attempts are being
consumed: neither rows nor results pile up. Every wait has an end: the time a rollout may take, the
time the run may take, and ten seconds for what is in flight when the run is stopped.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeAlias

from nemo_gym.rollouts.attempt import Attempt, verdict_on
from nemo_gym.rollouts.config import (
    DEFAULT_CONCURRENCY,
    DEFAULT_MAX_ROLLOUT_ATTEMPTS,
    DEFAULT_ROLLOUT_TIMEOUT_S,
    Concurrency,
    SharedRolloutCollectionConfig,
)
from nemo_gym.rollouts.failures import RetryPauses, failure_of, invalid_answer, rollout_name, rollout_timed_out
from nemo_gym.rollouts.limits import MAX_SET_ASIDE, Trial, WaitingRows
from nemo_gym.rollouts.record import Failure, FailureClass, Result, Row
from nemo_gym.rollouts.server_watch import ServerWatch
from nemo_gym.rollouts.stall import STALLED_AFTER_S, Probe, StallWatch
from nemo_gym.rollouts.stop_rules import Stop, StopKind, StopRules
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""What rollouts in flight are given when the run is stopped."""
_STARTS_AT_ONCE = 256
_CANCELLED_WITHIN_S = 5.0

Post: TypeAlias = Callable[[Row], Awaitable[Any]]
"""Sends one row to its agent and returns the decoded answer; whatever it raises is a failed attempt."""


@dataclass(frozen=True)
class DispatchSettings:
    """How many at once, how long, how often, and when to give up on the whole."""

    concurrency: Concurrency = field(default_factory=lambda: Concurrency(total=DEFAULT_CONCURRENCY))
    rollout_timeout_s: float | None = DEFAULT_ROLLOUT_TIMEOUT_S
    run_timeout_s: float | None = None
    fail_fast: bool = False
    max_failure_fraction: float | None = None
    pauses: RetryPauses = field(default_factory=RetryPauses)
    stalled_after_s: float = STALLED_AFTER_S

    @classmethod
    def of(cls, config: SharedRolloutCollectionConfig) -> "DispatchSettings":
        """What the options of a command say."""
        return cls(
            concurrency=config.concurrency,
            rollout_timeout_s=config.rollout_timeout_s,
            run_timeout_s=config.run_timeout_s,
            fail_fast=config.fail_fast,
            max_failure_fraction=config.max_failure_fraction,
        )


class Dispatch:
    """The rollouts of one run while they are made."""

    def __init__(
        self,
        rows: Iterable[Row],
        post: Post,
        settings: DispatchSettings | None = None,
        *,
        attempts_left: Callable[[Row], int] = lambda row: DEFAULT_MAX_ROLLOUT_ATTEMPTS,
        probe: Probe | None = None,
        servers: ServerWatch | None = None,
    ) -> None:
        """`attempts_left` says how often a rollout may be tried in this run; `probe` is for the stall watch.

        `servers` are watched, if given: when one that is needed is down, the run is stopped.
        """
        self._settings = settings or DispatchSettings()
        self._post = post
        self._attempts_left = attempts_left
        self._waiting = WaitingRows(rows, self._settings.concurrency)
        self._in_flight: dict[Trial, asyncio.Task[None]] = {}
        self._ended: deque[Attempt] = deque()
        self._pauses: dict[Trial, asyncio.TimerHandle] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._abandoned: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._told: set[tuple[str, FailureClass]] = set()
        self._rules = StopRules(self._settings.fail_fast, self._settings.max_failure_fraction)
        self._stall = StallWatch(self._settings.stalled_after_s, probe)
        self._servers = servers
        self.stopped: Stop | None = None
        """Why the run ended early; None when it did not."""

    @property
    def in_flight(self) -> int:
        """Rollouts that are with their agents now."""
        return len(self._in_flight)

    @property
    def awaiting_retry(self) -> int:
        """Rollouts that failed and will be tried again."""
        return len(self._pauses)

    @property
    def in_flight_by_agent(self) -> Mapping[str, int]:
        """The same for agents that have caps of their own."""
        return self._waiting.running_by_agent

    @property
    def is_draining(self) -> bool:
        """Whether nothing is left to start."""
        return self._waiting.is_empty

    @property
    def concurrency(self) -> Concurrency:
        """The caps that hold now."""
        return self._settings.concurrency

    def set_concurrency(self, concurrency: Concurrency) -> None:
        """Go on with other caps, for the same agents; what is in flight beyond them is left to end."""
        self._settings = replace(self._settings, concurrency=concurrency)
        self._waiting.set_concurrency(concurrency)
        self._changed.set()

    def request_stop(self, *, at_once: bool = False) -> None:
        """Start no more rollouts and, after ten seconds or at once, let go of those in flight."""
        stop = Stop(StopKind.INTERRUPTED, "interrupted")
        self._stop(stop, 0.0 if at_once else GRACE_S)

    async def __aenter__(self) -> "Dispatch":
        loop = self._loop = asyncio.get_running_loop()
        settings = self._settings
        if settings.rollout_timeout_s is None:
            logger.warning("rollout_timeout_s is null: a rollout that never ends keeps the run from ending")
        if settings.run_timeout_s is not None:
            stop = Stop(StopKind.RUN_TIMEOUT, f"run_timeout_s={settings.run_timeout_s:g} is over")
            self._timers.append(loop.call_later(settings.run_timeout_s, self._stop, stop, 0.0))
        self._watchers = [loop.create_task(self._stall.watch(lambda: list(self._in_flight)))]
        if self._servers is not None:
            self._watchers.append(loop.create_task(self._stop_when_down(self._servers)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._start_no_more()
        for timer in self._timers:
            timer.cancel()
        for watcher in self._watchers:
            watcher.cancel()
        self._abandon()
        _, unwilling = await asyncio.wait([*self._watchers, *self._abandoned], timeout=_CANCELLED_WITHIN_S)
        if unwilling:
            logger.warning("%d calls could not be cancelled and were left behind", len(unwilling))

    def __aiter__(self) -> "Dispatch":
        return self

    async def __anext__(self) -> Attempt:
        while True:
            attempt = self._ended.popleft() if self._ended else None
            was_cut_short = self._start_waiting()
            if attempt is not None:
                return attempt
            if was_cut_short:
                await asyncio.sleep(0)
                continue
            if not self._in_flight and self._waiting.is_empty:
                break
            self._changed.clear()
            await self._changed.wait()
        if self._waiting.error is not None:
            raise self._waiting.error
        raise StopAsyncIteration

    def _start_waiting(self) -> bool:
        """Start what may start now; whether that was cut short to let the event loop turn."""
        for _ in range(_STARTS_AT_ONCE):
            if not self._has_room():
                return False
            trial = self._waiting.take()
            if trial is None:
                return False
            trial.started_s, trial.started_at_s = self._loop.time(), time.time()
            self._in_flight[trial] = self._loop.create_task(self._try(trial))
        return True

    def _has_room(self) -> bool:
        """Attempts that nobody has fetched yet take up room, too: a slow consumer slows the run down."""
        total = self._settings.concurrency.total
        if total is None:
            return len(self._ended) < MAX_SET_ASIDE
        return len(self._in_flight) + len(self._ended) < total

    async def _try(self, trial: Trial) -> None:
        timeout_s = self._settings.rollout_timeout_s
        result: Any = None
        failure: Failure | None = None
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                result = await self._post(trial.row)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failure = failure_of(error, trial.agent)  # something inside the call was cancelled, not the rollout
        except Exception as error:  # noqa: BLE001 - the one place that records a failed call as data
            if isinstance(error, TimeoutError) and deadline.expired() and timeout_s is not None:
                failure = rollout_timed_out(timeout_s, trial.agent)
            else:
                failure = failure_of(error, trial.agent)
        if failure is None and not isinstance(result, dict):
            failure = invalid_answer(result, trial.agent)
        self._end(trial, None if failure else result, failure)

    def _end(self, trial: Trial, result: Result | None, failure: Failure | None) -> None:
        if self._in_flight.pop(trial, None) is None:
            return  # it was let go before
        self._waiting.give_back_room(trial.agent)
        self._stall.sign_of_life(self._loop.time())
        if failure is None and self._servers is not None:
            self._servers.sign_of_life()
        is_final = failure is None or trial.number >= self._attempts_left(trial.row)
        attempt = Attempt(trial.row, result, failure, trial.started_at_s, time.time(), is_final)
        self._ended.append(attempt)
        stop = self._rules.after(verdict_on(attempt, trial.agent))
        if failure is not None:
            self._tell_of_first(trial, failure)
        if stop is not None:
            self._stop(stop, GRACE_S)
        if not is_final and self.stopped is None:
            self._pause(trial)
        self._changed.set()

    def _tell_of_first(self, trial: Trial, failure: Failure) -> None:
        """One line per agent and class, so that people need not wait for the end to learn what goes wrong."""
        kind = (trial.agent, failure.failure_class)
        if kind in self._told or failure.failure_class.dooms_agent:  # of the latter the stop rules tell
            return
        self._told.add(kind)
        logger.warning(
            "%s failed (%s): %s", rollout_name(trial.row), failure.failure_class, shown(failure.message, 500)
        )

    def _pause(self, trial: Trial) -> None:
        self._waiting.paused += 1
        pause_s = self._settings.pauses.after(trial.number)
        self._pauses[trial] = self._loop.call_later(pause_s, self._retry, trial)

    def _retry(self, trial: Trial) -> None:
        del self._pauses[trial]
        self._waiting.add_retry(trial.next())
        self._changed.set()

    def _stop(self, stop: Stop, grace_s: float) -> None:
        if self.stopped is None:
            self.stopped = stop
            self._start_no_more()
            if self._in_flight and grace_s:
                logger.warning(
                    "Stopping: %s. No new rollouts; the %d in flight get %g s", stop.message, self.in_flight, grace_s
                )
            else:
                logger.warning("Stopping: %s", stop.message)
        if grace_s:
            self._timers.append(self._loop.call_later(grace_s, self._abandon))
        else:
            self._abandon()
        self._changed.set()

    async def _stop_when_down(self, servers: ServerWatch) -> None:
        message = await servers.until_down(lambda: {trial.agent for trial in [*self._in_flight, *self._pauses]})
        self._stop(Stop(StopKind.SERVER_DOWN, message), 0.0)

    def _start_no_more(self) -> None:
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()
        self._waiting.close()

    def _abandon(self) -> None:
        """Let go of what is in flight; what has ended already is still handed out."""
        self._abandoned.extend(self._in_flight.values())
        for task in self._in_flight.values():
            task.cancel()
        self._in_flight.clear()
        self._changed.set()
