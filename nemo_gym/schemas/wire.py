"""What the types that travel to and from model endpoints have in common, and the token ids that ride on them.

They describe messages written by others, so fields this version does not know are
kept and passed on. Validators are built on first use, which keeps imports cheap.

Token ids and log-probs, for training on exactly what was sampled, are one bundle: ids without log-probs (or the
reverse) would train on something else than what was generated, so part of a bundle is an error and never ignored.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, TypeVar, get_args

import orjson
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from nemo_gym.jsonl import Unread, parse
from nemo_gym.keys import OBSERVED_KEYS, TRAJECTORY_KEY

_Model = TypeVar("_Model", bound=BaseModel)
REQUIRED_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOKEN_FIELDS = (*REQUIRED_TOKEN_FIELDS, "routed_experts")
WEIGHT_FIELDS = ("weight_versions", "weight_segments")
"""Beside token ids, where known: the versions of the weights at the first and the last token; `[version, tokens]` of
each part of an answer that was interrupted."""
RoutedExperts = str | list[list[list[int]]]
"""Mixture-of-experts routing: an encoded envelope, or indices per token, layer and choice."""


MARK = secrets.randbelow(2**52) + 2**52
"""Stands for a list or a text beside the JSON: a number that nobody else knows, and that a float can be."""
_MARK = re.compile(rb"%d(?:\.0)?[,:](\d+)(?:\.0)?" % MARK)
"""Without the brackets or quotes around it: what begins with digits is found five times as fast."""
_TEXT_MARK = f"{MARK}:"
LONG_BYTES = 16_384
"""Of JSON, from which on it pays to leave its lists of numbers as they are."""
LONG_TEXT = 32_768
"""Characters from which on it pays to leave a text as it is."""
LONG_PARTS = b"x-nemo-gym-long"
"""The header of a long answer of ours that says from which byte to which its long lists and texts are, as in
`12-345,678-910`; it is empty where there are none. To be stored they need not be read, nor looked for."""
_MOST_PARTS = 200
WRITTEN_BY_US = (b"x-nemo-gym-json", b"compact")
"""The header of a long answer whose numbers are written as orjson writes them: to be stored they need not be read."""
ACCOUNT_BYTES = b"x-nemo-gym-account-bytes"
"""The header of an agent's answer that ends with an account written by orjson: how long that is."""
_ACCOUNT_KEY = b',"%b":' % TRAJECTORY_KEY.encode()
_LIST = re.compile(rb'"(?:%b)":\[' % "|".join(REQUIRED_TOKEN_FIELDS).encode())
_set = object.__setattr__
_IN_LISTS = b"0123456789.,-+eEnul"
_HOLDERS = (("response", "output"), ("responses_create_params", "input"))
PARTS = ("content", "output", "summary")
"""The fields of items that may be lists of parts."""


def shallow_copy(model: _Model) -> _Model:
    """What pydantic's `__copy__` makes, in a third of the time: every turn of a conversation takes one."""
    if model.__pydantic_private__ is not None:
        return BaseModel.__copy__(model)
    made = type(model).__new__(type(model))
    extra = model.__pydantic_extra__
    _set(made, "__dict__", model.__dict__.copy())
    _set(made, "__pydantic_extra__", None if extra is None else extra.copy())
    _set(made, "__pydantic_fields_set__", model.__pydantic_fields_set__.copy())
    _set(made, "__pydantic_private__", None)
    return made


class WireModel(BaseModel):
    """A JSON object that comes back out as it went in, unknown fields included.

    It has the methods of OpenAI's own types that programs call on answers.
    """

    model_config = ConfigDict(extra="allow", defer_build=True)

    __copy__ = shallow_copy

    def to_dict(
        self,
        *,
        mode: Literal["json", "python"] = "python",
        use_api_names: bool = True,
        exclude_unset: bool = True,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        warnings: bool = True,
    ) -> dict[str, Any]:
        """As OpenAI's SDK has it: `model_dump` of the fields that were set."""
        return self.model_dump(
            mode=mode,
            by_alias=use_api_names,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
            warnings=warnings,
        )

    def to_json(
        self,
        *,
        indent: int | None = 2,
        use_api_names: bool = True,
        exclude_unset: bool = True,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        warnings: bool = True,
    ) -> str:
        """As OpenAI's SDK has it: the same as JSON, for people to read."""
        return self.model_dump_json(
            indent=indent,
            by_alias=use_api_names,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
            warnings=warnings,
        )


class TaggedModel(WireModel):
    """A JSON object that readers recognise by fields which have defaults here.

    Those fields are dumped even under `exclude_unset`, so what is built in Python
    with the defaults is complete for the provider or server that receives it.
    """

    always_dumped: ClassVar[tuple[str, ...]] = ("type",)

    def model_post_init(self, context: Any, /) -> None:
        """Count the fields that readers need as given."""
        self.__pydantic_fields_set__.update(self.always_dumped)


def fastapi_body(model: type[_Model]) -> type[_Model]:
    """Decorates a model that is built on first use and serves as body or answer of a FastAPI route.

    FastAPI silences a warning of pydantic's while it makes its adapter of the model. With
    `defer_build` left in the model's config the adapter would be built, and warn, later.
    """
    model.model_config["defer_build"] = False
    return model


def fields_of(value: Any) -> Any:
    """A model of another library by the fields that were set; anything else as it is."""
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else value


class OrObject:
    """Marks a JSON object, or a list of them, that Python programs may give as models of another library.

    What comes as JSON is none of these and is read without calling Python.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain = handler(source)
        return core_schema.json_or_python_schema(
            plain, core_schema.no_info_before_validator_function(_without_objects, plain)
        )


def _without_objects(value: Any) -> Any:
    if isinstance(value, list):
        return [fields_of(part) for part in value]
    return value if isinstance(value, WireModel) else fields_of(value)


class TextOrList:
    """Marks a `str | list[...]`, so that errors say `content.list.1` instead of spelling out the list's type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text_type, list_type = get_args(source)
        return core_schema.union_schema(
            [(handler.generate_schema(text_type), "text"), (handler.generate_schema(list_type), "list")],
            mode="left_to_right",
        )


class TokenIDLogProbMixin(BaseModel):
    """What an item or message for training carries in addition."""

    model_config = ConfigDict(defer_build=True)

    prompt_token_ids: list[int]
    """Every token the model saw."""
    generation_token_ids: list[int]
    """The tokens it sampled."""
    generation_log_probs: list[float | None]
    """The log-probability of each sampled token; null where it was NaN, which JSON cannot say."""
    routed_experts: str | list[Any] | None = None
    """Mixture-of-experts routing: an encoded envelope, or nested lists of expert indices."""


class TokenIDLogProbTypedDictMixin(TypedDict):
    """The same for messages that stay plain dicts."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float | None]
    routed_experts: NotRequired[str | list[Any] | None]


class ListsBeside(NamedTuple):
    """A JSON document in two parts: its long lists of numbers and its long texts, and all else.

    A mark with the number of each stands where it belongs.
    """

    envelope: bytes
    lists: list[Any]
    body: bytes | None = None
    """The document itself, if it is what the parts were taken from."""

    def marks(self) -> list[tuple[int, int, int]]:
        """From where to where each mark is in the envelope, and its number.

        Raises:
            ValueError: there is not one mark for each of the lists and texts.
        """
        found = [(mark.start() - 1, mark.end() + 1, int(mark[1])) for mark in _MARK.finditer(self.envelope)]
        if sorted([number for _, _, number in found]) != list(range(len(self.lists))):
            raise ValueError("the marks are not those of what is beside")
        return found

    def whole(self) -> bytes:
        """The document; raises as `written`."""
        return self.written()[0] if self.body is None else self.body

    def written(self) -> tuple[bytes, list[tuple[int, int]]]:
        """The document, and from where to where what is long is in it.

        Raises:
            TypeError: orjson cannot write one of the numbers or texts.
            ValueError: the envelope does not have one mark for each.
        """
        pieces: list[bytes] = []
        spans: list[tuple[int, int]] = []
        copied_to = length = 0
        for start, end, number in self.marks():
            long = orjson.dumps(self.lists[number])
            pieces += (self.envelope[copied_to:start], long)
            length += start - copied_to + len(long)
            spans.append((length - len(long), length))
            copied_to = end
        return b"".join((*pieces, self.envelope[copied_to:])), spans


class RowWithResponse(NamedTuple):
    """A JSON document in two parts: a row, and the response that is its last field.

    A server of the same process that only reads what it is given takes the response as it is.
    """

    row: bytes
    """Without the brace at its end."""
    response: BaseModel
    """A `NeMoGymResponse` that its JSON says all of: reading that would give an equal one."""

    @property
    def envelope(self) -> bytes:
        """The document with a response that says nothing."""
        return self.row + _EMPTY_RESPONSE

    def whole(self) -> bytes:
        """The document."""
        written = self.response.__pydantic_serializer__.to_json(self.response, exclude_unset=True)
        return b"".join((self.row, b',"response":', written, b"}"))


_EMPTY_RESPONSE = b',"response":{"id":"","created_at":0,"model":"","output":[]}}'
IN_PARTS: tuple[type, ...] = (ListsBeside, RowWithResponse)
"""Documents that are JSON only when they are `whole`."""


def list_mark(number: int, *, of_floats: bool) -> list[Any]:
    """Stands for a list."""
    return [float(MARK), float(number)] if of_floats else [MARK, number]


def text_mark(number: int) -> str:
    """Stands for a text."""
    return f"{_TEXT_MARK}{number}"


def long_parts_header(spans: list[tuple[int, int]]) -> list[tuple[bytes, bytes]]:
    """What tells whoever stores a long answer where its long parts are, as a list of headers."""
    if len(spans) > _MOST_PARTS:
        return []
    return [(LONG_PARTS, b",".join([b"%d-%d" % span for span in spans]))]


def with_parts_unread(body: bytes, header: bytes) -> Any:
    """What `body`, written by us, says, with its long lists and texts, which the header tells of, as they are written.

    None when they are not where they belong: then all of it is to be read.
    """
    pieces: list[bytes | memoryview] = []
    long: list[Unread] = []
    view, copied_to = memoryview(body), 0
    try:
        for span in header.split(b",") if header else ():
            start, end = map(int, span.split(b"-"))
            ends = body[start : start + 1] + body[end - 1 : end]
            if not copied_to < start < end - 1 or ends not in (b'""', b"[]") or body.find(b"\n", start, end) >= 0:
                return None
            mark = b'"%b%d"' if ends == b'""' else b'["%b%d"]'
            pieces += (view[copied_to:start], mark % (_TEXT_MARK.encode(), len(long)))
            long.append(Unread(view[start:end]))
            copied_to = end
        record = orjson.loads(b"".join((*pieces, view[copied_to:])) if long else body)
    except ValueError:  # also what orjson raises
        return None
    if not long:
        return record
    if not isinstance(record, dict) or not OBSERVED_KEYS.isdisjoint(record):
        return None
    left = {text_mark(number): part for number, part in enumerate(long)}
    for holder in _holders(record):
        for key, value in holder.items():
            mark = value[0] if type(value) is list and len(value) == 1 else value
            if type(mark) is str and mark in left:
                holder[key] = left.pop(mark)  # of a key that is there: that does not disturb the loop
        if not left:
            return record
    return None


def _holders(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where a record may have long lists and texts: in the items of its request, the parts of these, and itself."""
    for name, of_items in _HOLDERS:
        holder = record.get(name)
        if type(holder) is dict and of_items in holder:
            yield from items_and_parts(holder[of_items])
            yield holder


def items_and_parts(items: Any) -> Iterator[dict[str, Any]]:
    """The items from the last one on, each after its parts: most that is long is in the last thing said."""
    for item in reversed(items) if type(items) is list else ():
        if type(item) is dict:
            for each in PARTS:
                if each in item and type(item[each]) is list:
                    for part in item[each]:
                        if type(part) is dict:
                            yield part
            yield item


def with_lists_unread(body: bytes) -> Any:
    """What `body`, written by us, says, with its long lists of token ids and log-probs as they are written there.

    None when there are none, or not where they belong: then all of it is to be read.
    """
    pieces: list[bytes] = []
    lists: list[Unread] = []
    copied_to = position = 0
    while found := _LIST.search(body, position):
        start, position = found.end() - 1, body.find(b"]", found.end()) + 1
        written = body[start:position]
        if not position or len(written) < LONG_BYTES:
            position = found.end()
        elif written.translate(None, _IN_LISTS) != b"[]":
            return None
        else:
            pieces += (body[copied_to:start], b"[%d]" % (MARK + len(lists)))
            lists.append(Unread(written))
            copied_to = position
    try:
        record = orjson.loads(b"".join((*pieces, body[copied_to:]))) if lists else None
    except orjson.JSONDecodeError:
        return None
    return record if lists and _put_back(record, lists) else None


def _put_back(record: Any, lists: list[Unread]) -> bool:
    """Put `lists` where their marks are; whether each had its place, and nobody told more of the rollout."""
    if not isinstance(record, dict) or not OBSERVED_KEYS.isdisjoint(record):
        return False
    left = dict(enumerate(lists, MARK))
    for item, field, marked in _lists_in(record):
        if isinstance(marked, list) and len(marked) == 1 and marked[0] in left:
            item[field] = left.pop(marked[0])
    return not left


def with_account_unread(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Any:
    """What the answer of an agent says, with its account as it is written there.

    None when the headers do not say that there is one at the end: then all of it is to be read.
    """
    length = next((value for name, value in headers if name == ACCOUNT_BYTES), None)
    if length is None:
        return None
    try:
        start = len(body) - len(b"}") - int(length)
        if not body.endswith(_ACCOUNT_KEY, 0, start):
            return None
        record = orjson.loads(body[: start - len(_ACCOUNT_KEY)] + b"}")
    except ValueError:
        return None
    record[TRAJECTORY_KEY] = Unread(body[start:-1])
    return record


def with_lists_read(record: Any) -> Any:
    """The same record, in which what nobody has read is read after all: what is long, parameters and an account."""
    for holder in (record, *_holders(record)) if isinstance(record, dict) else ():
        for key, value in holder.items():
            if type(value) is Unread:
                holder[key] = parse(value.written)
    return record


def _lists_in(record: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for holder, name in _HOLDERS:
        held = record.get(holder) if isinstance(record, dict) else None
        items = held.get(name) if isinstance(held, dict) else None
        for item in items if isinstance(items, list) else ():
            for field in REQUIRED_TOKEN_FIELDS if isinstance(item, dict) else ():
                yield item, field, item.get(field)


def carries_token_ids(fields: Mapping[str, Any]) -> bool:
    """Whether `fields` hold a complete bundle; a null counts as absent.

    Raises:
        PydanticCustomError: only part of a bundle is there.
    """
    present = [name for name in TOKEN_FIELDS if fields.get(name) is not None]
    if not present:
        return False
    missing = [name for name in REQUIRED_TOKEN_FIELDS if name not in present]
    if missing:
        raise PydanticCustomError(
            "token_metadata_incomplete",
            "Token metadata must include all required fields; missing: {missing}. Supply these beside {present}, or "
            "leave all out",
            {"present": ", ".join(present), "missing": ", ".join(missing)},
        )
    return True
