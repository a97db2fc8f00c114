"""Trajectories with token ids, long texts or images: their JSON with what is long beside it.

Of the megabyte that 32k tokens with ids and log-probs amount to, nearly all is three lists of numbers; of a row with an
image it is one text. Each time such a trajectory becomes JSON, or is read, these cost a hundred times what all else
costs. So they are taken out: the rest, an envelope of a few kilobytes with a mark where each belongs, is written and
read as usual. Whoever needs the whole JSON gets them put in by orjson, and a server in the same process takes them as
they are.

A mark holds a number that nobody else can know, so no text of a model is mistaken for one. Whatever is not exactly what
it should be (other types, validators that want to see what is long, numbers that are none) goes the long way.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import orjson
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_gym.schemas.openai_items import RESPONSES_TO_TRAIN, NeMoGymFunctionCallOutput
from nemo_gym.schemas.openai_responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.schemas.wire import (
    LONG_TEXT,
    MARK,
    PARTS,
    REQUIRED_TOKEN_FIELDS,
    ListsBeside,
    RowWithResponse,
    items_and_parts,
    list_mark,
    text_mark,
)

_Model = TypeVar("_Model", bound=BaseModel)

LONG = 512
"""Tokens from which on it pays."""
_OF_FLOATS = "generation_log_probs"
_TEXTS = (*PARTS, "arguments")
_PART_TEXTS = ("text", "image_url", "file_data")
_PARAMS, _RESPONSE = "responses_create_params", "response"
_CHECKING = ("validators", "field_validators", "root_validators", "model_validators")
_WITHOUT_NUMBERS = frozenset({*RESPONSES_TO_TRAIN, NeMoGymFunctionCallOutput})
_set = object.__setattr__
_NUMBERS = (int, float)
_BACKSLASH = ord("\\")
_PRECEDES_TEXT, _FOLLOWS_TEXT = b"{[,: \t\r\n", b"}],: \t\r\n"
_FILLED = ((_RESPONSE, "output"), (_PARAMS, "input"))
_WRITING = ("field_serializers", "model_serializers", "computed_fields")


def has_long_parts(items: Any) -> bool:
    """Whether there is an item with so many tokens, or so long a text, that it pays: for every rollout, so not for all.

    A text where texts hardly ever are is found only beside another.
    """
    if type(items) is not list:
        return type(items) is str and len(items) >= LONG_TEXT
    try:
        for item in items:
            fields = item.__dict__
            if "generation_token_ids" in fields and len(fields["generation_token_ids"]) >= LONG:
                return True
            for name in _TEXTS:
                if name in fields:
                    value = fields[name]
                    if (type(value) is str and len(value) >= LONG_TEXT) or (type(value) is list and _is_long(value)):
                        return True
    except AttributeError:  # it is no model
        pass
    return False


def _is_long(parts: list[Any]) -> bool:
    for part in parts:
        inner = part if type(part) is dict else part.__dict__
        for name in _PART_TEXTS:
            if name in inner and type(inner[name]) is str and len(inner[name]) >= LONG_TEXT:
                return True
    return False


def json_of(model: BaseModel, **options: Any) -> tuple[bytes, list[tuple[int, int]]] | None:
    """The JSON of what is or has a response, with pydantic's options, and from where to where what is long is in it.

    None: nothing is, or it must be written the long way.
    """
    fields = model.__dict__
    response = model if type(model) is NeMoGymResponse else fields.get(_RESPONSE)
    if type(response) is not NeMoGymResponse:
        return None
    params = fields.get(_PARAMS) if model is not response else None
    is_asked_long = type(params) is NeMoGymResponseCreateParamsNonStreaming and has_long_parts(params.input)
    if not (is_asked_long or has_long_parts(response.output)) or not _is_written_plainly(type(model)):
        return None
    beside: list[Any] = []
    try:
        holder: BaseModel = _changed(response, {"output": _without_long(response.output, beside)})
        if model is not response:
            changes: dict[str, Any] = {_RESPONSE: holder}
            if is_asked_long and params is not None:
                changes[_PARAMS] = _changed(params, {"input": _without_long(params.input, beside)})
            holder = _changed(model, changes)
        return ListsBeside(holder.__pydantic_serializer__.to_json(holder, **options), beside).written()
    except (TypeError, ValueError, AttributeError):
        return None


def with_lists_beside(response: NeMoGymResponse, row: bytes | ListsBeside) -> ListsBeside | None:
    """A row, in which something follows, with the JSON of the set fields of a response as its last field.

    None when that must be written whole.
    """
    if type(response) is not NeMoGymResponse:
        return None
    parts: ListsBeside | None = None
    if not isinstance(row, bytes):
        parts = row
    elif len(row) >= LONG_TEXT:
        parts = texts_beside(row)
    if parts is None and not has_long_parts(response.output):
        return None
    before, beside = (cast(bytes, row), []) if parts is None else (parts.envelope, parts.lists[:])
    try:
        bare = _changed(response, {"output": _without_long(response.output, beside)})
        if not all(map(_can_be_told, beside)):
            return None
        envelope = bare.__pydantic_serializer__.to_json(bare, exclude_unset=True)
        document = ListsBeside(b"".join((before, b',"response":', envelope, b"}")), beside)
        document.marks()
    except (ValueError, AttributeError):
        return None
    return document


def long_texts_in(body: bytes) -> list[tuple[int, int]] | None:
    """From where to where the long texts of a JSON document are, quotes included; None if quotes in texts hide them.

    Every so many bytes it is looked for the quotes around, which costs next to nothing: no long text lies in between.
    """
    spans: list[tuple[int, int]] = []
    looked_to = 0
    for place in range(LONG_TEXT, len(body), LONG_TEXT):
        if place < looked_to:
            continue
        start = body.rfind(b'"', max(looked_to, place - LONG_TEXT), place)
        end = body.find(b'"', place) if start >= 0 else -1
        if end - start <= LONG_TEXT:
            continue
        before, after = body[start - 1], body[start + 1]
        if after in _FOLLOWS_TEXT and before not in _PRECEDES_TEXT and before != _BACKSLASH:
            looked_to = start + 1  # it ends a text, and what is long follows it
        elif _BACKSLASH in (before, body[end - 1]) or body.find(b'\\"', looked_to, start) >= 0:
            return None  # whoever writes quotes in texts writes many of them
        elif after in _FOLLOWS_TEXT and body.count(b'"', looked_to, start) % 2:
            looked_to = start + 1
        else:
            spans.append((start, end + 1))
            looked_to = end + 1
    return spans


def texts_beside(body: bytes) -> ListsBeside | None:
    """A JSON document with its long texts beside it, which are copied, not parsed, unless they have escapes.

    What stands between two quotes is such a text if orjson would write it so, too. None: there are none, or they cannot
    be told apart from the rest, or are not JSON.
    """
    spans = long_texts_in(body)
    if not spans:
        return None
    view, copied_to = memoryview(body), 0
    pieces: list[bytes | memoryview] = []
    texts: list[Any] = []
    try:
        for start, end in spans:
            if body.find(b"\\", start, end) >= 0:
                text = orjson.loads(view[start:end])
            else:
                text = str(view[start + 1 : end - 1], "utf-8")
                if len(orjson.dumps(text)) != end - start:
                    return None
            pieces += (view[copied_to:start], b'"%b"' % text_mark(len(texts)).encode())
            texts.append(text)
            copied_to = end
    except ValueError:  # it is no UTF-8, or has half a surrogate pair
        return None
    return ListsBeside(b"".join((*pieces, view[copied_to:])), texts, body)


def read_around_texts(body: bytes) -> tuple[Any, ListsBeside | None]:
    """What orjson makes of the answer of an endpoint, in less than half the time where most of it is a long text.

    And the same with such texts beside it, if it was read so.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
    """
    beside = texts_beside(body)
    if beside is None:
        return orjson.loads(body), None
    try:
        content = orjson.loads(beside.envelope)
    except orjson.JSONDecodeError:
        return orjson.loads(body), None  # which words it
    left = {text_mark(number): text for number, text in enumerate(beside.lists)}
    for holder in _holders_in_answer(content):
        for key, value in holder.items():
            if type(value) is str and value in left:
                holder[key] = left.pop(value)  # of a key that is there: that does not disturb the loop
        if not left:
            return content, beside
    return orjson.loads(body), None


def _holders_in_answer(answer: Any) -> Iterator[dict[str, Any]]:
    """Where the answer of an endpoint has its texts."""
    if type(answer) is dict:
        yield from items_and_parts(answer.get("output"))
        for choice in answer.get("choices") or ():
            if type(choice) is dict and type(choice.get("message")) is dict:
                yield choice["message"]


def row_with_response(row: bytes, response: BaseModel) -> RowWithResponse | None:
    """A row, in which something follows, and a response that can be handed over beside it.

    None if reading its JSON might give another one: what is in it must have been read before, or made like that, and
    log-probs may be no numbers.
    """
    if type(response) is not NeMoGymResponse:
        return None
    for item in response.output:
        if type(item) not in _WITHOUT_NUMBERS:
            return None
    return RowWithResponse(row, response)


def can_be_filled_in(body_type: Any) -> bool:
    """Whether a body is read from its envelope: it has a request, and perhaps a response, that nobody checks meanwhile.

    So is one of which nothing is kept.
    """
    if not isinstance(body_type, type) or not issubclass(body_type, BaseModel):
        return False
    fields = body_type.model_fields
    if body_type.model_post_init is not BaseModel.model_post_init or _decorations(body_type, _CHECKING):
        return False
    if not fields:
        return body_type is not BaseModel and body_type.model_config.get("extra", "ignore") == "ignore"
    is_plain = _RESPONSE not in fields or _is_plain(fields[_RESPONSE], NeMoGymResponse)
    return is_plain and _is_plain(fields.get(_PARAMS), NeMoGymResponseCreateParamsNonStreaming)


def _is_plain(field: FieldInfo | None, kind: type[BaseModel]) -> bool:
    return field is not None and field.annotation is kind and not field.metadata and field.alias is None


def fill_in(body: BaseModel, beside: list[Any]) -> bool:
    """Put what is beside, lists as copies, where the marks are in the response and the input of `body`, if it has any.

    False if they do not fit.
    """
    fields = body.__dict__
    if not fields:
        return True
    parts = [(fields[name].__dict__, of_items) for name, of_items in _FILLED if name in fields]
    return _fill_in(parts, beside)


def fill_in_response(response: NeMoGymResponse, beside: list[Any]) -> bool:
    """The same in a response; nobody knows it yet if that fails."""
    return _fill_in([(response.__dict__, "output")], beside)


def _fill_in(parts: list[tuple[dict[str, Any], str]], beside: list[Any]) -> bool:
    texts = {text_mark(number): number for number, part in enumerate(beside) if type(part) is str}
    left = len(beside)
    for fields, of_items in parts:
        for holder in _holders(fields, of_items):
            left -= _put_in(holder, beside, texts)
            if not left:
                return True
    return False


def _put_in(holder: dict[str, Any], beside: list[Any], texts: dict[str, int]) -> int:
    """Put what is beside into one part of a body; how much that was."""
    filled = 0
    for name, value in holder.items():
        if type(value) is str and value in texts:
            holder[name] = beside[texts.pop(value)]
        elif type(value) is list and len(value) == 2 and type(value[0]) in _NUMBERS and value[0] == MARK:
            holder[name] = beside[int(value[1])][:]
        else:
            continue
        filled += 1
    return filled


def _holders(holder: dict[str, Any], of_items: str) -> Iterator[dict[str, Any]]:
    """Where a response or its request may have what is long: in its items from the last one on, their parts, itself."""
    items = holder[of_items] if type(holder[of_items]) is list else []
    for item in reversed(items):
        fields = item.__dict__
        for name in PARTS:
            if name in fields and type(fields[name]) is list:
                for part in fields[name]:
                    yield part if type(part) is dict else part.__dict__
        yield fields
    yield holder


def _without_long(items: Any, beside: list[Any]) -> Any:
    """A copy of items with marks for what is long, which is added to what is `beside`.

    Raises:
        AttributeError: one of them is no model.
    """
    if type(items) is str:
        return _marked_text(items, beside) if len(items) >= LONG_TEXT else items
    bare = []
    for item in items:
        changes: dict[str, Any] = {}
        fields = item.__dict__
        for name in _TEXTS:
            if name not in fields:  # `get` is a call, and there are many of these
                continue
            value = fields[name]
            if type(value) is str and len(value) >= LONG_TEXT:
                changes[name] = _marked_text(value, beside)
            elif type(value) is list and (parts := _without_long_texts(value, beside)) is not None:
                changes[name] = parts
        if "generation_token_ids" in fields and len(fields["generation_token_ids"]) >= LONG:
            for name in REQUIRED_TOKEN_FIELDS:
                changes[name] = list_mark(len(beside), of_floats=name == _OF_FLOATS)
                beside.append(fields[name])
        bare += [_changed(item, changes) if changes else item]
    return bare


def _without_long_texts(parts: list[Any], beside: list[Any]) -> list[Any] | None:
    """The parts of a message with marks for long texts; None when there are none."""
    bare: list[Any] = []
    before = len(beside)
    for part in parts:
        inner = part if type(part) is dict else part.__dict__
        changes = {}
        for name in _PART_TEXTS:
            if name in inner and type(inner[name]) is str and len(inner[name]) >= LONG_TEXT:
                changes[name] = _marked_text(inner[name], beside)
        if not changes:
            bare.append(part)
        else:
            bare.append({**part, **changes} if inner is part else _changed(part, changes))
    return None if len(beside) == before else bare


def _marked_text(text: str, beside: list[Any]) -> str:
    beside.append(text)
    return text_mark(len(beside) - 1)


def _changed(model: _Model, values: Mapping[str, Any]) -> _Model:
    """A copy with other values, only to be written: it shares with the model what was set and what is not declared."""
    copied = object.__new__(type(model))
    _set(copied, "__dict__", {**model.__dict__, **values})
    _set(copied, "__pydantic_fields_set__", model.__pydantic_fields_set__)
    _set(copied, "__pydantic_extra__", model.__pydantic_extra__)
    _set(copied, "__pydantic_private__", model.__pydantic_private__)
    return copied


def _can_be_told(long: Any) -> bool:
    """Whether JSON says it as it is: it has neither infinity nor NaN."""
    if type(long) is str:
        return True
    try:
        return type(long) is list and math.isfinite(sum(long))
    except (TypeError, OverflowError):
        return False


@cache
def _is_written_plainly(model_type: type[BaseModel]) -> bool:
    """Whether nobody looks at the response while it is written."""
    return model_type.model_dump is BaseModel.model_dump and not _decorations(model_type, _WRITING)


def _decorations(model_type: type[BaseModel], kinds: tuple[str, ...]) -> bool:
    decorators = model_type.__pydantic_decorators__
    return any(getattr(decorators, kind) for kind in kinds)
