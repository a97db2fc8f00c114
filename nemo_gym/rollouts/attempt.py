"""One attempt at a rollout that has ended, as it is handed to whoever stores and shows it."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

from nemo_gym.rollouts.failures import rollout_name
from nemo_gym.rollouts.record import (
    FAILURE_MESSAGE_KEY,
    NG_FAILURE_CLASS_KEY,
    Failure,
    Outcome,
    Result,
    Row,
    failure_record,
    key_or_none,
    outcome_of,
)
from nemo_gym.rollouts.stop_rules import Verdict


class Attempt(NamedTuple):
    """It ended with an answer, or with a failure that the collector detected."""

    row: Row
    result: Result | None
    failure: Failure | None
    started_at_s: float
    """Seconds since the epoch, as `ended_at_s`."""
    ended_at_s: float
    is_final: bool
    """False when the rollout is to be tried again; if the run stops before that, it is left to be resumed."""

    def record(self) -> Result:
        """What to store: the agent's answer, or the sidecar line of the failure."""
        if self.failure is None:
            assert self.result is not None
            return self.result
        started_at = datetime.fromtimestamp(self.started_at_s, UTC)
        return failure_record(self.row, self.failure, started_at, datetime.fromtimestamp(self.ended_at_s, UTC))


def verdict_on(attempt: Attempt, agent: str) -> Verdict:
    """The attempt as the stop rules see it."""
    failure_class: Any
    if attempt.failure is not None:
        outcome = Outcome.FAILURE
        failure_class, message = attempt.failure.failure_class, attempt.failure.message
    else:
        assert attempt.result is not None
        outcome = outcome_of(attempt.result)
        if outcome is not Outcome.FAILURE:
            return Verdict(agent, None, outcome, attempt.is_final)
        failure_class = attempt.result[NG_FAILURE_CLASS_KEY]
        message = f"{failure_class} {attempt.result.get(FAILURE_MESSAGE_KEY) or ''}"
    named = f"{rollout_name(attempt.row)}: {message}"
    return Verdict(agent, key_or_none(attempt.row), outcome, attempt.is_final, failure_class, named)
