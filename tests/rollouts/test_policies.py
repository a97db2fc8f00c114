"""What goes along with a run may hold it back, leave rollouts out, give them up, and end it."""

import asyncio

import pytest

from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.failures import Attempt, PendingAttempt
from nemo_gym.collect.policies import Policy
from nemo_gym.collect.stopping import Stop, StopKind
from nemo_gym.runs.record import Failure, FailureClass, Row
from tests.rollouts.dispatch_fakes import Agent, collect, for_ever, now_s, row_of, rows_of, run, settings, tasks_of

ENOUGH = Stop(StopKind.RUN_TIMEOUT, "enough")


class Recorder(Policy):
    """Notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def started(self, pending: PendingAttempt) -> None:
        self.seen.append(("started", pending.row["_ng_task_index"]))

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        self.seen.append(("ended", attempt.row["_ng_task_index"]))
        return None


class HoldsBackUntil(Policy):
    """Lets nothing start before a moment."""

    def __init__(self, moment_s: float) -> None:
        self._moment_s = moment_s
        self._is_over = False

    def begin(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    async def act(self) -> None:
        await asyncio.sleep(self._moment_s - now_s())
        self._is_over = True
        self._dispatch.look_again()

    def holds_back(self) -> bool:
        return not self._is_over


class EndsAfter(Policy):
    """Has enough after so many attempts."""

    def __init__(self, attempts: int) -> None:
        self._left = attempts

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        self._left -= 1
        return None if self._left else ENOUGH


class GivesUpAfter(Policy):
    """Gives up on what is in flight after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begin(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    async def act(self) -> None:
        await asyncio.sleep(self._seconds)
        for pending in self._dispatch.attempts_in_flight:
            self._dispatch.give_up(pending, Failure(FailureClass.TIMEOUT, "too slow"))


class OnlyEven(Policy):
    """Needs only every other task."""

    def leaves_out(self, row: Row) -> bool:
        return bool(row["_ng_task_index"] % 2)


class Breaks(Policy):
    """Cannot go along."""

    async def act(self) -> None:
        raise RuntimeError("out of order")


def test_a_policy_sees_every_attempt_start_and_end() -> None:
    recorder = Recorder()

    run(collect(Dispatch(rows_of(2), Agent(), settings(1), policies=[recorder])))

    assert recorder.seen == [("started", 0), ("ended", 0), ("started", 1), ("ended", 1)]


def test_what_is_held_back_starts_when_the_dispatcher_looks_again() -> None:
    starts: list[float] = []

    async def note(row: Row) -> Row:
        starts.append(now_s())
        return {"reward": 1.0}

    attempts = run(collect(Dispatch(rows_of(3), note, settings(), policies=[HoldsBackUntil(1_050.0)])))

    assert tasks_of(attempts) == [0, 1, 2]
    assert starts == [1_050.0] * 3


def test_what_is_not_needed_is_not_sent_and_is_counted() -> None:
    agent = Agent()
    dispatch = Dispatch(rows_of(5), agent, settings(1), policies=[OnlyEven()])

    attempts = run(collect(dispatch))

    assert tasks_of(attempts) == [row["_ng_task_index"] for row in agent.started] == [0, 2, 4]
    assert dispatch.left_out == 2


def test_after_a_policy_has_enough_what_is_in_flight_ends_however_long_it_takes() -> None:
    async def answer(row: Row) -> Row:
        await asyncio.sleep(3_600.0 * row["_ng_task_index"])
        return {"reward": 1.0}

    dispatch = Dispatch(rows_of(9), answer, settings(3), policies=[EndsAfter(1)])

    attempts = run(collect(dispatch))

    assert tasks_of(attempts) == [0, 1, 2]
    assert dispatch.stopped == ENOUGH


def test_giving_up_on_a_rollout_in_flight_cancels_it_and_records_why() -> None:
    agent = Agent(for_ever)

    attempts = run(collect(Dispatch([row_of(0)], agent, settings(), policies=[GivesUpAfter(60)])))

    assert [attempt.record()["_ng_failure_message"] for attempt in attempts] == ["too slow"]
    assert attempts[0].is_final
    assert len(agent.cancelled) == 1


def test_a_policy_that_breaks_is_named_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    attempts = run(collect(Dispatch(rows_of(2), Agent(), settings(), policies=[Breaks()])))

    assert len(attempts) == 2
    assert "Breaks has ended" in caplog.text
    assert "out of order" in caplog.text
