"""The bodies of `/seed_session`, `/run` and `/verify`, and what is wrong with a row in the eyes of those who get it.

A row carries fields that only its verifier, or nobody, declares. They are accepted, and set aside: a server sees
what its types declare, so that `Response(**body.model_dump(), reward=...)` never meets a field twice. The server
that answers puts them back (`with_row`), and the rollout file shows the whole row. A type that says what
becomes of extra fields (`extra="allow"`) is taken at its word.

Before the first model call agents and environments answer `POST /ng_check_rows` by holding rows against the very types
that `/run`, `/seed_session` and `/verify` read, so what passes there passes here. Servers that do not know the route
are not asked.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from nemo_gym.errors import did_you_mean
from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.schemas.openai_responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

_VERDICT = frozenset({"reward", "reward_components"})
_OF_A_TRAINER = "_rowidx"
"""Marks a row whose sender keeps the row itself, and takes every number in the answer for a metric."""
_FAILURE = ("_ng_failure", "_ng_no_persist")

_Answer = TypeVar("_Answer")


def _set_aside(row: "BaseRunRequest") -> "BaseRunRequest":
    if row._set_aside is not None:
        return row  # an object that is validated again, such as an answer with its row
    extra = row.model_extra
    if extra:
        row.model_fields_set.difference_update(extra)
        row._set_aside = dict(extra)
        extra.clear()
        if "reward" in type(row).model_fields:
            extra.update(_report_of_failure(row._set_aside))
    return row


def _report_of_failure(extra: dict[str, Any]) -> dict[str, Any]:
    """What in a verdict says that it is none: agents that declare nothing of it pass it on, too."""
    return {name: value for name, value in extra.items() if name.startswith(_FAILURE)}


def _forget_verdict(row: BaseModel) -> BaseModel:
    extra = row.model_extra or {}
    forget(row, [name for name in extra if name in _VERDICT or name.startswith(_FAILURE)])
    return row


def forget(row: BaseModel, names: Iterable[str]) -> None:
    """Drop undeclared fields of these names from a row whose type allows them."""
    extra = row.model_extra or {}
    for name in extra.keys() & set(names):
        extra.pop(name, None)
        row.model_fields_set.discard(name)


def undeclared_fields(row: BaseModel) -> dict[str, Any]:
    """What an answer to `row` puts back: the fields that its type does not declare.

    Left out are verdicts of an earlier run and names with an underscore in front, which belong to whoever sent the
    row. The row of a trainer has none: what it did not ask for would become a metric.
    """
    aside = row._set_aside if isinstance(row, BaseRunRequest) else None
    fields = row.model_extra if aside is None else aside
    back: dict[str, Any] = {}
    if fields and _OF_A_TRAINER not in fields:
        for name in fields:
            if name[0:1] != "_" and name not in _VERDICT:
                back[name] = fields[name]
    return back


def all_fields(row: BaseModel) -> dict[str, Any]:
    """Everything that came with a row: declared, allowed or set aside."""
    aside = row._set_aside if isinstance(row, BaseRunRequest) else None
    return {**(aside or {}), **dict(row)}


def _inner_model(schema: Any) -> Any:
    while schema["type"] != "model":
        schema = schema["schema"]
    return schema


class BaseRunRequest(BaseModel):
    """A row: what to ask the model, and whatever the verifier wants to know."""

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    _set_aside: dict[str, Any] | None = PrivateAttr(None)
    """The undeclared fields of a row; empty for an answer that has got those of its row."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """What pydantic makes of the class, with undeclared fields set aside instead of lost."""
        made: Any = handler(source)
        schema: CoreSchema = made
        is_open = "extra" not in cls.model_config
        finish = _set_aside if is_open else _forget_verdict
        is_request = "response" in cls.model_fields and "reward" not in cls.model_fields
        is_made_before = made.get("function", {}).get("function") is finish
        if is_made_before or not (is_open or is_request):
            return schema
        if is_open:
            _inner_model(made)["config"]["extra_fields_behavior"] = "allow"
        ref = made.pop("ref", None)
        return core_schema.no_info_after_validator_function(finish, schema, ref=ref)


@cache
def _written_by(answer_type: type[BaseModel]) -> frozenset[str]:
    """The names that a type itself writes, in Python and on the wire."""
    fields = answer_type.model_fields
    aliases = [field.serialization_alias for field in fields.values() if field.serialization_alias]
    computed = [field.alias or name for name, field in answer_type.model_computed_fields.items()]
    return frozenset([*fields, *aliases, *computed])


def with_row(answer: _Answer, row: BaseModel) -> _Answer:
    """`answer` with the undeclared fields of `row` that it lacks; it says itself what it declares."""
    back = undeclared_fields(row)
    if not back:
        return answer
    if isinstance(answer, dict):
        return {**back, **answer}  # type: ignore[return-value]
    if isinstance(answer, BaseRunRequest) and answer.model_config.get("extra", "allow") == "allow":
        said = _written_by(type(answer))
        answer._set_aside = {}
        extra = answer.model_extra
        if extra is not None:
            own = dict(extra)
            extra.clear()
            extra.update({name: value for name, value in back.items() if name not in said})
            extra.update(own)
    return answer


class BaseVerifyRequest(BaseRunRequest):
    """A row with the trajectory to score.

    A verdict of an earlier run is dropped: rollouts can be verified again, and the
    new verdict does not collide with the old one.
    """

    response: NeMoGymResponse


class BaseVerifyResponse(BaseVerifyRequest):
    """The scored trajectory."""

    reward: float


class BaseMultiRewardVerifyResponse(BaseVerifyResponse):
    """The trajectory scored in several respects, which sum up to `reward`."""

    reward_components: dict[str, float]


class BaseSeedSessionRequest(BaseModel):
    """Prepares a session. Agents post the whole row; a subclass declares the fields it needs."""


class BaseSeedSessionResponse(BaseModel):
    """The session is ready.

    A subclass may declare `tools`: function tools that this session has beyond those of the row. Agents offer them to
    the model, and call no tool that was not offered.
    """


ROW_CHECK_PATH = "/ng_check_rows"
_LONGEST_VALUE = 60
_OF_KEYS_AND_TYPES = frozenset({"missing", "extra_forbidden"})


class RowFault(BaseModel):
    """One thing that is wrong with one row."""

    model_config = ConfigDict(defer_build=True)

    where: str
    """As in `responses_create_params.temperatur`; empty: the row as a whole."""
    text: str
    is_certain: bool = True
    """Whether the rollout must fail for it; else it may be that somebody on the way adds what is missing."""
    is_of_shape: bool = False
    """Whether every row with these keys and types of values has it, too."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class RowsToCheck(BaseModel):
    """The body of the request."""

    model_config = ConfigDict(defer_build=True)

    rows: list[dict[str, Any]]
    is_verified: bool = True
    """Whether the rollouts will be verified."""


class CheckedRows(BaseModel):
    """The answer: for each row what is wrong with it."""

    model_config = ConfigDict(defer_build=True)

    faults: list[list[RowFault]] = Field(default_factory=list)


def faults_in(error: ValidationError, row: Mapping[str, Any], known: Collection[str] = ()) -> list[RowFault]:
    """What a failed validation says about `row`; `known` are the fields of the type it was held against.

    Not about its `response`, which no row has before it is rolled out. A validator that looks at the row as a whole may
    have looked at that, too, so what it says is not certain.
    """
    items = [item for item in error.errors(include_url=False) if item["loc"][:1] != (RESPONSE_KEY_NAME,)]
    return [
        RowFault(
            where=".".join(str(part) for part in item["loc"]),
            text=_text(item, row, known),
            is_certain=bool(item["loc"]),
            is_of_shape=item["type"] in _OF_KEYS_AND_TYPES or item["type"].endswith("_type"),
        )
        for item in items
    ]


def _text(item: ErrorDetails, row: Mapping[str, Any], known: Collection[str]) -> str:
    place = item["loc"]
    if item["type"] == "missing":
        others = [key for key in row if key not in known] if len(place) == 1 else ()
        return f"it is missing{did_you_mean(str(place[-1]), others).replace('did you mean', 'is it')}"
    if item["type"] == "extra_forbidden" and place[:1] == (RESPONSES_CREATE_PARAMS_KEY_NAME,) and len(place) == 2:
        return unknown_parameter(str(place[1]))
    value = item["input"]
    given = f" (it is {value!r})" if isinstance(value, str | int | float) and len(repr(value)) <= _LONGEST_VALUE else ""
    return f"{item['msg'].removeprefix('Value error, ')}{given}"


def unknown_parameter(name: str) -> str:
    """What to say of a parameter that requests do not have."""
    meant = did_you_mean(name, NeMoGymResponseCreateParamsNonStreaming.model_fields)
    remedy = "" if meant else "; parameters of one vendor go into metadata.extra_body"
    return f"there is no such parameter{meant}{remedy}"


def merged_faults(own: list[RowFault], passed_on: list[RowFault], *, is_certain: bool) -> list[RowFault]:
    """What an agent and the environment behind it say about one row, each place once.

    What the environment says is certain only if it gets the row as it is.
    """
    theirs = [fault.model_copy(update={"is_certain": fault.is_certain and is_certain}) for fault in passed_on]
    return list({fault.where: fault for fault in [*theirs, *own]}.values())
