"""Inside a model server: which call is being answered, and how its tokens are kept.

Whoever takes a request in sets a `CaptureContext`; whoever has the answer calls `capture_tokens`. An engine that knows
more than its answer says may call `commit_entry` itself. Keeping tokens never makes a call fail: what cannot be kept
marks the rollout, which is masked then.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from nemo_gym.token_id_capture.config import token_id_capture_config
from nemo_gym.token_id_capture.protocols import TokenSink, installed_token_sink
from nemo_gym.token_id_capture.records import (
    TokenEntry,
    extract_token_fields,
    response_to_output_items,
    strip_token_fields,
    weights_of,
)
from nemo_gym.token_id_capture.store import TokenCaptureStore, make_token_store

__all__ = [
    "CaptureContext",
    "ServerTokenCapture",
    "capture_tokens",
    "commit_entry",
    "current_capture_context",
    "register_call_intent",
    "reset_token_sink",
    "set_token_sink",
]

logger = logging.getLogger(__name__)


@dataclass
class CaptureContext:
    """The call that is being answered."""

    rollout_id: str
    model_call_id: str
    token_sink: TokenSink | None
    model: str = ""
    committed: bool = False
    """An entry was made of it."""
    owner: object = field(default=None, repr=False, compare=False)
    """Who answers it: a server that is asked meanwhile, in the same process, does not take the call for its own."""


_CURRENT: ContextVar[CaptureContext | None] = ContextVar("nemo_gym_token_capture", default=None)


def set_token_sink(context: CaptureContext) -> Token[CaptureContext | None]:
    """From here on this call is answered; `reset_token_sink` takes what is returned."""
    return _CURRENT.set(context)


def current_capture_context() -> CaptureContext | None:
    """The call that is being answered, if its tokens are to be kept."""
    return _CURRENT.get()


def reset_token_sink(token: Token[CaptureContext | None]) -> None:
    """What `set_token_sink` began has ended."""
    _CURRENT.reset(token)


async def register_call_intent() -> None:
    """Tell the sink, if it wants to know, that a call begins: one that never ends is missed then.

    Raises:
        Exception: whatever the sink raised. The call is not to be made: it could be lost without a trace.
    """
    context = _CURRENT.get()
    begin = getattr(context.token_sink, "begin_call", None) if context is not None else None
    if context is not None and begin is not None:
        await begin(context.rollout_id, context.model_call_id)


async def capture_tokens(response: Any) -> None:
    """Keep the tokens of an answer: a model or a mapping, of the Responses API or of Chat Completions.

    An answer without them, or one that cannot be kept, marks the rollout as incomplete, with a warning.
    """
    context = _CURRENT.get()
    if context is None or context.token_sink is None or context.committed:
        return
    try:
        entry = _entry_of(context, response)
        await commit_entry(entry)
    except Exception as error:  # noqa: BLE001 - an answer is not held back because it could not be kept
        await _give_up(context, context.token_sink, error)


async def commit_entry(entry: TokenEntry) -> None:
    """Keep an entry of the call that is being answered; `current_capture_context` tells whose it must be.

    Raises:
        RuntimeError: no call is being answered whose tokens are kept.
        ValueError: the entry is of another call.
    """
    context = _CURRENT.get()
    if context is None or context.token_sink is None:
        raise RuntimeError("no call is being answered whose tokens are kept; ask current_capture_context() first")
    identity = (entry.rollout_id, entry.model_call_id)
    if identity != (context.rollout_id, context.model_call_id):
        raise ValueError(f"the entry is of call {identity}, not of {(context.rollout_id, context.model_call_id)}")
    await context.token_sink.put(entry)
    context.committed = True


def _entry_of(context: CaptureContext, response: Any) -> TokenEntry:
    payload = response.model_dump(mode="json", exclude_none=True) if isinstance(response, BaseModel) else response
    if not isinstance(payload, Mapping):
        raise ValueError(f"the answer is a {type(response).__name__}, in which no token ids can be found")
    fields = extract_token_fields(payload)
    if fields is None:
        raise ValueError("the answer has no token ids; set return_token_id_information of the model server to true")
    told = response_to_output_items(payload)
    items, index = strip_token_fields(told)
    return TokenEntry(
        rollout_id=context.rollout_id,
        model_call_id=context.model_call_id,
        model=context.model or str(payload.get("model") or ""),
        output_items=items,
        token_item_index=index,
        created_at=time.time(),
        **fields,
        **({} if index is None else weights_of(told[index])),
    )


async def _give_up(context: CaptureContext, sink: TokenSink, error: Exception) -> None:
    words = f"{type(error).__name__}: {error}"
    logger.warning("rollout %s: the tokens of a call are not kept, so it is masked: %s", context.rollout_id, words)
    try:
        await sink.mark_incomplete(context.rollout_id, context.model_call_id)
    except Exception as failure:  # noqa: BLE001 - said here, since there is nobody left to tell
        logger.warning("rollout %s cannot even be marked as incomplete: %r", context.rollout_id, failure)


class ServerTokenCapture:
    """What a model server needs to keep the tokens of its calls."""

    def __init__(self, configured: TokenSink | None, store: TokenCaptureStore | None) -> None:
        self._configured, self._store = configured, store

    @classmethod
    def from_config(cls, global_config_dict: Any) -> "ServerTokenCapture | None":
        """What a run's configuration asks for; None when it asks for nothing. To be made once per server process.

        Raises:
            ValueError: the configuration names no place, or a sink that is none.
        """
        config = token_id_capture_config(global_config_dict)
        if not config.enabled:
            return None
        return cls(config.build_sink(), make_token_store(global_config_dict))

    @property
    def sink(self) -> TokenSink | None:
        """The configured one, else the one installed in this process, else the files."""
        return self._configured or installed_token_sink() or self._store

    @contextmanager
    def call(self, rollout_id: str, model_call_id: str | None = None, model: str = "") -> Iterator[CaptureContext]:
        """Answer a call of a rollout within the block; its tokens are kept."""
        context = CaptureContext(rollout_id, model_call_id or uuid4().hex, self.sink, model, owner=self)
        token = set_token_sink(context)
        try:
            yield context
        finally:
            reset_token_sink(token)

    @property
    def is_answering(self) -> bool:
        """Whether the running code is within such a block, and no other server's."""
        context = _CURRENT.get()
        return context is not None and context.owner is self

    async def missed(self, rollout_id: str, path: str) -> None:
        """Note a call whose tokens cannot be kept, because nobody knows what is answered under `path`."""
        if self.sink is not None:
            context = CaptureContext(rollout_id, "", self.sink)
            await _give_up(context, self.sink, ValueError(f"{path} is none of the routes whose answers are kept"))

    async def close(self) -> None:
        """Close a sink of our own; one that was installed is its owner's."""
        async with asyncio.timeout(60):
            if self._configured is not None:
                await self._configured.close()
