"""What is wrong with a row in the eyes of those who will get it: asked and answered before the first model call.

Agents and environments answer `POST /ng_check_rows` by holding rows against the very types that `/run`,
`/seed_session` and `/verify` read, so what passes there passes here. Servers that do not know the route are not asked.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from nemo_gym.errors import did_you_mean
from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.schemas.openai_responses import NeMoGymResponseCreateParamsNonStreaming

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
