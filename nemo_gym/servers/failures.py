"""What a server answers when something in it failed: JSON that says what, and headers that say where."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import PurePath
from typing import Any

import aiohttp
import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.requests import Request
from starlette.types import Scope

from nemo_gym.errors import GymError
from nemo_gym.http import run_answers
from nemo_gym.http.errors import (
    ERROR_CLASS_HEADER,
    ERROR_SERVER_HEADER,
    ERROR_STATUS_HEADER,
    ServerResponseError,
    excerpt,
    failure_headers,
    place_of,
    raised_in,
    unwrapped,
)
from nemo_gym.log import SAME_AS
from nemo_gym.rollout_correlation import without_rollout_prefix
from nemo_gym.terminal import without_numbers

logger = logging.getLogger(__name__)

_ERROR_SERVER_HEADER = ERROR_SERVER_HEADER.encode()


def json_response(content: Any, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; what JSON cannot hold is shown as text."""
    body = orjson.dumps(content, default=repr, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers=headers, media_type="application/json")


class Failures:
    """What a server says when something in it failed."""

    def __init__(self, server_key: str, instance_name: str, log_folder: object = None) -> None:
        """Name the server's log in messages if it is in a `log_folder`; otherwise it is what the launcher prints."""
        self.server_key = server_key
        self.instance_name = instance_name
        self._log = f"{PurePath(str(log_folder), instance_name)}.log" if log_folder else "its log"

    def origin_headers(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """What an error answer of this server's own needs in addition, to say that it failed here."""
        if any(name.lower() == _ERROR_SERVER_HEADER for name, _ in headers):
            return []
        return [
            (ERROR_STATUS_HEADER.encode(), str(status).encode()),
            (_ERROR_SERVER_HEADER, self.instance_name.encode("ascii", "replace")),
            (ERROR_CLASS_HEADER.encode(), b"HTTPException"),
        ]

    def answer(self, error: BaseException, scope: Scope) -> Response:
        """The 500 that callers, and models reading a tool's output, know."""
        path = without_rollout_prefix(scope["path"])
        content = getattr(error, "response_content", None)
        if isinstance(content, bytes):
            text = f"Hit an exception in {self.server_key} calling an inner server: {unwrapped(content)!r}"
        else:
            text = repr(error) if isinstance(error, Exception) else "An unknown error occurred"
        headers = failure_headers(error, self.instance_name, self._line(error, path), _raised(error, path))
        partial_response = run_answers.partial_of(error)
        if partial_response is not None and run_answers.partial_is_wanted(scope["headers"]):
            kept = run_answers.bounded_response(partial_response)
            if kept is not None:
                both: dict[str, Any] = {"error": text, "partial_response": kept}
                both |= run_answers.told_of_call(run_answers.failed_in(error))
                return json_response(
                    both, HTTPStatus.INTERNAL_SERVER_ERROR, {**headers, run_answers.HAS_PARTIAL: "true"}
                )
        return json_response(text, HTTPStatus.INTERNAL_SERVER_ERROR, headers)

    def _line(self, error: BaseException, path: str) -> str:
        """The failure on one line; it is logged where it began, and there once for all that are alike."""
        kind = _raised(error, path)
        if kind:
            line = raised_in(error, path, self._log)
            logger.error(
                "%s: %s raised %s",
                self.instance_name,
                path,
                type(error).__name__,
                exc_info=error,
                extra={SAME_AS: f"{self.instance_name} {kind}"},
            )
            return line
        line = str(error)
        logger.log(
            logging.DEBUG if _is_told_elsewhere(error) else logging.WARNING,
            "%s: %s failed: %s",
            self.instance_name,
            path,
            line,
            extra={SAME_AS: f"{self.instance_name} {path} {without_numbers(line)}"},
        )
        return line


def _raised(error: BaseException, path: str) -> str:
    """Return path, class and line of code of an exception that nobody expected; empty for one that is expected."""
    if isinstance(error, GymError | aiohttp.ClientResponseError):
        return ""
    return f"{path} {type(error).__name__} {place_of(error)}"


def _is_told_elsewhere(error: BaseException) -> bool:
    """Whether the server where a failure began has logged it, or the first that was told of it.

    What an author's code refuses with an `HTTPException` is often part of the play, such as a tool's answer to a model,
    and becomes worth a line only when it makes a caller fail. A body that is not understood is logged where it came.
    """
    if not isinstance(error, ServerResponseError) or error.error_server is None:
        return False
    is_refusal = error.error_class == "HTTPException" and error.error_status != HTTPStatus.UNPROCESSABLE_ENTITY
    return not is_refusal or error.status != error.error_status


async def answer_validation_error(request: Request, error: Exception) -> Response:
    """422 in FastAPI's shape, whatever the validator raised; the log gets the places, not the body."""
    errors: Sequence[Any] = error.errors() if isinstance(error, RequestValidationError) else [{"msg": str(error)}]
    shown = [{key: value for key, value in item.items() if key not in ("input", "url")} for item in errors]
    logger.warning("%s refused: %s", request.url.path, excerpt(orjson.dumps(shown, default=repr)))
    for item in shown:
        if isinstance(item.get("ctx"), dict):
            item["ctx"] = {key: str(value) for key, value in item["ctx"].items()}
    return json_response({"detail": shown}, HTTPStatus.UNPROCESSABLE_ENTITY)
