"""What a request says, in one spelling: equal requests have equal digests, whoever generated the ids in them.

A conversation is sent whole with every turn, and grows. So a request is taken for what it adds to an earlier one of the
same rollout, where it does: only that is written out, hashed and recorded.
"""

import json
import re
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

from nemo_gym.rollout_correlation import without_attempt

_GENERATED_FIELD = re.compile(
    rb'id":"(?:(?<="id":")(?<!"prompt":\{"id":")|(?<="call_id":")|(?<="tool_call_id":")|(?<="item_id":")'
    rb'|(?<="response_id":"))([^"\\]+)"'
)
_GENERATED_TEXT = re.compile(
    rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?<![0-9A-Za-z])[0-9a-f]{24,64}(?![0-9A-Za-z])"
    rb"|[12][0-9]{3}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
)
_DIGITS = bytes.maketrans(b"0123456789", b"d" * 10)
_HEX = bytes.maketrans(b"0123456789abcdef", b"h" * 16)
_LONG_HEX = b"h" * 24
_ITEM_FIELDS = {"responses": "input", "chat": "messages"}
"""Of each dialect: the field that grows."""
Numbers = dict[bytes, bytes]


class Settings(NamedTuple):
    """A request without its items."""

    as_given: dict[str, Any]
    text: bytes
    """As JSON."""
    normal: bytes


class Asked(NamedTuple):
    """A request, and what of it an earlier one has said already."""

    digest: bytes
    new_items: list[bytes]
    items_before: int
    """How many items the earlier request has; all of them are the first ones of this."""
    items: list[dict[str, Any]]
    settings: Settings
    hashed: Any
    numbers: Numbers


@lru_cache(4096)
def sample_of(rollout_id: str | None) -> int:
    """What stands in a frame for the rollout of a call; all attempts at a rollout have the same."""
    sample = "" if rollout_id is None else without_attempt(rollout_id)
    return int.from_bytes(blake2b(sample.encode(errors="replace"), digest_size=8).digest(), "little")


def asked(
    body: BaseModel, dialect: str, start: bytes = b"", before: Asked | None = None, known: Settings | None = None
) -> Asked:
    """What `body` asks.

    Args:
        body: The request.
        dialect: Its API.
        start: Goes into the digest; it was that of `before`, too.
        before: An earlier request, which this one may go on from.
        known: Settings that this request may have, too.
    """
    given = body.__dict__
    field = _ITEM_FIELDS[dialect]
    values = given[field]
    if type(values) is not list:
        field, values = "", []
    items = [getattr(item, "__dict__", item) for item in values]  # of models; dicts have none
    if before is not None and items[: len(before.items)] == before.items:
        at, hashed, numbers, kept, known = (
            len(before.items),
            before.hashed,
            before.numbers,
            before.items,
            before.settings,
        )
    else:
        at, hashed, numbers, kept = 0, blake2b(start, digest_size=16), {}, []
    new_items = [_text(item) for item in items[at:]]
    if new_items:
        numbers = numbers.copy()
        hashed = hashed.copy()
        hashed.update(normalised(b"\n".join(new_items), numbers))
        hashed.update(b"\n")
        kept = [*kept, *map(_copied, items[at:])]
    settings = given.copy()
    settings.pop(field, None)
    if body.__pydantic_extra__:
        settings.update(body.__pydantic_extra__)
    if known is None or settings != known.as_given:
        text = _text(settings)
        known = Settings({name: _copied(value) for name, value in settings.items()}, text, normalised(text, {}))
    whole = hashed.copy()
    whole.update(known.normal)
    return Asked(whole.digest(), new_items, at, kept, known, hashed, numbers)


def _copied(value: Any) -> Any:
    """What callers may change afterwards, as it is now."""
    return value.copy() if isinstance(value, dict | list) else value


def _text(fields: Any) -> bytes:
    """The fields of a model, all of which a model has, or a value that is none, as sorted JSON without nulls."""
    if type(fields) is dict:
        fields = {name: value for name, value in fields.items() if value is not None}
    try:
        return orjson.dumps(fields, _fields_of, orjson.OPT_SORT_KEYS)
    except TypeError:  # halves of surrogate pairs, and what else only Python's JSON takes
        return json.dumps(fields, sort_keys=True, default=_fields_of).encode()


def _fields_of(value: Any) -> Any:
    if isinstance(value, BaseModel):
        own = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        return {name: inner for name, inner in own.items() if inner is not None}
    return repr(value)


def normalised(text: bytes, numbers: Numbers) -> bytes:
    """JSON with numbers, in the order of their first use, for generated ids and times."""
    if b'id":"' in text:
        text = _GENERATED_FIELD.sub(
            lambda found: b'id":"%b"' % numbers.setdefault(found[1], b"#%d" % len(numbers)), text
        )
    signs = text.translate(_HEX)  # a text without these, which take no time to find, has nothing generated in it
    if _LONG_HEX in signs or b"-hhhh-hhhh-hhhh-" in signs or b"dddd-dd-dd" in text.translate(_DIGITS):
        return _GENERATED_TEXT.sub(lambda found: numbers.setdefault(found[0], b"#%d" % len(numbers)), text)
    return text


def request_json(asked: Asked, dialect: str, before: Asked | None = None) -> bytes:
    """What is recorded of a request: what is new in it since `before`, as an object of its fields."""
    settings = b"{}" if before is not None and asked.settings is before.settings else asked.settings.text
    if not asked.items:
        return settings
    comma = b"" if settings == b"{}" else b","
    return b'%b%b"%b":[%b]}' % (settings[:-1], comma, _ITEM_FIELDS[dialect].encode(), b",".join(asked.new_items))


def joined(before: dict[str, Any], added: dict[str, Any], items_before: int) -> dict[str, Any]:
    """The whole request, of an earlier one and of what one that goes on from it has recorded."""
    whole = {**before, **added}
    for field in _ITEM_FIELDS.values():
        if isinstance(added.get(field), list):
            whole[field] = [*(before.get(field) or [])[:items_before], *added[field]]
    return whole


def first_difference(was: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two values that were read from JSON differ first, and both values there; None when they are equal.

    Ids do not count.
    """
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*was, *(name for name in now if name not in was)]:
            inner = first_difference(was.get(name), now.get(name), f"{path}.{name}" if path else name)
            if inner is not None:
                return inner
        return None
    if isinstance(was, list) and isinstance(now, list):
        for at in range(max(len(was), len(now))):
            then, today = (each[at] if at < len(each) else None for each in (was, now))
            inner = first_difference(then, today, f"{path}[{at}]")
            if inner is not None:
                return inner
        return None
    if was == now or path.rpartition(".")[2] in ("id", "call_id", "tool_call_id"):
        return None
    return path, was, now
