"""What a server says about rows before they are sent is what its routes would say."""

from typing import Any

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from nemo_gym.base_resources_server import BaseRunRequest, BaseSeedSessionRequest, BaseVerifyRequest
from nemo_gym.data.row_shapes import RowShapes
from nemo_gym.servers.json_route import row_faults

PARAMS = {"input": "q"}


class Strict(BaseVerifyRequest):
    target: int
    note: str = ""


class Filled(BaseVerifyRequest):
    target: int

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, row: dict[str, Any]) -> dict[str, Any]:
        return {"target": row["verifier_metadata"]["target"], **row}


class Aliased(BaseVerifyRequest):
    target: int = Field(validation_alias=AliasChoices("goal", "target"))


class NeedsText(BaseVerifyRequest):
    @model_validator(mode="after")
    def _has_text(self) -> "NeedsText":
        if not self.response.output_text:
            raise ValueError("there is no text")
        return self


class Plain(BaseModel):
    model_config = ConfigDict(extra="forbid")

    target: int


class Seed(BaseSeedSessionRequest):
    board: list[int]


async def strict(body: Strict) -> Any: ...
async def filled(request: str, body: Filled) -> Any: ...
async def aliased(body: Aliased) -> Any: ...
async def needs_text(body: NeedsText) -> Any: ...
async def plain(body: Plain) -> Any: ...
async def seed(body: Seed) -> Any: ...
async def run(body: BaseRunRequest) -> Any: ...
async def untyped(body: dict[str, Any]) -> Any: ...
async def two_bodies(body: Strict, other: Plain) -> Any: ...


@pytest.mark.parametrize(
    ("handler", "fields", "found"),
    [
        (strict, {"target": 3}, []),
        (strict, {"target": "3", "anything": {"else": 1}}, []),
        (strict, {}, ["target: it is missing"]),
        (strict, {"targt": 3}, ["target: it is missing; is it 'targt'?"]),
        (strict, {"target": "three"}, ["target: Input should be a valid integer, unable to parse string as an integer "
                                       "(it is 'three')"]),
        (strict, {"target": 3, "note": None}, ["note: Input should be a valid string"]),
        (filled, {"verifier_metadata": {"target": 3}}, []),
        (filled, {}, []),
        (aliased, {"goal": 3}, []),
        (aliased, {"target": 3}, []),
        (plain, {"target": 3}, ["responses_create_params: Extra inputs are not permitted"]),
        (seed, {"board": [1]}, []),
        (seed, {"board": ["x"]}, ["board.0: Input should be a valid integer, unable to parse string as an integer "
                                  "(it is 'x')"]),
        (untyped, {}, []),
        (two_bodies, {}, []),
    ],
)  # fmt: skip
def test_faults_are_those_of_the_type_that_the_handler_reads(handler: Any, fields: Any, found: list[str]) -> None:
    faults = row_faults([{"responses_create_params": PARAMS, **fields}], [handler])[0]
    assert [str(fault) for fault in faults] == found
    assert all(fault.is_certain for fault in faults)


def test_parameters_are_checked_as_strictly_as_requests_are() -> None:
    rows: list[dict[str, Any]] = [
        {"responses_create_params": {**PARAMS, "top_pp": 1}},
        {"responses_create_params": {**PARAMS, "chat_template_kwargs": {}}},
        {"responses_create_params": {}},
        {"responses_create_params": {**PARAMS, "temperature": "hot"}},
    ]
    found = row_faults(rows, [run, strict])
    assert [[str(fault) for fault in each if "target" not in fault.where] for each in found] == [
        ["responses_create_params.top_pp: there is no such parameter; did you mean 'top_p'?"],
        [
            "responses_create_params.chat_template_kwargs: there is no such parameter; parameters of one vendor go "
            "into metadata.extra_body"
        ],
        ["responses_create_params.input: it is missing"],
        [
            "responses_create_params.temperature: Input should be a valid number, unable to parse string as a number "
            "(it is 'hot')"
        ],
    ]


def test_a_verdict_on_the_row_as_a_whole_is_not_certain() -> None:
    (fault,) = row_faults([{"responses_create_params": PARAMS}], [needs_text])[0]
    assert (str(fault), fault.is_certain) == ("there is no text", False)


def test_rows_are_told_apart_by_agent_keys_and_types_and_only_so_many() -> None:
    shapes = RowShapes()
    for line in range(1, 9):
        target: Any = str(line) if line == 5 else line
        shapes.note("b" if line == 7 else "a", {"responses_create_params": PARAMS, "target": target}, line)
    assert {agent: [(shape.line, shape.count) for shape in found] for agent, found in shapes.by_agent().items()} == {
        "a": [(1, 6), (5, 1)],
        "b": [(7, 1)],
    }
    for line in range(1_000):
        shapes.note("a", {"responses_create_params": PARAMS, f"key{line}": 1}, line)
    assert len(shapes.shapes) == 200
