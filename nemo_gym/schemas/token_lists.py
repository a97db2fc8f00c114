"""Trajectories with token ids: their JSON with the long lists of numbers beside it.

Of the megabyte that 32k tokens with ids and log-probs amount to, nearly all is three lists of numbers. Each time such
a trajectory becomes JSON, or is read, these lists cost a hundred times what all else costs. So they are taken out: the
rest, an envelope of a few kilobytes with a mark where each list belongs, is written and read as usual. Whoever needs
the whole JSON gets the lists put in by orjson, and a server in the same process takes them as they are.

A mark is a list of one number that nobody else can know, so no text of a model is mistaken for one. Whatever is not
exactly what it should be (other types, validators that want to see the lists, numbers that are none) goes the long way.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from nemo_gym.schemas.openai_responses import NeMoGymResponse
from nemo_gym.schemas.wire import MARK, REQUIRED_TOKEN_FIELDS, ListsBeside, TokenIDLogProbMixin

_Model = TypeVar("_Model", bound=BaseModel)

LONG = 512
"""Tokens from which on it pays."""
_MARKS = {name: [float(MARK) if name == "generation_log_probs" else MARK] for name in REQUIRED_TOKEN_FIELDS}
_CHECKING = ("validators", "field_validators", "root_validators", "model_validators")
_WRITING = ("field_serializers", "model_serializers", "computed_fields")


def has_long_lists(items: Iterable[Any]) -> bool:
    """Whether there is an item with so many tokens that it pays."""
    for item in items:  # noqa: SIM110 - for every rollout, and a generator takes three times as long
        if isinstance(item, TokenIDLogProbMixin) and len(item.generation_token_ids) >= LONG:
            return True
    return False


def response_in(model: BaseModel) -> NeMoGymResponse | None:
    """The response that `model` is, or has, if it carries long lists."""
    response = model if type(model) is NeMoGymResponse else model.__dict__.get("response")
    return response if type(response) is NeMoGymResponse and has_long_lists(response.output) else None


def json_of(model: BaseModel, **options: Any) -> bytes | None:
    """The JSON of what is or has a response with long lists, with pydantic's options; None: take the long way."""
    response = response_in(model)
    if response is None or not _is_written_plainly(type(model)):
        return None
    bare, lists = _without_lists(response)
    holder = bare if model is response else _changed(model, {"response": bare})
    try:
        return ListsBeside(holder.__pydantic_serializer__.to_json(holder, **options), lists).whole()
    except (TypeError, ValueError):
        return None


def with_lists_beside(response: NeMoGymResponse, before: bytes, after: bytes) -> ListsBeside | None:
    """The JSON of the set fields of a response, between other JSON; None when that must be written whole."""
    if type(response) is not NeMoGymResponse or not has_long_lists(response.output):
        return None
    bare, lists = _without_lists(response)
    if not all(map(_are_numbers, lists)):
        return None
    envelope = bare.__pydantic_serializer__.to_json(bare, exclude_unset=True)
    beside = ListsBeside(b"".join((before, envelope, after)), lists)
    return beside if len(beside.parts()) == len(lists) + 1 else None


def can_be_filled_in(body_type: Any) -> bool:
    """Whether a body is read from its envelope: it has a response, and nobody checks that on the way."""
    if (
        not isinstance(body_type, type)
        or not issubclass(body_type, BaseModel)
        or "response" not in body_type.model_fields
    ):
        return False
    response = body_type.model_fields["response"]
    is_plain = response.annotation is NeMoGymResponse and not response.metadata and response.alias is None
    has_hook = body_type.model_post_init is not BaseModel.model_post_init
    return is_plain and not has_hook and not _decorations(body_type, _CHECKING)


def fill_in(body: BaseModel, lists: list[list[Any]]) -> bool:
    """Put copies of `lists` where their marks are in the response of `body`; False if they do not fit."""
    marked = list(_marked(body.__dict__["response"].output))
    if len(marked) != len(lists):
        return False
    for (fields, name), numbers in zip(marked, lists, strict=True):
        fields[name] = numbers[:]
    return True


def _marked(items: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for item in items:
        if isinstance(item, TokenIDLogProbMixin):
            for name, value in item.__dict__.items():
                if name in _MARKS and value == _MARKS[name]:
                    yield item.__dict__, name


def _without_lists(response: NeMoGymResponse) -> tuple[NeMoGymResponse, list[list[Any]]]:
    """A copy of a response with marks for the lists of its long items, and these lists in order."""
    lists: list[list[Any]] = []
    output: list[Any] = []
    for item in response.output:
        if isinstance(item, TokenIDLogProbMixin) and len(item.generation_token_ids) >= LONG:
            lists += (value for name, value in item.__dict__.items() if name in _MARKS)  # as they are written
            output.append(_changed(item, _MARKS))
        else:
            output.append(item)
    return _changed(response, {"output": output}), lists


def _changed(model: _Model, values: Mapping[str, Any]) -> _Model:
    """A copy with other values, which counts as set what was set before."""
    copied = model.__copy__()
    copied.__dict__.update(values)
    return copied


def _are_numbers(numbers: list[Any]) -> bool:
    """Whether JSON says them as they are: it has neither infinity nor NaN."""
    try:
        return type(numbers) is list and math.isfinite(sum(numbers))
    except (TypeError, OverflowError):
        return False


@cache
def _is_written_plainly(model_type: type[BaseModel]) -> bool:
    """Whether nobody looks at the response while it is written."""
    return model_type.model_dump is BaseModel.model_dump and not _decorations(model_type, _WRITING)


def _decorations(model_type: type[BaseModel], kinds: tuple[str, ...]) -> bool:
    decorators = model_type.__pydantic_decorators__
    return any(getattr(decorators, kind) for kind in kinds)
