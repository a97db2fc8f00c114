"""Answers that can be compared as text: the whole answer, a part of it, or a pattern in it."""

import logging
import re
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

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

logger = logging.getLogger(__name__)


class StringMatchResourcesServerConfig(BaseResourcesServerConfig):
    """The rows say how they are matched."""

    pattern_timeout_s: float = Field(default=PATTERN_TIMEOUT_S, gt=0)
    """Processor time: an answer on which the row's regular expression takes longer is wrong."""


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class StringMatchRunRequest(BaseRunRequest):
    """A row."""

    expected_answer: Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]
    """A text, or with `match: regex` a regular expression; numbers are taken as text."""
    match: Literal["exact", "contains", "regex"] = "exact"
    """`exact` compares the whole answer, apart from white space around it."""
    ignore_case: bool = False

    @model_validator(mode="after")
    def _pattern_compiles(self) -> Self:
        if self.match == "regex":
            try:
                re.compile(self.expected_answer)
            except re.error as error:
                raise ValueError(
                    f"expected_answer {self.expected_answer!r} is not a regular expression: {error}"
                ) from error
        return self


class StringMatchVerifyRequest(StringMatchRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class StringMatchVerifyResponse(StringMatchVerifyRequest, BaseVerifyResponse):
    """The verdict."""


class StringMatchResourcesServer(SimpleResourcesServer):
    """Compares texts."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: StringMatchResourcesServerConfig
    _patterns: PatternMatcher = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Prepare the processes that match regular expressions; they start when they are needed."""
        super().model_post_init(context)
        self._patterns = PatternMatcher(self.config.pattern_timeout_s)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; those processes end with the app."""
        return while_serving(super().setup_webserver(), begin=self._patterns.open, end=self._patterns.close)

    async def verify(self, body: StringMatchVerifyRequest) -> StringMatchVerifyResponse:
        """Right when all that the model said matches as the row wants."""
        is_right = await self._matches(body.response.output_text, body)
        return StringMatchVerifyResponse(**dict(body), reward=float(is_right))

    async def _matches(self, text: str, row: StringMatchRunRequest) -> bool:
        if row.match != "regex":
            return matches(text, row)
        flags = re.IGNORECASE if row.ignore_case else 0
        try:
            return await self._patterns.last_match(row.expected_answer, text, flags) is not None
        except PatternTimeoutError as error:
            logger.warning("an answer counts as wrong: %s", error.detail)
            return False

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """pass@k; there is no vote, since right answers need not be equal."""
        from nemo_gym.reward_profile import compute_pass_majority_metrics  # loads numpy

        return compute_pass_majority_metrics(tasks)[0]

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean, and the curves at their highest k."""
        from nemo_gym.reward_profile import highest_k_metrics

        return {
            **{key: agent_metrics[key] for key in ["mean/reward"] if key in agent_metrics},
            **highest_k_metrics(agent_metrics, "pass@1[avg-of-{k}]"),
            **highest_k_metrics(agent_metrics, "pass@{k}"),
        }


def matches(text: str, row: StringMatchRunRequest) -> bool:
    """Whether `text` is the text that `row` expects, or contains it."""
    expected = row.expected_answer
    if row.ignore_case:
        text, expected = text.casefold(), expected.casefold()
    return expected in text if row.match == "contains" else text.strip() == expected.strip()


if __name__ == "__main__":
    StringMatchResourcesServer.run_webserver()
