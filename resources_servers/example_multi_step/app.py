"""A task of several steps: look up a value per synonym, then hand all of them in, in order.

The tool looks values up one at a time, so the model needs several calls before the one that counts.
The term the synonyms stand for is a trap: its value must not be handed in.
"""

import json
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseFunctionToolCall

HAND_IN = "extract_synonym_values"


class ExampleMultiStepResourcesServerConfig(BaseResourcesServerConfig):
    """Nothing to configure."""


class GetSynonymValueRequest(BaseModel):
    """The word to look up."""

    synonym: str


class GetSynonymValueResponse(BaseModel):
    """The word's value."""

    synonym_value: int


class ExtractSynonymValuesRequest(BaseModel):
    """All values, in the order in which the words were given."""

    synonym_values: list[int]


class ExtractSynonymValuesResponse(BaseModel):
    """They were received; whether they are right is not told."""

    success: bool


class ExampleMultiStepRunRequest(BaseRunRequest):
    """A row."""

    id: int | str
    expected_synonym_values: list[int]
    expected_synonyms: list[str]
    minefield_label: str
    """The word the synonyms stand for."""
    minefield_label_value: int


class ExampleMultiStepVerifyRequest(ExampleMultiStepRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class ExampleMultiStepVerifyResponse(ExampleMultiStepVerifyRequest, BaseVerifyResponse):
    """What was handed in, and in which respects it is right."""

    parsed_synonym_values: list[int]
    accuracy: bool
    """Exactly the expected values, in order."""
    set_overlap: float
    """Share of the expected values that are among those handed in."""
    original_term_minefield_hit: bool
    order_instruction_following_failure: bool
    """All expected values are there, and still it is wrong."""


class ExampleMultiStepResourcesServer(SimpleResourcesServer):
    """Two tools, and a verdict on the last use of the second."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: ExampleMultiStepResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """The standard routes and the two tools."""
        app = super().setup_webserver()
        app.post("/get_synonym_value")(self.get_synonym_value)
        app.post(f"/{HAND_IN}")(self.extract_synonym_values)
        return app

    async def get_synonym_value(self, body: GetSynonymValueRequest) -> GetSynonymValueResponse:
        """The sum of a word's character codes."""
        return GetSynonymValueResponse(synonym_value=sum(map(ord, body.synonym)))

    async def extract_synonym_values(self, body: ExtractSynonymValuesRequest) -> ExtractSynonymValuesResponse:
        """Take the values; `verify` finds them in the trajectory."""
        return ExtractSynonymValuesResponse(success=True)

    async def verify(self, body: ExampleMultiStepVerifyRequest) -> ExampleMultiStepVerifyResponse:
        """Score what was handed in last; whatever cannot be read as values counts as nothing handed in."""
        given = handed_in_values(body.response)
        expected = body.expected_synonym_values
        is_right = given == expected
        wanted = set(expected)  # not so `given`: numbers can be chosen that make a set of them slow
        overlap = sum(value in given for value in wanted) / len(wanted) if wanted else 1.0
        hits: list[Any] = [body.minefield_label, body.minefield_label_value]
        verdict = {
            "reward": float(is_right),
            "parsed_synonym_values": given,
            "accuracy": is_right,
            "set_overlap": overlap,
            "original_term_minefield_hit": any(hit in given for hit in hits),
            "order_instruction_following_failure": not is_right and overlap == 1.0,
        }
        return ExampleMultiStepVerifyResponse(**{**dict(body), **verdict})


def handed_in_values(response: NeMoGymResponse) -> list[int]:
    """The values of the last call that handed some in; empty when there is none that can be read."""
    calls = [
        item for item in response.output if isinstance(item, NeMoGymResponseFunctionToolCall) and item.name == HAND_IN
    ]
    if not calls:
        return []
    try:
        return ExtractSynonymValuesRequest.model_validate(json.loads(calls[-1].arguments)).synonym_values
    except (ValueError, RecursionError):
        return []


if __name__ == "__main__":
    ExampleMultiStepResourcesServer.run_webserver()
