"""Capturing model calls at the server that answers them: what was asked, what was said, how long it took.

Only calls that name a rollout are captured, and only while a run asks for it (`observability_enabled`). Callers notice
nothing: answers pass unchanged, streams as they come. Only what ends an answer waits until the call is written down.
What cannot be captured is a mark in the store, never an error.
"""

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.keys import MODEL_PATHS, MODELS_TYPE
from nemo_gym.observability.calls import category_of_status, may_end, rebuilt
from nemo_gym.observability.store import CaptureStore, ModelCallCaptureConfig, make_capture_store
from nemo_gym.rollout_correlation import MODEL_CALL_PREFIX, RolloutContextMiddleware, rollout_of_caller

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

    def __init__(self, scope: Scope, dialect: str) -> None:
        self.rollout_id = rollout_of_caller() or ""
        self.model_call_id = scope.get(_CALL_ID) or uuid4().hex
        self.dialect = dialect
        self.request = b""
        self.started_at = time.time()
        self.began_s = time.perf_counter()
        self.first_s: float | None = None
        """When the first bytes of a stream went out."""
        self.is_kept = False


class ModelCallCapture:
    """Writes down the calls of one model server."""

    def __init__(self, store: CaptureStore, model_server_name: str | None) -> None:
        self._store = store
        ref = None if model_server_name is None else {"type": MODELS_TYPE, "name": model_server_name}
        self._model_ref = orjson.dumps(ref)
        self._has_failed = False

    def wants(self, path: str) -> str | None:
        """The dialect of a call that is to be captured: it is one of a model, and names its rollout."""
        return MODEL_PATHS.get(path) if rollout_of_caller() is not None else None

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return `app` so that its model calls are captured, while their rollout is known."""

        async def captured(scope: Scope, receive: Receive, send: Send) -> None:
            dialect = self.wants(scope["path"]) if scope["type"] == "http" else None
            if dialect is None:
                await app(scope, receive, send)
                return
            call = _Call(scope, dialect)

            async def noting_receive() -> Message:
                message = await receive()
                if message["type"] == "http.request":
                    call.request += message.get("body", b"")
                return message

            watch = _Watch(self, call, send)
            await watch.over(app(scope, noting_receive, watch.send))

        return captured

    def keep(self, call: _Call, status: int, body: bytes, *, is_stream: bool = False, is_over: bool = True) -> None:
        """Write a call down, with the answer it got."""
        category = category_of_status(status)
        response, raw = _as_object(body), b""
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
        took_s = time.perf_counter() - call.began_s
        ttft = b"null" if call.first_s is None else b"%.2f" % ((call.first_s - call.began_s) * 1000)
        request = _as_object(call.request)
        line = (
            b'{"model_call_id":"%b","dialect":"%b","model_ref":%b,"started_at":%.6f,"completed_at":%.6f,'
            b'"latency_ms":%.2f,"latency_ttft_ms":%b,"status_code":%b,"error_category":%b,"request":%b,"response":%b'
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
            b"null" if request is None else request,
            b"null" if response is None else response,
        )
        if request is None:
            line += b',"request_raw":' + _as_text(call.request)
        if raw:
            line += b',"response_raw":' + _as_text(raw)
        return line + b"}"


def _as_object(body: bytes) -> bytes | None:
    """Return the JSON object that a body is, on one line; None for anything else."""
    body = body.strip()
    if not body.startswith(b"{"):
        return None
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


class ModelCallCaptureMiddleware(RolloutContextMiddleware):
    """Captures the model calls of an app of one's own, and takes off their paths the prefix that names the rollout."""

    prefix = MODEL_CALL_PREFIX

    def __init__(self, app: ASGIApp, store: CaptureStore | None = None, model_server_name: str | None = None) -> None:
        super().__init__(app if store is None else ModelCallCapture(store, model_server_name).around(app))


class TokenPaths:
    """Says which calls have their token ids kept: those with a further segment in the prefix of their path.

    What else is posted with that segment may have made tokens that nobody sees, so it masks the rollout.
    """

    def __init__(self, capture: "ServerTokenCapture") -> None:
        self._capture = capture

    async def note_missed(self, found: re.Match[str], method: str) -> None:
        """Mask the rollout of a request whose tokens cannot be kept; `found` is its prefix."""
        if found["tokens"] and method not in _HARMLESS and found["rest"] not in MODEL_PATHS:
            await self._capture.missed(found["rollout_id"], found["rest"])

    @contextmanager
    def call(self, found: re.Match[str], scope: Scope) -> Iterator[None]:
        """Keep the token ids of a call that is answered within the block, if the prefix of its path asks for it."""
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
        layer = Middleware(ModelCallCaptureMiddleware, store=store, model_server_name=model_server_name)
        app.user_middleware.append(layer)
