"""Capturing model calls at the server that answers them: what was asked, what was said, how long it took.

Only calls that name a rollout are captured, and only while a run asks for it (`observability_enabled`). Callers notice
nothing: answers pass unchanged, streams as they come. Only what ends an answer waits until the call is written down.
What cannot be captured is a mark in the store, never an error.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.http.request import SharedJson, request_json
from nemo_gym.http.transports.memory import Answer
from nemo_gym.keys import MODEL_PATHS, MODELS_TYPE
from nemo_gym.observability.calls import category_of_status, may_end, rebuilt
from nemo_gym.observability.store import CaptureStore, ModelCallCaptureConfig, make_capture_store
from nemo_gym.rollout_correlation import ModelPathMiddleware, rollout_of_caller
from nemo_gym.runtime import Together
from nemo_gym.servers.routes import DirectCall

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.sink import ServerTokenCapture

logger = logging.getLogger(__name__)

_EVENT_STREAM = b"text/event-stream"
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods by which no model is asked; agents look for the list of models, say."""
_ENDINGS = {"error": "upstream_error", "incomplete": "incomplete", "complete": None, None: "stream_truncated"}
_CALL_ID = "nemo_gym.model_call_id"
"""Where a request says under which id its tokens are kept: it is captured under the same."""
_LONGEST_MARK = 64
"""Bytes of a chunk that are looked at again with the next one, should what ends a stream be cut in two."""


class _Call:
    """A model call under way."""

    __slots__ = (
        *("began_s", "content", "dialect", "ended_s", "first_s", "is_kept", "is_ours", "is_read"),
        *("model_call_id", "request", "rollout_id", "started_at"),
    )

    def __init__(self, scope: Scope, dialect: str, request: bytes, content: Any = None) -> None:
        self.rollout_id = rollout_of_caller() or ""
        self.model_call_id = scope.get(_CALL_ID) or _new_id()
        self.dialect = dialect
        self.request = request
        self.content = content
        """What was handed over instead of the bytes of a request, if it was; nobody changes it until the call ends."""
        self.started_at = time.time()
        self.began_s = time.perf_counter()
        self.first_s: float | None = None
        """When the first bytes of a stream went out."""
        self.ended_s: float | None = None
        """When the answer was there, of a call that waits to be written down."""
        self.is_kept = False
        self.is_read = False
        """Whether an endpoint has read the request as the JSON object that it is."""
        self.is_ours = getattr(type(content), "model_dump", None) is BaseModel.model_dump  # else it may hold NaN
        """Whether the JSON of the request is our own writing."""

    async def answered_by(self, endpoint: DirectCall, scope: Scope, receive: Receive) -> Answer | Response:
        """What an endpoint answers; if it writes the JSON of what was handed over, that is the one that is kept."""
        if self.content is None:
            return await endpoint.answer(scope, self.request, receive)
        with SharedJson(self.content) as shared:
            answer = await endpoint.answer(scope, self.request, receive, self.content)
        self.request = shared.made or b""
        return answer


def _new_id() -> str:
    """Random digits, drawn for many calls at once: the system takes as long for all of them as for one."""
    try:
        return _DRAWN.pop()
    except IndexError:
        digits = token_hex(_ID_BYTES * _DRAWN_AT_ONCE)
        length = len(digits) // _DRAWN_AT_ONCE
        _DRAWN.extend(digits[at : at + length] for at in range(length, len(digits), length))
        return digits[:length]


_ID_BYTES, _DRAWN_AT_ONCE = 16, 64
_DRAWN: list[str] = []
os.register_at_fork(after_in_child=_DRAWN.clear)  # or else two processes would have the same


class _Answered(NamedTuple):
    """A call that waits to be written down."""

    call: _Call
    status: int
    body: bytes
    is_object: bool
    """Whether the body is known to be a JSON object."""


class ModelCallCapture:
    """Writes down the calls of one model server."""

    def __init__(self, store: CaptureStore, model_server_name: str | None) -> None:
        self._store = store
        ref = None if model_server_name is None else {"type": MODELS_TYPE, "name": model_server_name}
        self._model_ref = orjson.dumps(ref)
        self._has_failed = False
        self._together = Together(self._keep_answered)

    def wants(self, path: str) -> str | None:
        """The dialect of a call that is to be captured: it is one of a model, and names its rollout."""
        return MODEL_PATHS.get(path) if rollout_of_caller() is not None else None

    async def answered(
        self, call: DirectCall, scope: Scope, body: bytes, receive: Receive, content: Any
    ) -> Answer | Response:
        """What an endpoint answers that was found on the short way, captured."""
        dialect = self.wants(scope["path"])
        if dialect is None:
            return await call.answer(scope, body, receive, content)
        under_way = _Call(scope, dialect, body, content)
        with self._together:
            try:
                answer = await under_way.answered_by(call, scope, receive)
                if isinstance(answer, Answer):
                    under_way.is_read = answer.status == HTTPStatus.OK
                    answered = _Answered(under_way, answer.status, answer.body, answer.content is not None)
                elif isinstance(getattr(answer, "body", None), bytes):
                    answered = _Answered(under_way, answer.status_code, bytes(answer.body), is_object=False)
                else:
                    return _Following(answer, self, under_way)
                under_way.ended_s = time.perf_counter()
                await self._together.done(answered)
            except BaseException as error:
                if not under_way.is_kept:
                    self.failed(under_way, error)
                raise
        return answer

    def _keep_answered(self, answered: _Answered) -> None:
        self.keep(answered.call, answered.status, answered.body, is_object=answered.is_object)

    def keep(
        self,
        call: _Call,
        status: int,
        body: bytes,
        *,
        is_object: bool = False,
        is_stream: bool = False,
        is_over: bool = True,
    ) -> None:
        """Write a call down, with the answer it got; `is_object` says that this is known to be a JSON object."""
        category = category_of_status(status)
        response, raw = _as_object(body, is_known=is_object), b""
        if is_stream:
            streamed = rebuilt(call.dialect, body)
            response = None if streamed.response is None else orjson.dumps(streamed.response)
            raw, category = body, category or (_ENDINGS[streamed.ending] if is_over else "stream_truncated")
        elif response is None and body:
            raw, category = body, category or "capture_parse_error"
        self._write(call, status, category, response, raw)

    def failed(self, call: _Call, error: BaseException) -> None:
        """Write down a call that got no answer."""
        status = _status_of(error)
        category = (category_of_status(status) if status is not None else None) or _category_of(error)
        content = getattr(error, "response_content", None)
        raw = content if isinstance(content, bytes) and content else f"{type(error).__name__}: {error}".encode()
        self._write(call, status, category, None, raw)

    def _write(self, call: _Call, status: int | None, category: str | None, response: bytes | None, raw: bytes) -> None:
        call.is_kept = True
        try:
            self._store.append(call.rollout_id, self._line(call, status, category, response, raw))
        except (OSError, TypeError, ValueError) as error:  # also for a request that cannot be JSON
            if not self._has_failed:
                self._has_failed = True
                logger.warning("a model call could not be captured, nor may others like it: %s", error)
            with suppress(OSError, ValueError):
                self._store.mark_incomplete(call.rollout_id)

    def _line(self, call: _Call, status: int | None, category: str | None, response: bytes | None, raw: bytes) -> bytes:
        took_s = (call.ended_s or time.perf_counter()) - call.began_s
        if call.content is not None:
            call.request = call.request or request_json(call.content)
        ttft = b"null" if call.first_s is None else b"%.2f" % ((call.first_s - call.began_s) * 1000)
        is_written = call.is_ours and call.content is not None  # by us, just now
        request = call.request if is_written else _as_object(call.request, is_known=call.is_read)
        apart = b"\t" if call.is_ours else b""
        line = (
            b'{"model_call_id":"%b","dialect":"%b","model_ref":%b,"started_at":%.6f,"completed_at":%.6f,'
            b'"latency_ms":%.2f,"latency_ttft_ms":%b,"status_code":%b,"error_category":%b,%b"request":%b,%b"response":%b'
        ) % (
            call.model_call_id.encode(),
            call.dialect.encode(),
            self._model_ref,
            call.started_at,
            call.started_at + took_s,
            took_s * 1000,
            ttft,
            b"null" if status is None else b"%d" % status,
            b"null" if category is None else b'"%b"' % category.encode(),
            apart,
            b"null" if request is None else request,
            apart,
            b"null" if response is None else response,
        )
        if request is None:
            line += b',"request_raw":' + _as_text(call.request)
        if raw:
            line += b',"response_raw":' + _as_text(raw)
        return line + b"}"


def _as_object(body: bytes, *, is_known: bool = False) -> bytes | None:
    """The JSON object that a body is, on one line; None for anything else."""
    if not body.startswith(b"{"):
        body = body.strip()
    if not body.startswith(b"{"):
        return None
    if not is_known:
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
    return body.replace(b"\n", b" ").replace(b"\r", b" ")  # between values: inside of texts they are escaped


def _as_text(body: bytes) -> bytes:
    return orjson.dumps(body.decode(errors="replace"))


def _status_of(error: BaseException) -> int | None:
    if isinstance(error, RequestValidationError):
        return int(HTTPStatus.UNPROCESSABLE_ENTITY)
    told = (
        getattr(error, "error_status", None),
        getattr(error, "status", None),
        getattr(error, "status_code", None),
        getattr(getattr(error, "response", None), "status_code", None),
    )
    return next((status for status in told if type(status) is int), None)


def _category_of(error: BaseException) -> str:
    name = type(error).__name__.lower()
    if isinstance(error, TimeoutError | asyncio.TimeoutError) or "timeout" in name:
        return "timeout"
    return "connection" if "conn" in name else "exception"


class _Following(Response):
    """An answer that sends itself, such as a stream, followed while it does."""

    def __init__(self, answer: Response, capture: ModelCallCapture, call: _Call) -> None:
        self._answer, self._capture, self._call = answer, capture, call
        self.background = None
        self.status_code = answer.status_code

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        return self._answer.raw_headers

    @raw_headers.setter
    def raw_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._answer.raw_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = _Watch(self._capture, self._call, send)
        await watch.over(self._answer(scope, receive, watch.send))


class _Watch:
    """Looks at what an app sends, and has the call written down before the end of it is sent."""

    def __init__(self, capture: ModelCallCapture, call: _Call, send: Send) -> None:
        self._capture, self._call, self._send = capture, call, send
        self._status = int(HTTPStatus.OK)
        self._is_stream = False
        self._chunks: list[bytes] = []
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = _is_event_stream(message.get("headers", ()))
            if not self._is_stream:
                self._start = message  # a caller may make do with the status, so that waits, too
                return
        elif message["type"] == "http.response.body" and not self._call.is_kept:
            self._note(message.get("body", b""), is_last=not message.get("more_body", False))
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        await self._send(message)

    def _note(self, chunk: bytes, *, is_last: bool) -> None:
        before = self._chunks[-1][-_LONGEST_MARK:] if self._chunks else b""
        self._chunks.append(bytes(chunk))
        if self._is_stream:
            if chunk and self._call.first_s is None:
                self._call.first_s = time.perf_counter()
            if not is_last and may_end(self._call.dialect, before + chunk):
                ending = rebuilt(self._call.dialect, b"".join(self._chunks)).ending
                is_last = ending is not None
        if is_last:
            self._capture.keep(self._call, self._status, b"".join(self._chunks), is_stream=self._is_stream)

    async def over(self, work: Any) -> None:
        """Wait for the app; a call whose answer broke off is written down, too."""
        try:
            await work
        except BaseException as error:
            self._broke_off(error)
            raise
        self._broke_off(ConnectionError("the caller hung up before the answer ended"))  # an app may end in good order

    def _broke_off(self, error: BaseException) -> None:
        if self._call.is_kept:
            return
        if self._is_stream and (self._chunks or isinstance(error, ConnectionError)):
            self._capture.keep(self._call, self._status, b"".join(self._chunks), is_stream=True, is_over=False)
        else:
            self._capture.failed(self._call, error)


def _is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(_EVENT_STREAM) for name, value in headers)


class ModelCallCaptureMiddleware(ModelPathMiddleware):
    """Captures the calls of a model server, and takes off their paths the prefix that names the rollout.

    Programs elsewhere add it to apps of their own with a store, and the name of the server if it has one.
    """

    def __init__(
        self,
        app: ASGIApp,
        store: CaptureStore | None = None,
        model_server_name: str | None = None,
        *,
        capture: ModelCallCapture | None = None,
    ) -> None:
        if store is not None:
            capture = ModelCallCapture(store, model_server_name)
        super().__init__(app if capture is None else _Capturing(app, capture))


class _Capturing:
    """Captures the calls that reach an app under the path of a model, while their rollout is known."""

    def __init__(self, app: ASGIApp, capture: ModelCallCapture) -> None:
        self.app = app
        self.capture = capture

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        dialect = self.capture.wants(scope["path"]) if scope["type"] == "http" else None
        if dialect is None:
            await self.app(scope, receive, send)
            return
        call = _Call(scope, dialect, b"")

        async def noting_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                call.request += message.get("body", b"")
            return message

        watch = _Watch(self.capture, call, send)
        await watch.over(self.app(scope, noting_receive, watch.send))


class TokenPathMiddleware(ModelPathMiddleware):
    """Takes the prefix off where token ids are kept: those of calls whose path asks for it, by its further segment.

    What else is posted with that segment may have made tokens that nobody sees, so it masks the rollout.
    """

    def __init__(self, app: ASGIApp, capture: "ServerTokenCapture") -> None:
        super().__init__(app)
        self._capture = capture

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["method"] not in _HARMLESS:
            found = self._PREFIX.fullmatch(scope["path"])
            if found is not None and found["tokens"] and found["rest"] not in MODEL_PATHS:
                await self._capture.missed(found["rollout_id"], found["rest"])
        await super().__call__(dict(scope), receive, send)

    @contextmanager
    def _context(self, found: re.Match[str], scope: dict[str, Any]) -> Iterator[None]:
        with super()._context(found, scope):
            if not found["tokens"] or found["rest"] not in MODEL_PATHS:
                yield
                return
            with self._capture.call(found["rollout_id"]) as call:
                scope[_CALL_ID] = call.model_call_id
                yield


def install_model_call_capture(
    app: FastAPI,
    config: ModelCallCaptureConfig,
    *,
    model_server_name: str | None = None,
    global_config_dict: Any = None,
) -> None:
    """Have the model calls that `app` answers captured, if `config` says so, or else the config of the run."""
    if not config.observability_enabled and global_config_dict is not None:
        config = ModelCallCaptureConfig.of(global_config_dict)
    store = make_capture_store(config)
    if store is not None:
        capture = ModelCallCapture(store, model_server_name)
        app.user_middleware.append(Middleware(ModelCallCaptureMiddleware, capture=capture))
