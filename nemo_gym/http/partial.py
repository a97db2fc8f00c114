"""What a rollout had come to when it failed, on its way to whoever asks for it.

An agent whose work breaks off notes what it has so far on the exception (`keep_partial`). Callers know an error answer
as a JSON string, and that it stays; only a request with `WANTS_PARTIAL` is answered with an object that has both, the
string as `error` and the response as `partial_response`, and says in `failed_in` which call broke off, if the agent
did: what failed in `/verify` has its whole response, and can be scored without being made again. Reading the answer
takes them apart again, so that texts and classes of errors are the same either way.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

WANTS_PARTIAL = "x-nemo-gym-wants-partial"
"""Header of a request whose sender can read the object."""
HAS_PARTIAL = "x-nemo-gym-has-partial"
"""Header of an answer that is the object."""
MAX_PARTIAL_BYTES = 1 << 20
LEFT_OUT = "_ng_items_left_out"
"""Of a response that was too long: how many of its last items are missing."""
VERIFY = "verify"
"""What `failed_in` says of a rollout that was only not scored."""
_ATTRIBUTE = "_ng_partial_response"
_FAILED_IN = "_ng_failed_in"


def keep_partial(error: BaseException, response: Any, failed_in: str | None = None) -> None:
    """Note on `error` what there was of the response when it was raised; the first to say so knows best.

    `failed_in` is `VERIFY` when the response is whole and only its verdict is missing.
    """
    if response is not None and partial_of(error) is None:
        setattr(error, _ATTRIBUTE, response)
        setattr(error, _FAILED_IN, failed_in)


def partial_of(error: BaseException) -> Any:
    """What was noted on `error`; None if nothing was."""
    return getattr(error, _ATTRIBUTE, None)


def failed_in(error: BaseException) -> str | None:
    """In which call, if that was noted on `error`."""
    return getattr(error, _FAILED_IN, None)


def is_wanted(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the sender of a request with these headers can read the object."""
    name = WANTS_PARTIAL.encode()
    return any(key.lower() == name for key, _ in headers)


def bounded(response: Any, most_bytes: int = MAX_PARTIAL_BYTES) -> dict[str, Any] | None:
    """A response as plain JSON that is not longer than that, if need be without its last items.

    None if it is no response, or too long without any item.
    """
    try:
        content = orjson.loads(_as_json(response))
    except (TypeError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    room = most_bytes - len(orjson.dumps({**content, "output": [], LEFT_OUT: 0}))
    items = content["output"] if isinstance(content.get("output"), list) else []
    kept = 0
    for item in items:
        room -= len(orjson.dumps(item)) + 1
        if room < 0:
            break
        kept += 1
    if kept == len(items):
        return content if room >= 0 else None
    return {**content, "output": items[:kept], LEFT_OUT: len(items) - kept} if kept else None


def _as_json(response: Any) -> bytes:
    if isinstance(response, BaseModel):
        return response.model_dump_json(warnings=False).encode()
    return orjson.dumps(response)


class ErrorBody(NamedTuple):
    """The body of an error answer, taken apart."""

    content: bytes
    """What callers know as the body."""
    partial_response: dict[str, Any] | None = None
    failed_in: str | None = None


def taken_apart(body: bytes, headers: Mapping[str, str]) -> ErrorBody:
    """What an error answer with these headers says."""
    if headers.get(HAS_PARTIAL) is None:
        return ErrorBody(body)
    try:
        both = orjson.loads(body)
        return ErrorBody(orjson.dumps(both["error"]), bounded(both["partial_response"]), both.get("failed_in"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return ErrorBody(body)
