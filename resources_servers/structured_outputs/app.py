"""Answers that must be JSON of a given shape: the whole answer is parsed and checked against the row's schema."""

import json
import logging
from functools import partial
from typing import Literal, Self

from pydantic import Field, model_validator

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.workers import PATTERN_TIMEOUT_S, WorkerDeathError, WorkerTimeoutError, in_worker
from resources_servers.structured_outputs.schema import Checker, SchemaError, problem_with

logger = logging.getLogger(__name__)


class StructuredOutputsResourcesServerConfig(BaseResourcesServerConfig):
    """How strictly schemas are read."""

    strict: bool = True
    """Whether every property that a schema names must be there, and no other, whatever its `required` says."""
    pattern_timeout_s: float = Field(default=PATTERN_TIMEOUT_S, gt=0)
    """Processor time: an answer that takes longer to check, such as by a regular expression, is wrong."""


class StructuredOutputsRunRequest(BaseRunRequest):
    """A row."""

    schema_str: str
    """The JSON schema, as JSON."""
    schema_type: Literal["json"] = "json"
    """What the answer must be written in."""

    @model_validator(mode="after")
    def _schema_is_understood(self) -> Self:
        try:
            Checker(json.loads(self.schema_str), strict=False)
        except (SchemaError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"schema_str cannot be used: {error}") from error
        return self


class StructuredOutputsVerifyRequest(StructuredOutputsRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class StructuredOutputsVerifyResponse(StructuredOutputsVerifyRequest, BaseVerifyResponse):
    """The verdict."""

    problem: str | None
    """The first thing that does not fit."""


class StructuredOutputsResourcesServer(SimpleResourcesServer):
    """Checks answers against schemas."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: StructuredOutputsResourcesServerConfig

    async def verify(self, body: StructuredOutputsVerifyRequest) -> StructuredOutputsVerifyResponse:
        """Right when all that the model said is one JSON value that fits."""
        check = partial(problem_with, body.response.output_text, json.loads(body.schema_str), strict=self.config.strict)
        try:
            problem = await in_worker(check, timeout_s=self.config.pattern_timeout_s)
        except (WorkerTimeoutError, WorkerDeathError) as error:
            logger.warning("an answer counts as wrong: %s", error)
            problem = "the answer takes too long to check"
        return StructuredOutputsVerifyResponse(**dict(body), reward=float(problem is None), problem=problem)


if __name__ == "__main__":
    StructuredOutputsResourcesServer.run_webserver()
