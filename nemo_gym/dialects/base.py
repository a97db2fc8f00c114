"""What a dialect is: an API that an endpoint speaks instead of the Responses API.

Rollouts are kept in the words of the Responses API. A model server whose endpoint speaks another API puts the request
into a dialect and the answer back; callers that ask in a dialect are understood the other way round. Each dialect is
one class. Here is also what all of them need: the fields of a request that somebody set, what rows send along for the
endpoint, and the errors for what a dialect has no words for.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from pydantic import BaseModel
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from nemo_gym.schemas.openai_items import NeMoGymResponseOutputItem
    from nemo_gym.schemas.openai_responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

EXTRA_BODY = "extra_body"
"""Fields to add to the request, such as `seed` or `top_k`."""
CHAT_TEMPLATE_KWARGS = "chat_template_kwargs"
"""Arguments for the chat template, such as `enable_thinking`."""


class Dialect(Protocol):
    """One API beside the Responses API: requests and answers, from one into the other."""

    def request_to(self, params: "NeMoGymResponseCreateParamsNonStreaming", /) -> dict[str, Any]:
        """The dialect's request that asks the same as `params`, of which only fields that were set count.

        Raises:
            NotImplementedError: it holds something the dialect has no form for.
            ValueError: it contradicts itself.
        """

    def response_from(self, params: "NeMoGymResponseCreateParamsNonStreaming", answer: Any, /) -> "NeMoGymResponse":
        """The response to `params` that the dialect's answer to them amounts to."""

    def request_from(self, request: Mapping[str, Any], /) -> "NeMoGymResponseCreateParamsNonStreaming":
        """The Responses request that asks the same as a request of the dialect, given as the fields it sets."""

    def items_from(self, messages: Sequence[Mapping[str, Any]], /) -> "list[NeMoGymResponseOutputItem]":
        """A conversation in the dialect as items of the Responses API."""

    def response_to(self, response: Mapping[str, Any], /) -> dict[str, Any]:
        """The dialect's answer that says the same as a response, both as JSON has them."""

    def events_of(self, answer: Mapping[str, Any], /) -> Iterator[str]:
        """An answer in the dialect as the lines by which it is streamed."""


def json_text(data: Any) -> str:
    """`data` as JSON."""
    try:
        return orjson.dumps(data).decode()
    except TypeError:  # halves of surrogate pairs, and numbers of more than 64 bits
        return json.dumps(data)


def sse(data: Mapping[str, Any], event: str | None = None) -> str:
    """One server-sent event."""
    text = json_text(data)
    return f"data: {text}\n\n" if event is None else f"event: {event}\ndata: {text}\n\n"


class UnusableRequestError(HTTPException, ValueError):
    """A request whose values do not fit together; over HTTP it is answered with 400."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)

    def __str__(self) -> str:
        return self.detail

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.detail,)


class NoChatFormError(UnusableRequestError, NotImplementedError):
    """A part of a Responses request that the Chat Completions API has no words for."""


class NoResponsesFormError(UnusableRequestError, NotImplementedError):
    """A part of a request in a dialect that the Responses API has no words for."""


def set_fields(value: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model that somebody set: what `model_dump(exclude_unset=True)` holds, around the same values.

    A request for training carries the token ids of every earlier turn. `model_dump` would copy each of them, and
    validating what was built here would look at each again: a tenth of a second for a long conversation, during
    which the server does nothing else.
    """
    if isinstance(value, Mapping):
        return dict(value)
    fields = {name: field for name, field in value.__dict__.items() if name in value.__pydantic_fields_set__}
    fields |= value.__pydantic_extra__ or {}
    return {name: _plain(field) for name, field in fields.items()}


def _plain(field: Any) -> Any:
    if isinstance(field, BaseModel):
        return set_fields(field)
    if isinstance(field, list) and field and isinstance(field[0], BaseModel | dict):
        return [set_fields(part) if isinstance(part, BaseModel | Mapping) else part for part in field]
    return field


def object_in_metadata(metadata: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """The JSON object under `key`; empty when there is none.

    Raises:
        UnusableRequestError: what is there is something else.
    """
    text = (metadata or {}).get(key)
    if not text:
        return {}
    try:
        value = orjson.loads(text) if isinstance(text, str) else text
    except orjson.JSONDecodeError as error:
        raise UnusableRequestError(f"metadata.{key} must be JSON, {text[:200]!r} is not: {error}") from error
    if not isinstance(value, dict):
        raise UnusableRequestError(f"metadata.{key} must hold a JSON object, not {text[:200]!r}")
    return value
