"""Answers that must be JSON of a given shape: the whole answer is parsed and checked against the row's schema."""

import json
import logging
import re
from typing import Any, Literal, NoReturn, Self

from fastapi import FastAPI
from pydantic import Field, PrivateAttr, model_validator

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import while_serving
from nemo_gym.workers import PATTERN_TIMEOUT_S, PatternMatcher, PatternTimeoutError
from resources_servers.structured_outputs.schema import Checker, SchemaError, Text, parts_of

logger = logging.getLogger(__name__)


class StructuredOutputsResourcesServerConfig(BaseResourcesServerConfig):
    """How strictly schemas are read."""

    strict: bool = True
    """Whether every property that a schema names must be there, and no other, whatever its `required` says."""
    pattern_timeout_s: float = Field(default=PATTERN_TIMEOUT_S, gt=0)
    """Processor time: an answer on which a schema's regular expression takes longer is wrong."""


class StructuredOutputsRunRequest(BaseRunRequest):
    """A row."""

    schema_str: str
    """The JSON schema, as JSON."""
    schema_type: Literal["json"] = "json"
    """What the answer must be written in."""

    @model_validator(mode="after")
    def _schema_is_understood(self) -> Self:
        try:
            schema = json.loads(self.schema_str)
            Checker(schema, strict=False)
            for where, part in parts_of(schema):
                if isinstance(part, dict) and "pattern" in part:
                    _check_pattern(part["pattern"], where)
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
    _patterns: PatternMatcher = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Prepare the processes that match regular expressions; they start when they are needed."""
        super().model_post_init(context)
        self._patterns = PatternMatcher(self.config.pattern_timeout_s)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; those processes end with the app."""
        return while_serving(super().setup_webserver(), begin=self._patterns.open, end=self._patterns.close)

    async def verify(self, body: StructuredOutputsVerifyRequest) -> StructuredOutputsVerifyResponse:
        """Right when all that the model said is one JSON value that fits."""
        problem = await self._problem(body.response.output_text, json.loads(body.schema_str))
        return StructuredOutputsVerifyResponse(**dict(body), reward=float(problem is None), problem=problem)

    async def _problem(self, text: str, schema: Any) -> str | None:
        try:
            value = json.loads(text.strip(), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"the answer is no JSON: {error}"
        texts: list[Text] = []
        try:
            for problem in Checker(schema, strict=self.config.strict).problems(value, texts):
                return problem
        except RecursionError:  # while it is compared
            return "the answer is nested too deep"
        for each in texts:
            if not await self._matches(each):
                return f"{each.where} does not match {each.pattern!r}"
        return None

    async def _matches(self, wanted: Text) -> bool:
        try:
            return await self._patterns.last_match(wanted.pattern, wanted.text) is not None
        except PatternTimeoutError as error:
            logger.warning("an answer counts as wrong: %s", error.detail)
            return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_pattern(pattern: Any, where: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise SchemaError(f"{where}: {pattern!r} is not a regular expression: {error}") from error


if __name__ == "__main__":
    StructuredOutputsResourcesServer.run_webserver()
