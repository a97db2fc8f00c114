"""What a model call used, told by the model server in a header of its answer.

Agents that put no `usage` into their response are counted by this: `ServerClient` adds up what the calls of a rollout
used, and the answer to `/run` carries the sum (`CallLog`).
"""

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import orjson
from pydantic import BaseModel
from starlette._utils import is_async_callable
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.http.run_answers import CallUsage, usage_header
from nemo_gym.observability.calls import extract_token_stats

_USAGE: ContextVar[tuple[bytes, bytes] | None] = ContextVar("nemo_gym_usage_of_call", default=None)
header_of_call = _USAGE.get
"""The header that says what the call under way has used; None if its model did not say."""


def telling_usage(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return `handler` of a model server so that what its answers used is known to `header_of_call`."""
    is_async = is_async_callable(handler)

    @functools.wraps(handler)
    async def told(**arguments: Any) -> Any:
        _USAGE.set(None)
        result = await (handler(**arguments) if is_async else run_in_threadpool(handler, **arguments))
        used = _used_by(result)
        if used is not None:
            _USAGE.set(usage_header(used))
        return result

    return told


def _used_by(result: Any) -> CallUsage | None:
    content = getattr(result, "content", None) or result  # of an `Answer`
    if not isinstance(content, BaseModel | Mapping):
        try:
            content = orjson.loads(getattr(result, "body", b""))
        except (TypeError, ValueError):
            return None
    read = content.get if isinstance(content, Mapping) else functools.partial(_attribute, content)
    usage, model = read("usage"), read("model")
    if usage is None:
        return None
    stats = extract_token_stats(usage.model_dump() if isinstance(usage, BaseModel) else usage)
    given, output, total = stats["tokens_in"], stats["tokens_out"], stats["tokens_total"]
    if given is None and output is None and total is None:
        return None
    given, output = given or 0, output or 0
    total = given + output if total is None else total
    return CallUsage(model if isinstance(model, str) else None, given, stats["cached_tokens"] or 0, output, total)


def _attribute(content: BaseModel, name: str) -> Any:
    return getattr(content, name, None)


class UsageMiddleware:
    """Puts what a call has used into the headers of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        async def send_with_usage(message: Message) -> None:
            if message["type"] == "http.response.start" and (header := header_of_call()) is not None:
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self.app(scope, receive, send_with_usage)
