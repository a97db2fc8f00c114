"""Multiple-choice questions: read the chosen letter off the answer and compare it."""

import asyncio
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, PrivateAttr, field_validator

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import while_serving
from nemo_gym.workers import PATTERN_TIMEOUT_S, PatternMatcher
from resources_servers.mcqa.grading import (
    GradingMode,
    Options,
    RowGradingMode,
    extract_answer,
    extract_by_patterns,
    usable,
)

_PLAIN_KEY_METRICS = ("mean/reward", "pass@1/accuracy")


class MCQAResourcesServerConfig(BaseResourcesServerConfig):
    """How answers are read."""

    grading_mode: GradingMode | None = None
    """For all rows, whatever they say; unset: each row's own."""
    pattern_timeout_s: float = Field(default=PATTERN_TIMEOUT_S, gt=0)
    """Processor time: an `output_regex` that takes longer on an answer finds nothing in it."""


class MCQATemplateMetadata(BaseModel):
    """How the prompt of a row asks for its answer."""

    model_config = {"extra": "allow"}

    output_regex: str | list[str] | None = None
    """Where to find the answer; replaces the grading mode."""


class MCQARunRequest(BaseRunRequest):
    """A row."""

    options: list[dict[str, str | None]] = Field(default_factory=list)
    """One `{letter: text}` per option."""
    expected_answer: str
    """The letter of the right option."""
    uuid: str | int | None = None
    metadata: dict[str, Any] | None = None
    grading_mode: RowGradingMode = "strict_single_letter_boxed"
    template_metadata: MCQATemplateMetadata | None = None

    @field_validator("expected_answer")
    @classmethod
    def _upper_case(cls, value: str) -> str:
        return value.strip().upper()


class MCQAVerifyRequest(MCQARunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class MCQAVerifyResponse(MCQAVerifyRequest, BaseVerifyResponse):
    """The verdict."""

    extracted_answer: str | None
    """The letter that was read; None when there was none to read."""


class MCQAResourcesServer(SimpleResourcesServer):
    """Grades by letter."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: MCQAResourcesServerConfig
    _patterns: PatternMatcher = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Prepare the processes that match regular expressions; they start when they are needed."""
        super().model_post_init(context)
        self._patterns = PatternMatcher(self.config.pattern_timeout_s)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; those processes end with the app."""
        return while_serving(super().setup_webserver(), begin=self._patterns.open, end=self._patterns.close)

    async def verify(self, body: MCQAVerifyRequest) -> MCQAVerifyResponse:
        """Right when the answer's letter can be read and is the expected one."""
        extracted = await self._extracted(body)
        is_right = extracted is not None and extracted == body.expected_answer
        verdict = {"reward": float(is_right), "extracted_answer": extracted}
        return MCQAVerifyResponse(**{**dict(body), **verdict})

    async def _extracted(self, body: MCQAVerifyRequest) -> str | None:
        text = body.response.output_text.strip()
        if not text:
            return None
        options = _options_of(body)
        patterns = usable(body.template_metadata.output_regex if body.template_metadata else None)
        if patterns:
            return await extract_by_patterns(text, options, patterns, self._patterns)
        mode = self.config.grading_mode or body.grading_mode
        return await asyncio.to_thread(extract_answer, text, options, mode)

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """pass@k and majority vote over the letters."""
        from nemo_gym.reward_profile import compute_pass_majority_metrics  # loads numpy

        return compute_pass_majority_metrics(tasks, answer_key="extracted_answer")[0]

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean, and the curves at their highest k."""
        from nemo_gym.reward_profile import highest_k_metrics

        plain: dict[str, Any] = {key: agent_metrics[key] for key in _PLAIN_KEY_METRICS if key in agent_metrics}
        names = ("accuracy", "no_answer")
        return {
            **plain,
            **highest_k_metrics(agent_metrics, "pass@1[avg-of-{k}]", score_names=names),
            **highest_k_metrics(agent_metrics, "pass@{k}", score_names=names),
            **highest_k_metrics(agent_metrics, "majority@{k}", score_names=("accuracy",)),
        }


def _options_of(body: MCQARunRequest) -> Options:
    """Letter → text of the options that have both."""
    return {
        letter.strip().upper(): text
        for option in body.options
        for letter, text in option.items()
        if text is not None and len(letter.strip()) == 1 and letter.strip().isalpha()
    }


if __name__ == "__main__":
    MCQAResourcesServer.run_webserver()
