"""Send rows to their agents, as many at once as the caps allow, and hand back every attempt as it ends.

    async with Dispatch(rows, post, settings) as attempts:
        async for attempt in attempts:
            store.append(attempt.row, attempt.record())

A failed call is an attempt like any other: it is handed out, and the rollout is tried again after a pause in which
others run, unless the same request would only be refused again. Rows are read as room for them appears, and only while
attempts are consumed. Every wait has an end: that of a rollout, of the run, of what a stop finds in flight.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeAlias

from nemo_gym.collect.admission import MAX_SET_ASIDE, WaitingRows
from nemo_gym.collect.failures import (
    Attempt,
    NotSentError,
    PendingAttempt,
    RetryPauses,
    failure_of,
    fault_in,
    rollout_name,
    rollout_timed_out,
    verdict_on,
)
from nemo_gym.collect.policies import Policy
from nemo_gym.collect.server_watch import ServerWatch
from nemo_gym.collect.stopping import STALLED_AFTER_S, Probe, StallWatch, Stop, StopKind, StopRules
from nemo_gym.runs.options import (
    DEFAULT_CONCURRENCY,
    DEFAULT_MAX_ROLLOUT_ATTEMPTS,
    DEFAULT_ROLLOUT_TIMEOUT_S,
    Concurrency,
    SharedRolloutCollectionConfig,
)
from nemo_gym.runs.record import Failure, FailureClass, Outcome, Result, Row, outcome_of
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""What rollouts in flight are given when the run is stopped."""
_STARTS_AT_ONCE = 256
_MANY_IN_FLIGHT = 32
_GATHERED_FOR_S = 0.002
"""While as many are in flight, what has ended waits so long for others that end: many in a row take less than each by
itself, and agents have enough to do meanwhile."""
_CANCELLED_WITHIN_S = 5.0
Post: TypeAlias = Callable[[Row], Awaitable[Any]]
"""Sends one row to its agent and returns the decoded answer; whatever it raises, but `NotSentError`, is a failed
attempt."""


@dataclass(frozen=True)
class DispatchSettings:
    """How many at once, how long, how often, and when to give up on the whole."""

    concurrency: Concurrency = field(default_factory=lambda: Concurrency(total=DEFAULT_CONCURRENCY))
    rollout_timeout_s: float | None = DEFAULT_ROLLOUT_TIMEOUT_S
    post_keeps_time: bool = False
    """Whether it is for `post` to give up after `rollout_timeout_s`, since only it knows when a call begins."""
    run_timeout_s: float | None = None
    fail_fast: bool = False
    max_failure_fraction: float | None = None
    has_succeeded_before: bool = False
    """Whether an earlier run has finished some of the rollouts, so that the settings cannot be all wrong."""
    pauses: RetryPauses = field(default_factory=RetryPauses)
    stalled_after_s: float = STALLED_AFTER_S
    path: str = "/run"
    """What is asked, for messages about answers."""

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
        policies: Sequence[Policy] = (),
    ) -> None:
        """`attempts_left` says how often a rollout may be tried in this run; `probe` is for the stall watch.

        `servers` are watched, if given: when one that is needed is down, the run is stopped. `policies` go along.
        """
        self._settings = settings or DispatchSettings()
        self._post = post
        self._attempts_left = attempts_left
        self._waiting = WaitingRows(rows, self._settings.concurrency)
        self._in_flight: dict[PendingAttempt, asyncio.Task[None]] = {}
        self._starts = 0
        self._ended: deque[Attempt] = deque()
        self._pauses: dict[PendingAttempt, asyncio.TimerHandle] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._run_timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        """Of the rollout that has been out longest, or of one that was: they are few, and rollouts many."""
        self._abandoned: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._told: set[tuple[str, FailureClass]] = set()
        self._rules = StopRules(
            self._settings.fail_fast,
            self._settings.max_failure_fraction,
            has_succeeded=self._settings.has_succeeded_before,
        )
        self._stall = StallWatch(self._settings.stalled_after_s, probe)
        self._servers = servers
        self._policies = policies
        self._choosers = [policy for policy in policies if type(policy).leaves_out is not Policy.leaves_out]
        self._attendants = [policy for policy in policies if type(policy).started is not Policy.started]
        self._holders = [policy for policy in policies if type(policy).holds_back is not Policy.holds_back]
        self._judges = [policy for policy in policies if type(policy).ended is not Policy.ended]
        self.stopped: Stop | None = None
        """Why the run ended early; None when it did not."""
        self.left_out = 0
        """Rollouts that were not sent because a policy had no need of them any more."""

    @property
    def policies(self) -> Sequence[Policy]:
        """The policies that go along with the run, in the order in which they are asked."""
        return self._policies

    @property
    def in_flight(self) -> int:
        """Rollouts that are with their agents now."""
        return len(self._in_flight)

    @property
    def attempts_in_flight(self) -> Sequence[PendingAttempt]:
        """The same one by one, the oldest first."""
        return list(self._in_flight)

    @property
    def awaiting_retry(self) -> int:
        """Rollouts that failed and will be tried again."""
        return len(self._pauses)

    @property
    def awaiting_retry_by_class(self) -> Mapping[str, int]:
        """The same by why they failed."""
        return Counter(pending.failed_as for pending in self._pauses)

    @property
    def in_flight_by_agent(self) -> Mapping[str, int]:
        """Rollouts in flight by agent, of the agents that have caps of their own."""
        return self._waiting.running_by_agent

    @property
    def is_draining(self) -> bool:
        """Whether nothing is left to start."""
        return self._waiting.is_empty

    @property
    def concurrency(self) -> Concurrency:
        """The caps that hold now."""
        return self._settings.concurrency

    @property
    def servers(self) -> ServerWatch | None:
        """Who watches the servers, if anybody does."""
        return self._servers

    @property
    def settings(self) -> DispatchSettings:
        """The settings that hold now, changes since the start included."""
        return self._settings

    def set_concurrency(self, concurrency: Concurrency) -> None:
        """Go on with other caps; what is in flight beyond them is left to end."""
        self._settings = replace(self._settings, concurrency=concurrency)
        self._waiting.set_concurrency(concurrency, (pending.agent for pending in self._in_flight))
        self._changed.set()

    def set_rollout_timeout(self, timeout_s: float | None) -> None:
        """Give up on rollouts after so long from now on, those in flight among them."""
        self._settings = replace(self._settings, rollout_timeout_s=timeout_s)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._await_deadline()

    def set_stop_rules(self, *, fail_fast: bool, max_failure_fraction: float | None) -> None:
        """Have the run end at other failures from now on."""
        self._rules.fail_fast, self._rules.max_failure_fraction = fail_fast, max_failure_fraction

    def set_run_timeout(self, timeout_s: float | None) -> None:
        """End the run so long after it began, at once if that is over."""
        self._settings = replace(self._settings, run_timeout_s=timeout_s)
        if self._run_timer is not None:
            self._run_timer.cancel()
            self._run_timer = None
        if timeout_s is not None:
            stop = Stop(StopKind.RUN_TIMEOUT, f"run_timeout_s={timeout_s:g} is over")
            self._run_timer = self._loop.call_at(self._began_s + timeout_s, self._stop, stop, 0.0)

    def set_run_end(self, left_s: float | None) -> None:
        """The same, so long from now."""
        self.set_run_timeout(None if left_s is None else self._loop.time() - self._began_s + left_s)

    def try_first(self, rows: Iterable[Row]) -> None:
        """Send rows that the run was not going to send any more, before all that are left."""
        self._waiting.put_first(rows)
        self._changed.set()

    def look_again(self) -> None:
        """What a policy held back may be able to start now."""
        self._changed.set()

    def give_up(self, pending: PendingAttempt, failure: Failure) -> None:
        """Let go of one attempt in flight and record that as the end of its rollout in this run."""
        task = self._in_flight.get(pending)
        if task is not None:
            self._end(pending, None, failure, is_last=True)
            self._abandoned.append(task)
            task.cancel()

    def request_stop(self, *, at_once: bool = False, why: str = "interrupted") -> None:
        """Start no more rollouts and, after ten seconds or at once, let go of those in flight."""
        stop = Stop(StopKind.INTERRUPTED, why)
        self._stop(stop, 0.0 if at_once else GRACE_S)

    async def __aenter__(self) -> "Dispatch":
        loop = self._loop = asyncio.get_running_loop()
        settings = self._settings
        if settings.rollout_timeout_s is None:
            logger.warning("rollout_timeout_s is null: a rollout that never ends keeps the run from ending")
        self._began_s = loop.time()
        self.set_run_timeout(settings.run_timeout_s)
        self._watchers = [loop.create_task(self._stall.watch(lambda: list(self._in_flight)))]
        if self._servers is not None:
            self._watchers.append(loop.create_task(self._stop_when_down(self._servers)))
        for policy in self._policies:
            policy.begin(self)
            self._watchers.append(loop.create_task(self._let_act(policy)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._start_no_more()
        self.set_run_timeout(None)
        if self._deadline is not None:
            self._deadline.cancel()
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
            if len(self._in_flight) >= _MANY_IN_FLIGHT:
                await asyncio.sleep(_GATHERED_FOR_S)
        if self._waiting.error is not None:
            raise self._waiting.error
        raise StopAsyncIteration

    def _start_waiting(self) -> bool:
        """Start what may start now; whether that was cut short to let the event loop turn."""
        for _ in range(_STARTS_AT_ONCE):
            if not self._has_room():
                return False
            for policy in self._holders:
                if policy.holds_back():
                    return False
            pending = self._waiting.take()
            if pending is None:
                return False
            if self._choosers and any(policy.leaves_out(pending.row) for policy in self._choosers):
                self._waiting.give_back_room(pending.agent)
                self.left_out += 1
                continue
            pending.start(self._loop.time())
            pending.order, self._starts = self._starts, self._starts + 1
            self._in_flight[pending] = self._loop.create_task(self._try(pending))
            if self._deadline is None:
                self._await_deadline()
            for policy in self._attendants:
                policy.started(pending)
        return True

    def _has_room(self) -> bool:
        """Attempts that nobody has fetched yet take up room, too: a slow consumer slows the run down."""
        total = self._settings.concurrency.total
        if total is None:
            return len(self._ended) < MAX_SET_ASIDE
        return len(self._in_flight) + len(self._ended) < total

    def _await_deadline(self) -> None:
        """Come back when the rollout that has been out longest is to be given up; they are in order of their starts."""
        timeout_s, self._deadline = self._settings.rollout_timeout_s, None
        oldest = next((pending for pending in self._in_flight if not pending.is_overdue), None)
        if timeout_s is not None and oldest is not None and not self._settings.post_keeps_time:
            self._deadline = self._loop.call_at(oldest.started_s + timeout_s, self._cancel_overdue, timeout_s)

    def _cancel_overdue(self, timeout_s: float) -> None:
        began_before_s = self._loop.time() - timeout_s
        for pending, task in self._in_flight.items():
            if pending.started_s > began_before_s:
                break
            if not pending.is_overdue:
                pending.is_overdue = True
                task.cancel()
        self._await_deadline()

    async def _try(self, pending: PendingAttempt) -> None:
        result: Any = None
        failure: Failure | None = None
        try:
            result = await self._post(pending.row)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            is_cancelled = task is None or task.cancelling() > pending.is_overdue
            if is_cancelled:
                raise
            # otherwise it took too long, or something inside the call was cancelled, not the rollout
            failure = self._timed_out(pending) if pending.is_overdue else failure_of(error, pending.agent)
        except NotSentError as error:
            self._leave(pending, error.__cause__)
            return
        except Exception as error:  # noqa: BLE001 - the one place that records a failed call as data
            is_late = isinstance(error, TimeoutError) and pending.is_overdue
            failure = self._timed_out(pending) if is_late else failure_of(error, pending.agent)
        if failure is None:
            failure = fault_in(result, pending.agent, self._settings.path)
        self._end(pending, None if failure else result, failure)

    def _timed_out(self, pending: PendingAttempt) -> Failure:
        return rollout_timed_out(self._settings.rollout_timeout_s or 0.0, pending.agent)

    def _end(
        self, pending: PendingAttempt, result: Result | None, failure: Failure | None, *, is_last: bool = False
    ) -> None:
        if self._in_flight.pop(pending, None) is None:
            return  # it was let go before
        self._waiting.give_back_room(pending.agent)
        self._stall.sign_of_life(self._loop.time())
        if failure is None and self._servers is not None:
            self._servers.sign_of_life(pending.agent)
        is_final = is_last or failure is None or failure.is_final_in_run
        is_final = is_final or pending.number >= self._attempts_left(pending.row)
        attempt = pending.ended(result, failure, is_final=is_final, is_timed=not self._settings.post_keeps_time)
        self._ended.append(attempt)
        if failure is None and result is not None and outcome_of(result) is Outcome.SUCCESS:
            stop = self._rules.after_success(pending.agent, is_final=is_final)
        else:
            oldest = next(iter(self._in_flight), None)
            verdict = verdict_on(attempt, pending.agent, pending.order, pending.number)
            stop = self._rules.after(verdict, self._starts if oldest is None else oldest.order)
        if failure is not None:
            self._tell_of_first(pending, failure)
        if stop is not None:
            self._stop(stop, GRACE_S)
        for policy in self._judges:
            enough = policy.ended(pending, attempt)
            if enough is not None:
                self._stop(enough, None)
        if failure is not None and not is_final and self.stopped is None:
            pending.failed_as = failure.failure_class.value
            self._pause(pending)
        self._changed.set()

    def _leave(self, pending: PendingAttempt, problem: BaseException | None) -> None:
        """Go on without a rollout that was not sent or, if there is a problem, end with that."""
        if self._in_flight.pop(pending, None) is None:
            return
        self._waiting.give_back_room(pending.agent)
        if problem is not None:
            self._waiting.error = self._waiting.error or problem
            self._start_no_more()
        self._changed.set()

    def _tell_of_first(self, pending: PendingAttempt, failure: Failure) -> None:
        """One line per agent and class, so that people need not wait for the end to learn what goes wrong."""
        kind = (pending.agent, failure.failure_class)
        if kind in self._told or failure.failure_class.dooms_agent:  # of the latter the stop rules tell
            return
        self._told.add(kind)
        logger.warning(
            "%s failed (%s)%s: %s",
            rollout_name(pending.row),
            failure.failure_class,
            "" if failure.server in (None, pending.agent) else f" in {shown(failure.server)}",
            shown(failure.message, 1_000),
        )

    def _pause(self, pending: PendingAttempt) -> None:
        self._waiting.paused += 1
        pause_s = self._settings.pauses.after(pending.number)
        self._pauses[pending] = self._loop.call_later(pause_s, self._retry, pending)

    def _retry(self, pending: PendingAttempt) -> None:
        del self._pauses[pending]
        self._waiting.add_retry(pending.next())
        self._changed.set()

    def stop(self, stop: Stop) -> None:
        """Start no more rollouts and let those in flight end, however long they take."""
        self._stop(stop, None)

    def _stop(self, stop: Stop, grace_s: float | None) -> None:
        """`grace_s` is what rollouts in flight are given; None lets them end."""
        if self.stopped is None:
            self.stopped = stop
            self._start_no_more()
            if self._in_flight and grace_s is None:
                logger.warning(
                    "Stopping: %s. No new rollouts; the %d in flight are waited for", stop.message, self.in_flight
                )
            elif self._in_flight and grace_s:
                logger.warning(
                    "Stopping: %s. No new rollouts; the %d in flight get %g s", stop.message, self.in_flight, grace_s
                )
            else:
                logger.warning("Stopping: %s", stop.message)
        if grace_s is None:
            pass
        elif grace_s:
            self._timers.append(self._loop.call_later(grace_s, self._abandon))
        else:
            self._abandon()
        self._changed.set()

    async def _let_act(self, policy: Policy) -> None:
        try:
            await policy.act()
        except Exception as error:  # noqa: BLE001 - the rollouts matter more than who goes along with them
            logger.warning("%s has ended and has no effect any more: %r", type(policy).__name__, error)

    async def _stop_when_down(self, servers: ServerWatch) -> None:
        message = await servers.until_down(lambda: {pending.agent for pending in [*self._in_flight, *self._pauses]})
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
