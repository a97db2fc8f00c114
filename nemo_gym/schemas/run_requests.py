"""The bodies of `/seed_session`, `/run` and `/verify`.

A row carries fields that only its verifier, or nobody, declares. They are accepted, and set aside: a server sees
what its types declare, so that `Response(**body.model_dump(), reward=...)` never meets a field twice. The server
that answers puts them back (`with_row`), and the rollout file shows the whole row. A type that says what
becomes of extra fields (`extra="allow"`) is taken at its word.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from nemo_gym.schemas.openai_responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

_VERDICT = frozenset({"reward", "reward_components"})
_OF_A_TRAINER = "_rowidx"
"""Marks a row whose sender keeps the row itself, and takes every number in the answer for a metric."""
_FAILURE = ("_ng_failure", "_ng_no_persist")
_SET_ASIDE = "nemo_gym_row"

_Answer = TypeVar("_Answer")


def _set_aside(row: BaseModel) -> BaseModel:
    private = row.__pydantic_private__
    if private is not None and _SET_ASIDE in private:
        return row  # an object that is validated again, such as an answer with its row
    extra = row.__pydantic_extra__
    if extra:
        row.__pydantic_fields_set__.difference_update(extra)
        object.__setattr__(row, "__pydantic_private__", {**(private or {}), _SET_ASIDE: extra})
        object.__setattr__(row, "__pydantic_extra__", _report_of_failure(extra) if "reward" in row.__dict__ else {})
    return row


def _report_of_failure(extra: dict[str, Any]) -> dict[str, Any]:
    """What in a verdict says that it is none: agents that declare nothing of it pass it on, too."""
    return {name: value for name, value in extra.items() if name.startswith(_FAILURE)}


def _forget_verdict(row: BaseModel) -> BaseModel:
    extra = row.__pydantic_extra__ or {}
    forget(row, [name for name in extra if name in _VERDICT or name.startswith(_FAILURE)])
    return row


def forget(row: BaseModel, names: Iterable[str]) -> None:
    """Drop undeclared fields of these names from a row whose type allows them."""
    extra = row.__pydantic_extra__ or {}
    for name in extra.keys() & set(names):
        extra.pop(name, None)
        row.__pydantic_fields_set__.discard(name)


def undeclared_fields(row: BaseModel) -> dict[str, Any]:
    """What an answer to `row` puts back: the fields that its type does not declare.

    Left out are verdicts of an earlier run and names with an underscore in front, which belong to whoever sent the
    row. The row of a trainer has none: what it did not ask for would become a metric.
    """
    private = row.__pydantic_private__
    fields = private[_SET_ASIDE] if private is not None and _SET_ASIDE in private else row.__pydantic_extra__
    back: dict[str, Any] = {}
    if fields and _OF_A_TRAINER not in fields:
        for name in fields:
            if name[0:1] != "_" and name not in _VERDICT:
                back[name] = fields[name]
    return back


def all_fields(row: BaseModel) -> dict[str, Any]:
    """Everything that came with a row: declared, allowed or set aside."""
    private = row.__pydantic_private__ or {}
    return {**private.get(_SET_ASIDE, {}), **(row.__pydantic_extra__ or {}), **row.__dict__}


def _inner_model(schema: Any) -> Any:
    while schema["type"] != "model":
        schema = schema["schema"]
    return schema


class BaseRunRequest(BaseModel):
    """A row: what to ask the model, and whatever the verifier wants to know."""

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming

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
        extra = {name: value for name, value in back.items() if name not in said}
        marked = {**(answer.__pydantic_private__ or {}), _SET_ASIDE: None}
        object.__setattr__(answer, "__pydantic_extra__", {**extra, **(answer.__pydantic_extra__ or {})})
        object.__setattr__(answer, "__pydantic_private__", marked)
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
