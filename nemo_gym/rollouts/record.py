"""What one rollout is called, what becomes of its result, and what a failure says about itself.

Three outcomes: a success goes to the rollouts file, a failure to the sidecar, and a discarded result
nowhere, so that the missing line makes it run again. A rollout that scored 0 is a success.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    ATTEMPT_INDEX_KEY_NAME,
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)

Row: TypeAlias = dict[str, Any]
"""One materialized input row, as sent to an agent's `/run`."""
Result: TypeAlias = dict[str, Any]
"""What the agent answered, plus the row's indices once it is stamped."""

NG_FAILURE_CLASS_KEY = "_ng_failure_class"
NG_NO_PERSIST_KEY = "_ng_no_persist"
NG_TERMINAL_KEY = "_ng_failure_terminal"
FAILURE_MESSAGE_KEY = "_ng_failure_message"
FAILURE_STATUS_KEY = "_ng_failure_status"
FAILURE_SERVER_KEY = "_ng_failure_server"
COUNTS_AS_ATTEMPT_KEY = "_ng_counts_as_attempt"
STARTED_AT_KEY = "_ng_started_at"
ENDED_AT_KEY = "_ng_ended_at"

MAX_FAILURE_MESSAGE_LENGTH = 2_000

_ALWAYS_STAMPED = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, AGENT_REF_KEY_NAME)
_STAMPED = (*_ALWAYS_STAMPED, ATTEMPT_INDEX_KEY_NAME, ROLLOUT_ID_KEY_NAME)


class RolloutKey(NamedTuple):
    """Identity of one rollout within a run."""

    task_index: Any
    """A whole number, unless the data set brought something else."""
    rollout_index: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "RolloutKey":
        """The key of a row or a result.

        Raises:
            KeyError: it carries no indices.
        """
        return cls(record[TASK_INDEX_KEY_NAME], record[ROLLOUT_INDEX_KEY_NAME])


def task_order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What to sort rows and results by: task, then repeat; numbers before text, records without indices last."""
    return (
        *_sortable(record.get(TASK_INDEX_KEY_NAME)),
        *_sortable(record.get(ROLLOUT_INDEX_KEY_NAME)),
    )


def _sortable(index: object) -> tuple[int, Any]:
    if isinstance(index, int | float):
        return 0, index
    return (1, index) if isinstance(index, str) else (2, 0)


def key_or_none(record: Any) -> RolloutKey | None:
    """The key of whatever stood on a line; None when it cannot be told which rollout it is."""
    try:
        key = RolloutKey(record[TASK_INDEX_KEY_NAME], record[ROLLOUT_INDEX_KEY_NAME])
        hash(key)
    except (KeyError, TypeError):
        return None
    return key


def agent_name_of(record: Mapping[str, Any]) -> str | None:
    """The agent a row goes to, or a result came from; None when the record does not say."""
    agent_ref = record.get(AGENT_REF_KEY_NAME)
    name = agent_ref.get("name") if isinstance(agent_ref, dict) else None
    return name if isinstance(name, str) else None


def stamp(row: Mapping[str, Any], result: Result) -> Result:
    """Write the row's identity onto its result, over whatever the agent put there; returns the same object."""
    for key in _STAMPED:
        if key in row:
            result[key] = row[key]
    return result


class Outcome(StrEnum):
    """What becomes of a result."""

    SUCCESS = "success"
    FAILURE = "failure"
    DISCARDED = "discarded"


def outcome_of(result: Mapping[str, Any]) -> Outcome:
    """Where a result belongs; any failure class counts, also an empty one."""
    if result.get(NG_NO_PERSIST_KEY):
        return Outcome.DISCARDED
    if result.get(NG_FAILURE_CLASS_KEY) is not None:
        return Outcome.FAILURE
    return Outcome.SUCCESS


class FailureClass(StrEnum):
    """Failures that the collector itself detects; agents report classes of their own."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    AUTH = "auth"
    MODEL_NOT_FOUND = "model_not_found"
    HTTP_4XX = "http_4xx"
    AGENT_ERROR = "agent_error"
    INVALID_RESPONSE = "invalid_response"
    SERVER_GONE = "server_gone"
    JUDGE_FAILED = "judge_failed"

    @property
    def is_infrastructure(self) -> bool:
        """Whether it says nothing about the rollout, so that it never counts towards the cap on resume."""
        return self in _INFRASTRUCTURE

    @property
    def dooms_agent(self) -> bool:
        """Whether an agent whose first rollouts all fail like this cannot succeed at all."""
        return self in _DOOMS_AGENT


_INFRASTRUCTURE = {
    FailureClass.CONNECT,
    FailureClass.TIMEOUT,
    FailureClass.RATE_LIMITED,
    FailureClass.SERVER_GONE,
}
_DOOMS_AGENT = {FailureClass.AUTH, FailureClass.MODEL_NOT_FOUND}


@dataclass(frozen=True)
class Failure:
    """A failed `/run`, as far as the collector can tell."""

    failure_class: FailureClass
    message: str
    status: int | None = None
    """The HTTP status of the innermost failure, if there was an answer."""
    server: str | None = None
    """The server in which it happened, if known."""


def failure_record(row: Mapping[str, Any], failure: Failure, started_at: datetime, ended_at: datetime) -> Result:
    """The sidecar line for a failure that the collector detected; it never holds a reward."""
    record: Result = {
        NG_FAILURE_CLASS_KEY: failure.failure_class.value,
        FAILURE_MESSAGE_KEY: failure.message[:MAX_FAILURE_MESSAGE_LENGTH],
        FAILURE_STATUS_KEY: failure.status,
        FAILURE_SERVER_KEY: failure.server,
    }
    if failure.failure_class.is_infrastructure:
        record[COUNTS_AS_ATTEMPT_KEY] = False
    record[STARTED_AT_KEY] = utc_text(started_at)
    record[ENDED_AT_KEY] = utc_text(ended_at)
    return stamp(row, record)


def utc_text(moment: datetime) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
