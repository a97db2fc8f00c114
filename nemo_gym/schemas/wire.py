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
"""Stands in a list of its own for a list beside the JSON: a number that nobody else knows, and that a float can be."""
_MARK = re.compile(rb"\[%d(?:\.0)?\]" % MARK)
LONG_BYTES = 16_384
"""Of JSON, from which on it pays to leave its lists of numbers as they are."""
WRITTEN_BY_US = (b"x-nemo-gym-json", b"compact")
"""The header of a long answer whose numbers are written as orjson writes them: to be stored they need not be read."""
ACCOUNT_BYTES = b"x-nemo-gym-account-bytes"
"""The header of an agent's answer that ends with an account written by orjson: how long that is."""
_ACCOUNT_KEY = b',"%b":' % TRAJECTORY_KEY.encode()
_LIST = re.compile(rb'"(?:%b)":\[' % "|".join(REQUIRED_TOKEN_FIELDS).encode())
_IN_LISTS = b"0123456789.,-+eEnul"
_HOLDERS = (("response", "output"), ("responses_create_params", "input"))


class WireModel(BaseModel):
    """A JSON object that comes back out as it went in, unknown fields included.

    It has the methods of OpenAI's own types that programs call on answers.
    """

    model_config = ConfigDict(extra="allow", defer_build=True)

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
    """A JSON document in two parts: its long lists of numbers, and all else, with a mark where each list belongs."""

    envelope: bytes
    lists: list[list[Any]]

    def parts(self) -> list[bytes]:
        """What is before, between and after the lists."""
        return _MARK.split(self.envelope)

    def whole(self) -> bytes:
        """The document.

        Raises:
            TypeError: orjson cannot write one of the numbers.
            ValueError: the envelope has not as many marks as there are lists.
        """
        parts = self.parts()
        pieces = [parts[0]]
        for numbers, following in zip(self.lists, parts[1:], strict=True):
            pieces += (orjson.dumps(numbers), following)
        return b"".join(pieces)


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
    """The same record, in which what `with_lists_unread` and `with_account_unread` left is read after all."""
    if isinstance(record, dict) and isinstance(account := record.get(TRAJECTORY_KEY), Unread):
        record[TRAJECTORY_KEY] = parse(account.written)
    for item, field, value in _lists_in(record):
        if isinstance(value, Unread):
            item[field] = orjson.loads(value.written)
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
