"""`NeMoGymAsyncOpenAI`: the few calls to an OpenAI-compatible endpoint that model servers make.

Asking a model twice harms nobody, so here, and only here, answers are tried again: a busy or absent
endpoint (429, 502, 503, 504, 520) as long as the settings allow and at the pace it asks for with
`Retry-After`, a failing one (500) three times, and broken connections like the former. Everything
else, such as a wrong key or an unknown model, is raised at once with status and body.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache
from typing import Any

from aiohttp import ClientTimeout
from multidict import CIMultiDict
from pydantic import BaseModel, Field
from yarl import URL

from nemo_gym.http.errors import ServerResponseError
from nemo_gym.http.request import (
    NEVER_HEALS,
    TRANSPORT_ERRORS,
    Call,
    call_failure,
    parse_json,
    response_error,
    try_once,
    with_json_body,
)
from nemo_gym.http.retry import Tries
from nemo_gym.http.session import current_settings

RATE_LIMIT_ERROR_CODES = [429, 502, 503, 504, 520]
RETRY_ERROR_CODES = [*RATE_LIMIT_ERROR_CODES, 500]
MAX_NUM_TRIES = 3
"""Tries that may end in status 500."""


class JsonObject(dict[str, Any]):
    """An answer of an endpoint, with the bytes it was read from for those who pass it on."""

    def __init__(self, content: Mapping[str, Any], raw: bytes) -> None:
        super().__init__(content)
        self.raw = raw


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
        return await self._call("POST", f"{self._root.removesuffix('/v1')}/tokenize", {"json": body})

    @cached_property
    def _headers(self) -> CIMultiDict[str]:
        headers = CIMultiDict({**self.default_headers, **self.auth_headers()})
        if URL(self.base_url).raw_user is not None:  # for a proxy in front; only one of them can be sent
            headers.popall("Authorization", None)
        return headers

    @property
    def _root(self) -> str:
        return self.base_url.rstrip("/")

    async def _call(self, method: str, url: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        settings = current_settings()
        tries = Tries(settings.retry_model_calls)
        kwargs = {
            "timeout": _timeout(settings.model_total_timeout_s, settings.http_connect_timeout_s),
            **({"params": self.default_query} if self.default_query else {}),
            **with_json_body({**kwargs, "headers": self._headers}),
        }
        call = Call(method, url, internal=self.internal, timeout_key="model_total_timeout_s")
        server_errors = 0
        while True:
            pause_s: float | None
            try:
                answer: dict[str, Any] = await _attempt(call, kwargs)
                return answer
            except ServerResponseError as error:
                server_errors += error.status == 500
                pause_s = tries.pause_after_failure(retry_after_s(error.headers))
                error.attempts, error.elapsed_s = tries.failures, tries.elapsed_s
                if pause_s is None or error.status not in RETRY_ERROR_CODES or server_errors >= MAX_NUM_TRIES:
                    raise
                kind = "server_error" if error.status == 500 else "rate_limit"
                tries.warn_of_first(f"{call.shown_url} {error.status}", f"{kind}: {error}")
            except TRANSPORT_ERRORS as error:
                pause_s = tries.pause_after_failure()
                failure = call_failure(error, call, tries)
                if pause_s is None or isinstance(error, NEVER_HEALS):
                    raise failure from error
                tries.warn_of_first(call.shown_url, str(failure))
            await asyncio.sleep(pause_s)


@lru_cache
def _timeout(total_s: float, connect_s: float) -> ClientTimeout:
    return ClientTimeout(total=total_s, sock_connect=connect_s)


async def _attempt(call: Call, kwargs: dict[str, Any]) -> Any:
    async with await try_once(call.method, call.url, kwargs, whole=True) as response:
        body = await response.read()
        if not response.ok:
            raise response_error(response, body)
        content = parse_json(body, response)
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
