"""What became of a `/run` that failed: one class, one message, the status and the server where it began.

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
| `invalid_response` | an answer that is not JSON, or not an object |
| `judge_failed` | an exception class that says so (`JudgeError` and the like) |
| `agent_error` | all else: an exception in a server, hence 5xx |
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from nemo_gym.errors import GymError
from nemo_gym.http.errors import ServerCallError, ServerResponseError
from nemo_gym.jsonl import json_type
from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.rollouts.record import MAX_FAILURE_MESSAGE_LENGTH, Failure, FailureClass, agent_name_of
from nemo_gym.terminal import shown

_BODY_LENGTH = 1_500

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


@dataclass(frozen=True)
class RetryPauses:
    """How long a failed rollout waits before it is tried again in the same run."""

    first_s: float = 2.0
    longest_s: float = 60.0

    def after(self, attempts: int) -> float:
        """A pause after that many attempts: twice as long each time, less up to half of it at random."""
        whole = min(self.first_s * 2.0 ** min(attempts - 1, 32), self.longest_s)
        return whole * random.uniform(0.5, 1.0)  # noqa: S311, RUF100


def failure_of(error: BaseException, agent: str) -> Failure:
    """What an exception out of a call to `agent` amounts to."""
    if isinstance(error, aiohttp.ClientResponseError):
        return _of_answer(error, agent)
    server = error.server_name if isinstance(error, ServerCallError) else None
    names = [kind.__name__ for kind in type(error).__mro__]
    return Failure(_class_by_name(*names) or FailureClass.AGENT_ERROR, _cut(_words(error)), server=server or agent)


def invalid_answer(answer: object, agent: str) -> Failure:
    """What an answer that is no JSON object amounts to."""
    return Failure(
        FailureClass.INVALID_RESPONSE,
        _cut(f"agent {agent!r} answered /run with {json_type(answer)}, not with a JSON object: {answer!r}"),
        status=int(HTTPStatus.OK),
        server=agent,
    )


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


def _of_answer(error: aiohttp.ClientResponseError, agent: str) -> Failure:
    if not isinstance(error, ServerResponseError):
        body = getattr(error, "response_content", b"")
        text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
        message = f"{_words(error)}: {text}" if text else _words(error)
        return Failure(_class_of(error.status, None, text), _cut(message), error.status, agent)
    body_text = error.response_content.decode(errors="replace")
    message = str(error).removesuffix(error.excerpt()) + error.excerpt(_BODY_LENGTH)
    return Failure(
        _class_of(error.error_status, error.error_class, body_text),
        _cut(message),
        error.error_status,
        error.error_server or agent,
    )


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
