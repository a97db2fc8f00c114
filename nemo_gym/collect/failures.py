"""One attempt at a rollout, and what became of a `/run` that failed: a class, a message, and the server where it began.

A failure may have happened several servers away. Every hop passes on headers with the status, the server
and the exception class of the innermost failure, and those decide:

| class | recognised by |
|---|---|
| `connect` | no connection came about, a gateway found nobody behind it (502, 503), or no server has that name |
| `timeout` | an answer that did not come in time, also as 408 or 504 |
| `rate_limited` | 429 |
| `auth` | 401, 403 |
| `model_not_found` | 400, 404 or 422 in words that say the model does not exist; 404 of a model endpoint |
| `http_4xx` | any other 4xx: the request of this row is at fault |
| `server_gone` | the connection broke after the request was sent, or a restarted server lost the session |
| `invalid_response` | an answer that is not HTTP, not JSON, not an object, or larger than `max_response_bytes` |
| `invalid_reward` | a reward that is no finite number: NaN, infinity, null, text |
| `judge_failed` | an exception class that says so (`JudgeError` and the like) |
| `not_recorded` | a model call that was to be answered from a recording, and is not in it, or damaged there |
| `cancelled` | a person gave it up with `ng_control +cancel` |
| `straggler` | it was still in flight `straggler_grace_s` after `finish_at` of the run was done |
| `agent_error` | all else: an exception in a server, hence 5xx |

An attempt is known while it waits or is in flight, once it has ended, and as rules that end runs see it. The
failures of a run are counted by class, with one example each, for its last lines.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp

from nemo_gym.errors import GymError
from nemo_gym.http.errors import ServerCallError, ServerResponseError, readable
from nemo_gym.http.run_answers import VERIFY, VERIFY_REPEATEDLY, failed_in, partial_of, usage_in
from nemo_gym.jsonl import json_type
from nemo_gym.keys import (
    ATTEMPT_INDEX_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    TASK_INDEX_KEY_NAME,
    TIMING_KEY_NAME,
    USAGE_KEY_NAME,
)
from nemo_gym.retry import Backoff
from nemo_gym.runs.record import (
    FAILURE_MESSAGE_KEY,
    FAILURE_SERVER_KEY,
    FAILURE_STATUS_KEY,
    MAX_FAILURE_MESSAGE_LENGTH,
    NG_FAILURE_CLASS_KEY,
    PARTIAL_RESPONSE_KEY,
    REWARD_KEY,
    Failure,
    FailureClass,
    Outcome,
    Result,
    RolloutKey,
    Row,
    agent_name_of,
    failure_record,
    has_usable_reward,
    key_or_none,
    outcome_of,
    stamp,
    utc_text_of,
)
from nemo_gym.runs.spending import add_usage
from nemo_gym.terminal import shown, without_numbers

_WORDS_LENGTH = 1_500
"""Of an answer that is no message of ours, and may be a whole traceback."""
_CLASS_OF_EXCEPTION = {
    "ServerUnreachableError": FailureClass.CONNECT,
    "ServerRefNotFoundError": FailureClass.CONNECT,
    "ConnectionTimeoutError": FailureClass.CONNECT,
    "ClientConnectorError": FailureClass.CONNECT,
    "ConnectionRefusedError": FailureClass.CONNECT,
    "gaierror": FailureClass.CONNECT,
    "ServerCallTimeoutError": FailureClass.TIMEOUT,
    "TimeoutError": FailureClass.TIMEOUT,
    "ServerLostError": FailureClass.SERVER_GONE,
    "ClientConnectionError": FailureClass.SERVER_GONE,
    "ClientPayloadError": FailureClass.SERVER_GONE,
    "ConnectionError": FailureClass.SERVER_GONE,
    "ServerDisconnectedError": FailureClass.SERVER_GONE,
    "ConnectionResetError": FailureClass.SERVER_GONE,
    "BrokenPipeError": FailureClass.SERVER_GONE,
    "SessionLostError": FailureClass.SERVER_GONE,
    "MalformedResponseError": FailureClass.INVALID_RESPONSE,
    "NotHttpError": FailureClass.INVALID_RESPONSE,
    "ResponseTooLargeError": FailureClass.INVALID_RESPONSE,
    "MissingCallError": FailureClass.NOT_RECORDED,
    "DamagedRecordingError": FailureClass.NOT_RECORDED,
    # Clients that servers written elsewhere use: openai's and httpx's.
    "APIConnectionError": FailureClass.CONNECT,
    "ConnectError": FailureClass.CONNECT,
    "ConnectTimeout": FailureClass.CONNECT,
    "APITimeoutError": FailureClass.TIMEOUT,
    "ReadTimeout": FailureClass.TIMEOUT,
    "RateLimitError": FailureClass.RATE_LIMITED,
    "AuthenticationError": FailureClass.AUTH,
    "PermissionDeniedError": FailureClass.AUTH,
    "RemoteProtocolError": FailureClass.SERVER_GONE,
    "ReadError": FailureClass.SERVER_GONE,
}
"""By name, because the innermost exception is usually one of another process."""
_CLASS_OF_STATUS: dict[int, FailureClass] = {
    HTTPStatus.UNAUTHORIZED: FailureClass.AUTH,
    HTTPStatus.FORBIDDEN: FailureClass.AUTH,
    HTTPStatus.REQUEST_TIMEOUT: FailureClass.TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS: FailureClass.RATE_LIMITED,
    HTTPStatus.BAD_GATEWAY: FailureClass.CONNECT,
    HTTPStatus.SERVICE_UNAVAILABLE: FailureClass.CONNECT,
    HTTPStatus.GATEWAY_TIMEOUT: FailureClass.TIMEOUT,
}
_MAY_MEAN_NO_MODEL = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
_MODEL_ENDPOINT_ERROR = "ModelEndpointError"
_NO_MODEL = re.compile(
    r"model_not_found|invalid_model|(?:unknown|invalid|unsupported|no such) model|does not offer the model"
    r"|\b(?:models?|deployment)\b(?!\.\w).{0,200}?\b(?:not found|does not exist|is unknown|not available)",
    re.IGNORECASE | re.DOTALL,
)
"""Not any mention of a model: a prompt that exceeds "this model's context length" is the fault of one row."""
_CLASS_LENGTH = 40
_EXAMPLE_LENGTH = 500
_LONGEST_NAME = 100
_MESSAGE_BEGIN, _MESSAGE_END = 120, 220
_VERIFY_PATH = "/verify "
_TOLD_BY_AGENTS = ("calls", "calls_left_out")
_MAX_CLASSES = 50
_REST = "other classes"


@dataclass(frozen=True)
class RetryPauses(Backoff):
    """How long a failed rollout waits before it is tried again in the same run: up to half of it left to chance."""

    first_s: float = 2.0
    longest_s: float = 60.0
    certain: float = 0.5


def failure_of(error: BaseException, agent: str) -> Failure:
    """What an exception out of a call to `agent` amounts to."""
    if isinstance(error, aiohttp.ClientResponseError):
        return _of_answer(error, agent)
    server = error.server_name if isinstance(error, ServerCallError) else None
    names = [kind.__name__ for kind in type(error).__mro__]
    return Failure(_class_by_name(*names) or FailureClass.AGENT_ERROR, _cut(_words(error)), server=server or agent)


def fault_in(answer: object, agent: str, path: str = "/run") -> Failure | None:
    """What an answer amounts to that is no JSON object, or whose reward is no number; None when it is sound.

    An answer without any reward is: there are agents that do not score.
    """
    if not isinstance(answer, dict):
        kind = FailureClass.INVALID_RESPONSE
        message = f"with {json_type(answer)}, not with a JSON object: {answer!r}"
    elif has_usable_reward(answer) or outcome_of(answer) is not Outcome.SUCCESS:
        return None
    else:
        kind = FailureClass.INVALID_REWARD
        message = (
            f"with the reward {shown(repr(answer[REWARD_KEY]), 200)}, which is no finite number (NaN and infinity may "
            "arrive as None); a verifier that cannot judge must answer with an error"
        )
    who = f"agent {agent!r}" if path == "/run" else f"the environment of agent {agent!r}"
    return Failure(kind, _cut(f"{who} answered {path} {message}"), status=int(HTTPStatus.OK), server=agent)


def rollout_timed_out(timeout_s: float, agent: str) -> Failure:
    """What a rollout that took too long amounts to."""
    return Failure(
        FailureClass.TIMEOUT,
        f"agent {agent!r} did not finish the rollout within rollout_timeout_s={timeout_s:g}; "
        "look for what keeps it in that server's log, or allow more time",
        server=agent,
    )


def request_debug_summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """What may be shown of a row in a log: which rollout it is and whose, nothing of its content."""
    summary = {
        TASK_INDEX_KEY_NAME: row.get(TASK_INDEX_KEY_NAME),
        ROLLOUT_INDEX_KEY_NAME: row.get(ROLLOUT_INDEX_KEY_NAME),
        "agent_name": agent_name_of(row),
    }
    return {key: value for key, value in summary.items() if value is not None}


def rollout_name(row: Mapping[str, Any]) -> str:
    """A rollout as messages call it: `agent_a, task 3, rollout 0`."""
    task, rollout = row.get(TASK_INDEX_KEY_NAME, "?"), row.get(ROLLOUT_INDEX_KEY_NAME, "?")
    return shown(f"{agent_name_of(row)}, task {task}, rollout {rollout}")


def attempt_name(row: Mapping[str, Any]) -> str | None:
    """What agents are told that a rollout is called, beside the name of the run; None if it has no name."""
    task, rollout = row.get(TASK_INDEX_KEY_NAME), row.get(ROLLOUT_INDEX_KEY_NAME)
    if type(task) is not int or type(rollout) is not int:  # as data sets may number them
        if key_or_none(row) is None:
            return None
        return quote(f"{task}/{rollout}"[:_LONGEST_NAME])
    return f"{task}/{rollout}"


def _of_answer(error: aiohttp.ClientResponseError, agent: str) -> Failure:
    if not isinstance(error, ServerResponseError):
        body = getattr(error, "response_content", b"")
        text = readable(body if isinstance(body, bytes) else str(body))
        message = f"{_words(error)}: {text}" if text else _words(error)
        return Failure(_class_of(error.status, None, text), _cut(message), error.status, agent)
    where = failed_in(error)
    return Failure(
        _class_of(error.error_status, error.error_class, readable(error.response_content)),
        _cut(error.error_message or error.line(_WORDS_LENGTH)),
        error.error_status,
        error.error_server or agent,
        partial_of(error),
        VERIFY if where == VERIFY_REPEATEDLY else where,
        error.error_raised,
        _usage_in(error),
        where == VERIFY_REPEATEDLY,
    )


def _usage_in(error: ServerResponseError) -> dict[str, Any] | None:
    """Return what an error answer says that the attempt used, unless its partial response says it."""
    headers = [(name.encode("latin-1", "replace"), value.encode()) for name, value in (error.headers or {}).items()]
    record: Result = {PARTIAL_RESPONSE_KEY: partial_of(error)}
    add_usage(record, usage_in(headers))
    return record.get(USAGE_KEY_NAME)


def _class_of(status: int, exception_name: str | None, body: str) -> FailureClass:
    if exception_name is not None:
        by_name = _class_by_name(exception_name)
        if by_name is not None:
            return by_name
    is_missing = status == HTTPStatus.NOT_FOUND or exception_name == "NotFoundError"
    if (is_missing and exception_name == _MODEL_ENDPOINT_ERROR) or (
        (is_missing or status in _MAY_MEAN_NO_MODEL) and _NO_MODEL.search(body)
    ):
        return FailureClass.MODEL_NOT_FOUND
    other = FailureClass.HTTP_4XX if 400 <= status < 500 else FailureClass.AGENT_ERROR
    return _CLASS_OF_STATUS.get(status, other)


def _class_by_name(*names: str) -> FailureClass | None:
    for name in names:
        if name in _CLASS_OF_EXCEPTION:
            return _CLASS_OF_EXCEPTION[name]
        if "judge" in name.lower():
            return FailureClass.JUDGE_FAILED
    return None


def _words(error: BaseException) -> str:
    text = str(error)
    if not text:
        return type(error).__name__
    return text if isinstance(error, GymError) else f"{type(error).__name__}: {text}"


def _cut(message: str) -> str:
    limit = MAX_FAILURE_MESSAGE_LENGTH
    return message if len(message) <= limit else f"{message[: limit - 1]}…"


class TimesOfBefore(dict[str, Any]):
    """The times of a rollout that was made before, in place of those of the call that only scored it."""


class NotSentError(Exception):
    """Raised in place of an answer for a row that was never sent: there was no attempt, and it is left to be resumed.

    If it has a cause, nothing more can be sent: the run ends with that.
    """


class PendingAttempt:
    """One attempt at a rollout, from the moment its row is read."""

    __slots__ = ("agent", "began_s", "failed_as", "is_overdue", "number", "order", "row", "started_at_s", "started_s")

    def __init__(self, row: Row, agent: str, number: int = 1) -> None:
        self.row = row
        self.agent = agent
        self.number = number
        """Counted from 1 within this run."""
        self.failed_as = ""
        """The class of its failure, once it has failed."""
        self.order = 0
        """How many attempts of this run were started before it."""
        self.started_s = 0.0
        """On the event loop's clock, which stands still while the loop works."""
        self.began_s = 0.0
        """By `perf_counter`."""
        self.started_at_s = 0.0
        """Seconds since the epoch."""
        self.is_overdue = False
        """Whether it was cancelled because it took too long."""

    def start(self, loop_time_s: float) -> None:
        """It is sent now, which is that on the event loop's clock."""
        self.started_s, self.began_s, self.started_at_s = loop_time_s, time.perf_counter(), time.time()

    def ended(self, result: Result | None, failure: Failure | None, *, is_final: bool, is_timed: bool) -> "Attempt":
        """It has ended now; `is_timed` says that its row went out at once when it started."""
        took_s = time.perf_counter() - self.began_s if is_timed else None
        return Attempt(self.row, result, failure, self.started_at_s, time.time(), is_final, took_s)

    def next(self) -> "PendingAttempt":
        """The attempt after this one; its row says how many failed before, over all runs."""
        failed_before = self.row.get(ATTEMPT_INDEX_KEY_NAME) or 0
        return PendingAttempt({**self.row, ATTEMPT_INDEX_KEY_NAME: failed_before + 1}, self.agent, self.number + 1)


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
    duration_s: float | None = None
    """By a clock that nobody sets; None when it is not known when the row was sent."""

    def record(self) -> Result:
        """What to store: the agent's answer, or the sidecar line of the failure."""
        if self.failure is None:
            assert self.result is not None
            return self._timed(self.result)
        started_at = datetime.fromtimestamp(self.started_at_s, UTC)
        return failure_record(self.row, self.failure, started_at, datetime.fromtimestamp(self.ended_at_s, UTC))

    def _timed(self, result: Result) -> Result:
        """The result; a success is stamped and has its times, with those of its calls if the agent told them."""
        calls = result.pop(TIMING_KEY_NAME, None)
        if isinstance(calls, TimesOfBefore):
            if calls and outcome_of(result) is Outcome.SUCCESS:
                stamp(self.row, result)[TIMING_KEY_NAME] = dict(calls)
        elif self.duration_s is not None and outcome_of(result) is Outcome.SUCCESS:
            times: Result = {"started_at": utc_text_of(self.started_at_s), "duration_s": round(self.duration_s, 6)}
            if isinstance(calls, dict):
                for name in _TOLD_BY_AGENTS:
                    if name in calls:
                        times[name] = calls[name]
            stamp(self.row, result)[TIMING_KEY_NAME] = times  # the last thing on its line
        return result


class Verdict(NamedTuple):
    """What the rules look at: one attempt at a rollout."""

    agent: str
    key: RolloutKey | None
    """None for a row without indices, which then counts as a rollout of its own."""
    outcome: Outcome
    is_final: bool
    """False when the rollout will be tried again in this run."""
    failure_class: object = None
    message: str = ""
    cause: str = ""
    """What failures that only a change of something can cure have in common; empty for others."""
    order: int = 0
    """How many attempts were started before it."""


def verdict_on(attempt: Attempt, agent: str, order: int = 0, number: int = 1) -> Verdict:
    """Return the attempt as the stop rules see it; in this run it was attempt `number` at its rollout."""
    failure_class: Any
    cause = ""
    if attempt.failure is not None:
        outcome = Outcome.FAILURE
        failure_class, message = attempt.failure.failure_class, attempt.failure.message
        cause = _cause(attempt.failure, number)
    else:
        assert attempt.result is not None
        outcome = outcome_of(attempt.result)
        if outcome is not Outcome.FAILURE:
            return Verdict(agent, None, outcome, attempt.is_final)
        failure_class = attempt.result[NG_FAILURE_CLASS_KEY]
        message = f"{failure_class} {attempt.result.get(FAILURE_MESSAGE_KEY) or ''}"
    named = f"{rollout_name(attempt.row)}: {message}"
    key = key_or_none(attempt.row)
    return Verdict(agent, key, outcome, attempt.is_final, failure_class, named, cause, order)


def _cause(failure: Failure, number: int) -> str:
    """Return where and why it failed, without what differs between requests; empty if other rollouts may succeed.

    An exception over a verdict counts at once, any other when it has come again. Each rollout counts once in a run.
    """
    if failure.is_hopeless:
        return f"{failure.server} {failure.status} {without_numbers(failure.message)}"
    if failure.raised is None or failure.failure_class is not FailureClass.AGENT_ERROR:
        return ""
    counts_from = 1 if failure.raised.startswith(_VERIFY_PATH) or failure.failed_in == VERIFY else 2
    return f"{failure.server} {failure.raised}" if number == counts_from else ""


@dataclass
class FailuresOfClass:
    """The failures of one class."""

    example: str
    """The first of them, in printable characters."""
    attempts: int = 0
    rollouts: int = 0
    """Those that failed for good."""


class FailureTable:
    """Failures counted as they are recorded, whoever detected them."""

    def __init__(self) -> None:
        self.by_class: dict[str, FailuresOfClass] = {}

    def add(self, row: Mapping[str, Any], record: Mapping[str, Any], *, is_final: bool = True) -> None:
        """Count the sidecar line of one failed attempt; with `is_final` it was the last one at its rollout."""
        name = shown(record.get(NG_FAILURE_CLASS_KEY) or "(none)", _CLASS_LENGTH)
        if name not in self.by_class and len(self.by_class) >= _MAX_CLASSES:
            name = _REST
        if name not in self.by_class:
            self.by_class[name] = FailuresOfClass(_example(row, record))
        of_class = self.by_class[name]
        of_class.attempts += 1
        of_class.rollouts += is_final

    def reopen(self, failure_class: object) -> None:
        """A rollout that had failed like this for good is tried again after all."""
        of_class = self.by_class.get(shown(failure_class or "(none)", _CLASS_LENGTH), self.by_class.get(_REST))
        if of_class is not None:
            of_class.rollouts = max(0, of_class.rollouts - 1)

    def lines(self) -> list[str]:
        """The table, most frequent class first; empty when nothing failed."""
        if not self.by_class:
            return []
        width = max(len("class"), *map(len, self.by_class))
        ordered = sorted(self.by_class.items(), key=lambda item: (-item[1].attempts, item[0]))
        return [
            f"{'class':<{width}}  attempts  rollouts  example",
            *(
                f"{name:<{width}}  {of_class.attempts:>8}  {of_class.rollouts:>8}  {of_class.example}"
                for name, of_class in ordered
            ),
        ]


def _example(row: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    where = [rollout_name(row)]
    if record.get(FAILURE_SERVER_KEY) is not None:
        where.append(f"in {record[FAILURE_SERVER_KEY]}")
    if record.get(FAILURE_STATUS_KEY) is not None:
        where.append(f"status {record[FAILURE_STATUS_KEY]}")
    message = str(record.get(FAILURE_MESSAGE_KEY) or "no message")
    if len(message) > _MESSAGE_BEGIN + _MESSAGE_END:  # what failed stands first, and what to do about it last
        message = f"{message[:_MESSAGE_BEGIN]} … {message[-_MESSAGE_END:]}"
    return shown(f"{', '.join(where)}: {message}", _EXAMPLE_LENGTH)
