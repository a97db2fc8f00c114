"""What a model call used, told by the model server in a header of its answer.

Agents that put no `usage` into their response are counted by this: `ServerClient` adds up what the calls of a rollout
used, and the answer to `/run` carries the sum (`CallLog`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import orjson
from pydantic import BaseModel
from starlette._utils import is_async_callable
from starlette.concurrency import run_in_threadpool

from nemo_gym.http.run_answers import CallUsage
from nemo_gym.observability.calls import extract_token_stats


class Usage:
    """The tokens of the model call under way, once they are known."""

    tokens: CallUsage | None = None


_USAGE: ContextVar[Usage | None] = ContextVar("nemo_gym_usage_of_call", default=None)


@contextmanager
def usage_of_call() -> Iterator[Usage]:
    """Yield what the model call that is served within the block uses."""
    usage = Usage()
    token = _USAGE.set(usage)
    try:
        yield usage
    finally:
        _USAGE.reset(token)


def telling_usage(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return `handler` of a model server so that what its answers used is known to `usage_of_call`."""
    is_async = is_async_callable(handler)

    @functools.wraps(handler)
    async def told(**arguments: Any) -> Any:
        result = await (handler(**arguments) if is_async else run_in_threadpool(handler, **arguments))
        usage = _USAGE.get()
        if usage is not None:
            usage.tokens = _used_by(result)
        return result

    return told


def _used_by(result: Any) -> CallUsage | None:
    content = result
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
