"""Answers that go wrong on the wire, for real: closed connections, bodies that end too early, drips.

They are ordinary ASGI responses. Over a socket the client sees exactly what a failing endpoint would
show it; in memory, where there is no connection to close, the body breaks off.
"""

import asyncio
from http import HTTPStatus
from typing import assert_never

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemo_gym.server_utils import ERROR_CLASS_HEADER, ERROR_SERVER_HEADER, ERROR_STATUS_HEADER
from responses_api_models.scripted_model.script_faults import (
    DisconnectFault,
    Fault,
    HangFault,
    MalformedFault,
    SlowDripFault,
    StatusFault,
    TruncateFault,
)

_JSON = (b"content-type", b"application/json")
_UNSENDABLE = (b"not a header\n", b"")


class FaultyAnswerError(Exception):
    """Ends a handler with an answer that no handler could return."""

    def __init__(self, response: Response) -> None:
        super().__init__(type(response).__name__)
        self.response = response


async def answer_faultily(request: Request, error: Exception) -> Response:
    """The exception handler that puts such an answer on the wire."""
    assert isinstance(error, FaultyAnswerError)
    return error.response


def broken_answer(fault: Fault, right_answer: bytes, server_name: str) -> Response:
    """What is sent instead of `right_answer`."""
    match fault:
        case StatusFault():
            return _error_status(fault, server_name)
        case DisconnectFault():
            return ClosedConnection(after_s=0.0)
        case HangFault():
            return ClosedConnection(after_s=fault.seconds)
        case MalformedFault():
            body = right_answer[: len(right_answer) // 2] if fault.body is None else fault.body.encode()
            return Response(body, media_type="application/json")
        case TruncateFault():
            return TruncatedAnswer(right_answer, int(len(right_answer) * fault.keep))
        case SlowDripFault():
            return DrippingAnswer(right_answer, fault.pieces, fault.seconds)
        case _:
            assert_never(fault)


def _error_status(fault: StatusFault, server_name: str) -> Response:
    phrase = HTTPStatus(fault.status).phrase if fault.status in set(HTTPStatus) else "Error"
    error = {"message": fault.message or phrase, "type": "scripted_fault", "code": fault.status}
    headers = {
        ERROR_STATUS_HEADER: str(fault.status),
        ERROR_SERVER_HEADER: server_name,
        ERROR_CLASS_HEADER: "ScriptedFault",
    }
    if fault.retry_after is not None:
        headers["retry-after"] = f"{fault.retry_after:g}"
    return Response(orjson.dumps({"error": error}), fault.status, headers, media_type="application/json")


class ClosedConnection(Response):
    """No answer at all."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self._after_s = after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, then end without having sent a byte.

        An ASGI app cannot close a connection. But a server whose app began an answer that could not
        be written, and then returned, has nothing left to do but to close it.
        """
        await asyncio.sleep(self._after_s)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [_UNSENDABLE]})
        except Exception:  # noqa: BLE001 - the server's refusal to write the header is what we are after
            return


class TruncatedAnswer(Response):
    """A body that ends before the length it announced."""

    def __init__(self, body: bytes, keep: int) -> None:
        super().__init__()
        self._body = body
        self._keep = min(keep, len(body) - 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the beginning and return, upon which the server closes the connection."""
        length = (b"content-length", b"%d" % len(self._body))
        await send({"type": "http.response.start", "status": 200, "headers": [_JSON, length]})
        await send({"type": "http.response.body", "body": self._body[: self._keep], "more_body": True})


class DrippingAnswer(Response):
    """A body that takes its time."""

    def __init__(self, body: bytes, pieces: int, seconds: float) -> None:
        super().__init__()
        self._body = body
        self._pieces = pieces
        self._pause_s = seconds / pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a piece at a time."""
        length = (b"content-length", b"%d" % len(self._body))
        await send({"type": "http.response.start", "status": 200, "headers": [_JSON, length]})
        size = -(-len(self._body) // self._pieces)
        for start in range(0, len(self._body), size):
            await asyncio.sleep(self._pause_s)
            piece = self._body[start : start + size]
            is_last = start + size >= len(self._body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
