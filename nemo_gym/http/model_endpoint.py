"""`NeMoGymAsyncOpenAI`: the few calls to an OpenAI-compatible endpoint that model servers make.

Asking a model twice harms nobody, so here, the only place in `http`, answers are tried again: a busy or absent
endpoint (429, 502, 503, 504, 520) as long as the settings allow and at the pace it asks for with
`Retry-After`, a failing one (500) three times, and broken connections like the former. Everything
else, such as a wrong key or an unknown model, is raised at once with status and body.

The client notes what became of its calls: whether the endpoint ever answered, what keeps it from answering now, and
what was ridden out by trying again (`EndpointContact`). As long as none was answered, whoever asks for the state has
the endpoint's port tried as well: a long first answer and an address where nobody listens look alike to a caller.
"""

import asyncio
import math
import time
from collections import Counter
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache
from typing import Any

import orjson
from aiohttp import ClientTimeout
from multidict import CIMultiDict
from pydantic import BaseModel, Field
from yarl import URL

from nemo_gym.config.secrets import mask_url_passwords
from nemo_gym.http.errors import ServerResponseError, cause_of
from nemo_gym.http.model_answers import JsonObject, read_json
from nemo_gym.http.pacing import Pacer, Turn
from nemo_gym.http.request import (
    JSON_CONTENT_TYPE,
    NEVER_HEALS,
    NOT_SENT,
    TRANSPORT_ERRORS,
    Call,
    call_failure,
    parse_json,
    response_error,
    try_once,
    with_json_body,
)
from nemo_gym.http.session import current_settings
from nemo_gym.retry import Tries

RATE_LIMIT_ERROR_CODES = [429, 502, 503, 504, 520]
RETRY_ERROR_CODES = [*RATE_LIMIT_ERROR_CODES, 500]
MAX_NUM_TRIES = 3
"""Tries that may end in status 500."""

_TOKENIZE = "/tokenize"
_CONNECTS_WITHIN_S = 2.0
_RECENT_S = 90.0
"""A failure older than that says nothing: calls that are still under way are tried again more often."""


class EndpointContact:
    """The dealings of one process with one endpoint."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.has_answered = False
        """Whether there was ever an answer, whatever its status."""
        self.waiting = 0
        """Calls under way, also those that wait for the pace."""
        self.asked_at_s: float | None = None
        """When the first call began."""
        self.failure = ""
        """Why the last try went unanswered; empty after an answer."""
        self.ridden_out: Counter[str] = Counter()
        """Tries that failed and were made again: by status, `timeout` or `connection`."""
        self.ridden_out_cost_s = 0.0
        """Seconds that these tries, and the pauses after them, have taken, of all calls together."""
        self.pausing: Counter[str] = Counter()
        """Calls that pause now before they are tried again, by the same."""
        self.pacing = 0
        """Calls that wait now for the pace."""
        self._paced_s = 0.0
        self._was_sent = False
        self._failing_since_s = self._failed_at_s = 0.0

    def failed(self, cause: str, *, was_sent: bool) -> None:
        """Note that a try went unanswered; `was_sent` says that there was a connection."""
        now_s = time.monotonic()
        if not self.failure:
            self._failing_since_s = now_s
        self.failure, self._was_sent, self._failed_at_s = cause, was_sent, now_s

    async def pause(self, kind: str, pause_s: float, tried_since_s: float) -> float:
        """Wait before a call is tried again that failed since `tried_since_s`; the time at which that is over."""
        self.ridden_out[kind] += 1
        self.pausing[kind] += 1
        try:
            await asyncio.sleep(pause_s)
        finally:
            self.pausing[kind] -= 1
            now_s = time.monotonic()
            self.ridden_out_cost_s += now_s - tried_since_s
        return now_s

    async def wait_for(self, turn: Turn) -> float:
        """Wait for the turn of a call; how long that took."""
        began_s = time.monotonic()
        self.pacing += 1
        self._paced_s -= began_s  # together with the time it is, that is the time waited so far
        try:
            await turn.wait()
        finally:
            ended_s = time.monotonic()
            self.pacing -= 1
            self._paced_s += ended_s
        return ended_s - began_s

    async def state(self) -> dict[str, Any]:
        """For whoever waits for answers: one JSON object, without secrets."""
        if not self.has_answered:
            await self._try_port()
        now_s = time.monotonic()
        is_failing = bool(self.failure) and now_s - self._failed_at_s < _RECENT_S
        return {
            "url": mask_url_passwords(self.base_url),
            "has_answered": self.has_answered,
            "waiting": self.waiting - self.pacing,
            "asked_s_ago": None if self.asked_at_s is None else now_s - self.asked_at_s,
            "problem": self.failure if is_failing else "",
            "failing_s": now_s - self._failing_since_s if is_failing else 0.0,
            "ridden_out": dict(self.ridden_out),
            "ridden_out_cost_s": self.ridden_out_cost_s,
            "pausing": dict(+self.pausing),
            "paced_s": max(0.0, self._paced_s + self.pacing * now_s),
            "pacing": self.pacing,
        }

    async def _try_port(self) -> None:
        cause = await _why_unreachable(self.base_url)
        if self.has_answered:
            return
        if cause:
            self.failed(cause, was_sent=False)
        elif not self._was_sent:
            self.failure = ""  # it listens by now


class NeMoGymAsyncOpenAI(BaseModel):
    """A client of one model endpoint; answers are plain dicts."""

    base_url: str
    api_key: str
    internal: bool = False
    """Whether the endpoint is a server of this run; it only shows in the words of an error."""
    default_headers: dict[str, str] = Field(default_factory=dict)
    default_query: dict[str, str] = Field(default_factory=dict)
    """Query parameters of every request."""

    def auth_headers(self) -> dict[str, str]:
        """How the key travels; a client of endpoints that want it elsewhere overrides this."""
        return {"Authorization": f"Bearer {self.api_key}"}

    async def create_models(self, **kwargs: Any) -> dict[str, Any]:
        """`GET /models`."""
        return await self._call("GET", f"{self._root}/models", kwargs)

    async def create_chat_completion(self, **body: Any) -> dict[str, Any]:
        """`POST /chat/completions`."""
        return await self._call("POST", f"{self._root}/chat/completions", {"json": body})

    async def create_completion(self, **body: Any) -> dict[str, Any]:
        """`POST /completions`."""
        return await self._call("POST", f"{self._root}/completions", {"json": body})

    async def create_response(self, **body: Any) -> dict[str, Any]:
        """`POST /responses`."""
        return await self._call("POST", f"{self._root}/responses", {"json": body})

    async def create_tokenize(self, **body: Any) -> dict[str, Any]:
        """`POST /tokenize`, which lives beside `/v1`."""
        return await self._call("POST", f"{self._root.removesuffix('/v1')}{_TOKENIZE}", {"json": body})

    async def create_generate(self, **body: Any) -> dict[str, Any]:
        """`POST /generate`, which SGLang has beside `/v1`."""
        return await self._call("POST", f"{self._root.removesuffix('/v1')}/generate", {"json": body})

    async def post_beside(self, path: str) -> None:
        """`POST` to a path beside `/v1`, once; what is answered does not matter, unless it is an error."""
        settings, url = current_settings(), self._root.removesuffix("/v1") + path
        timeout = _timeout(settings.model_total_timeout_s, settings.http_connect_timeout_s)
        kwargs = with_json_body({"json": {}, "headers": self._headers, "timeout": timeout})
        try:
            async with await try_once("POST", url, kwargs) as response:
                body = await response.read()
                if not response.ok:
                    raise response_error(response, body)
        except TRANSPORT_ERRORS as error:
            call = Call("POST", url, internal=self.internal, timeout_key="model_total_timeout_s")
            raise call_failure(error, call, Tries(settings.retry_model_calls, failures=1)) from error

    @cached_property
    def _headers(self) -> CIMultiDict[str]:
        headers = CIMultiDict({**self.default_headers, **self.auth_headers()})
        if URL(self.base_url).raw_user is not None:  # for a proxy in front; only one of them can be sent
            headers.popall("Authorization", None)
        return headers

    @cached_property
    def _json_headers(self) -> dict[str, str] | CIMultiDict[str]:
        """The same of a request with a body; as a dict, which is passed on without being copied, where one will do."""
        headers = CIMultiDict(self._headers)
        headers.setdefault("Content-Type", JSON_CONTENT_TYPE)
        plain = dict(headers.items())
        return plain if len(plain) == len(headers) and "Content-Type" in plain else headers

    @cached_property
    def contact(self) -> EndpointContact:
        """What is known about the endpoint."""
        return EndpointContact(self.base_url)

    @cached_property
    def pacer(self) -> Pacer | None:
        """Who says when a call may be tried; without one it is tried at once. To be set before the first call."""
        return None

    @property
    def _root(self) -> str:
        return self.base_url.rstrip("/")

    async def _call(self, method: str, url: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        body = kwargs.get("json")
        settings, contact, pacer = current_settings(), self.contact, self.pacer
        tries = Tries(settings.retry_model_calls if contact.has_answered else settings.retry_until_ready)
        timeout = _timeout(settings.model_total_timeout_s, settings.http_connect_timeout_s)
        query = {"params": self.default_query} if self.default_query else {}
        headers = self._headers if body is None else self._json_headers
        kwargs = with_json_body({"timeout": timeout, **query, **kwargs, "headers": headers})
        call = Call(method, url, internal=self.internal, timeout_key="model_total_timeout_s")
        turn = None if pacer is None else pacer.turn(body or {}, len(kwargs.get("data", b"")), asks=_asks_model(call))
        contact.asked_at_s = contact.asked_at_s or tries.started_s
        contact.waiting += 1
        server_errors, tried_since_s = 0, tries.started_s
        try:
            while True:
                pause_s: float | None
                try:
                    if turn is not None:
                        waited_s = await contact.wait_for(turn)
                        tries.excuse(waited_s)
                        tried_since_s += waited_s
                    answer: dict[str, Any] = await _attempt(call, kwargs, turn)
                    contact.has_answered, contact.failure = True, ""
                    return answer
                except ServerResponseError as error:
                    contact.has_answered, contact.failure = True, ""
                    tries.policy = settings.retry_model_calls
                    server_errors += error.status == 500
                    asked_s = retry_after_s(error.headers)
                    if turn is not None:
                        turn.refused(error.status, error.headers or {}, asked_s)
                    pause_s = tries.pause_after_failure(asked_s)
                    error.attempts, error.elapsed_s = tries.failures, tries.elapsed_s
                    if pause_s is None or error.status not in RETRY_ERROR_CODES or server_errors >= MAX_NUM_TRIES:
                        raise
                    trouble, kind = str(error.status), "server_error" if error.status == 500 else "rate_limit"
                    tries.warn_of_first(f"{call.shown_url} {error.status}", f"{kind}: {error}")
                except TRANSPORT_ERRORS as error:
                    contact.failed(cause_of(error), was_sent=not isinstance(error, NOT_SENT))
                    pause_s = tries.pause_after_failure()
                    failure = call_failure(error, call, tries)
                    if pause_s is None or isinstance(error, NEVER_HEALS):
                        raise failure from error
                    trouble = "timeout" if isinstance(error, TimeoutError) else "connection"
                    tries.warn_of_first(call.shown_url, str(failure))
                tried_since_s = await contact.pause(trouble, pause_s, tried_since_s)
        finally:
            contact.waiting -= 1
            if turn is not None:
                turn.close()


@lru_cache
def _timeout(total_s: float, connect_s: float) -> ClientTimeout:
    return ClientTimeout(total=total_s, sock_connect=connect_s)


def _asks_model(call: Call) -> bool:
    return call.method == "POST" and not call.url.endswith(_TOKENIZE)


async def _attempt(call: Call, kwargs: dict[str, Any], turn: Turn | None) -> Any:
    async with await try_once(call.method, call.url, kwargs) as response:
        body = await response.read()
    if not response.ok:
        raise response_error(response, body)
    try:
        content, body = read_json(body)
    except orjson.JSONDecodeError:
        content = parse_json(body, response)
    if turn is not None:
        turn.answered(content, response.headers)
    return JsonObject(content, body) if isinstance(content, dict) else content


def retry_after_s(headers: Any, now_s: float | None = None) -> float:
    """How long an answer asks to be left alone: `retry-after-ms`, or `Retry-After` in seconds or as a date.

    Zero when it does not ask, or asks in a way nobody understands.
    """
    given = CIMultiDict(headers or {})
    milliseconds = _number(given.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = given.get("retry-after")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds or 0.0
    try:
        moment_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, moment_s - (time.time() if now_s is None else now_s))


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) and number >= 0 else None


async def _why_unreachable(url: str) -> str:
    """Why no connection comes about; empty when one does."""
    try:
        parsed = URL(url)
        host, port = parsed.host, parsed.port
    except ValueError:
        host = port = None
    if not host or not port:
        return "this is no address"
    try:
        async with asyncio.timeout(_CONNECTS_WITHIN_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "no connection in time"
    except OSError as error:
        return cause_of(error)
    writer.close()
    return ""
