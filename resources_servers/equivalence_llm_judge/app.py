"""Free-form answers: a judge model decides whether an answer says the same as the expected one."""

import logging
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from nemo_gym import resolve_for_reading
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.config_types import ConfigError, ModelServerRef
from nemo_gym.judge import (
    JudgeEvaluation,
    ask_about,
    fenced,
    last_message_text,
    last_user_text,
    without_labels,
)
from nemo_gym.openai_utils import NeMoGymEasyInputMessage, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import SharedSlots, while_serving
from nemo_gym.workers import PATTERN_TIMEOUT_S, PatternMatcher, PatternTimeoutError
from resources_servers.equivalence_llm_judge.extraction import extracted

logger = logging.getLogger(__name__)


class LLMJudgeResourcesServerConfig(BaseResourcesServerConfig):
    """Which judge, how it is asked, and what its verdicts are worth."""

    judge_model_server: ModelServerRef
    judge_responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    """Parameters of every question to the judge; its `input` is replaced."""
    judge_endpoint_max_concurrency: int | None = Field(default=64, ge=1)
    """Questions to the judge at the same time, over all processes of this server; unlimited when unset."""
    judge_system_message: str | None = None
    judge_prompt_template_fpath: str = "prompt_templates/equivalence_llm_judge.txt"
    """A text with `{question}`, `{expected_answer}` and `{generated_answer}`; relative to this folder.

    Both answers are filled in between a line that begins them and a line that ends them."""
    judge_equal_label: str = "[[A=B]]"
    """The last label in the judge's answer counts; an answer without one means not equal."""
    judge_not_equal_label: str = "[[A!=B]]"
    question_extract_regex: str | None = None
    """The part of the user's message that is the question."""
    response_extract_regex: str | None = None
    """The part of the model's message that is its answer."""
    msg_extraction_failure: str = "[NO VALID ANSWER EXTRACTED]"
    """What the judge sees when the part that should be the answer is empty."""
    check_twice_swap: bool = False
    """Ask again with the answers swapped before believing that they are equal."""
    reward_if_swap_fails: float = 0.0
    use_per_record_regex: bool = True
    """Let `template_metadata.output_regex` of a row replace `response_extract_regex`."""
    extraction_length_threshold: int | None = 120
    """Expected answers longer than this are compared with the whole message, once."""
    check_full_generation_on_fail: bool = True
    """When what a row's regex found is not equal, ask again with the whole message."""
    reward_if_full_generation_succeeds: float = 0.5
    pattern_timeout_s: float = Field(default=PATTERN_TIMEOUT_S, gt=0)
    """A regular expression that takes longer on an answer finds nothing in it; on a question, the rollout fails."""


class LLMJudgeTemplateMetadata(BaseModel):
    """How the prompt of a row asks for its answer."""

    model_config = ConfigDict(extra="allow")

    output_regex: str | None = None


class LLMJudgeRunRequest(BaseRunRequest):
    """A row; its expected answer may also stand in its `metadata`."""

    uuid: str | int | None = None
    expected_answer: str | int | float | None = None
    options: list[dict[str, str | None]] | None = None
    metadata: dict[str, Any] | None = None
    template_metadata: LLMJudgeTemplateMetadata | None = None

    @model_validator(mode="after")
    def _has_expected_answer(self) -> Self:
        if not self.expected_text.strip():
            raise ValueError("the row has no answer to compare with; add `expected_answer` to it, or to its `metadata`")
        return self

    @property
    def expected_text(self) -> str:
        """The expected answer, wherever it stands."""
        expected = self.expected_answer
        if expected is None:
            expected = (self.metadata or {}).get("expected_answer")
        return "" if expected is None else str(expected)


class LLMJudgeVerifyRequest(LLMJudgeRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class LLMJudgeVerifyResponse(LLMJudgeVerifyRequest, BaseVerifyResponse):
    """The verdict, and what the judge said."""

    judge_evaluations: list[JudgeEvaluation]


class _Case(NamedTuple):
    """What a row's verdict depends on."""

    question: str
    expected: str
    message: str
    """Everything the model's last message says."""
    answer: str
    """The part of it that is to be judged."""
    is_long: bool
    has_row_regex: bool


class LLMJudgeResourcesServer(SimpleResourcesServer):
    """Asks the judge."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: LLMJudgeResourcesServerConfig
    _template: str = PrivateAttr()
    _slots: AbstractAsyncContextManager[Any] = PrivateAttr()
    _patterns: PatternMatcher = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Read the prompt, so that its mistakes show when the server starts."""
        super().model_post_init(context)
        self._template = _read_template(self.config.judge_prompt_template_fpath)
        cap = self.config.judge_endpoint_max_concurrency
        self._slots = SharedSlots(cap) if cap else nullcontext()
        self._patterns = PatternMatcher(self.config.pattern_timeout_s)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; the processes that match regular expressions end with the app."""
        return while_serving(super().setup_webserver(), begin=self._patterns.open, end=self._patterns.close)

    async def verify(self, body: LLMJudgeVerifyRequest) -> LLMJudgeVerifyResponse:
        """Score by what the judge says; a model that said nothing is wrong without asking."""
        case = await self._case(body)
        evaluations: list[JudgeEvaluation] = []
        reward = await self._score(case, evaluations) if case.message.strip() else 0.0
        verdict = {"reward": reward, "expected_answer": case.expected, "judge_evaluations": evaluations}
        return LLMJudgeVerifyResponse(**{**dict(body), **verdict})

    async def _case(self, body: LLMJudgeVerifyRequest) -> _Case:
        config = self.config
        row_regex = body.template_metadata.output_regex if body.template_metadata else None
        row_regex = row_regex if config.use_per_record_regex else None
        threshold = config.extraction_length_threshold
        is_long = threshold is not None and len(body.expected_text) > threshold
        message = last_message_text(body.response)
        pattern = config.response_extract_regex
        if row_regex is not None:
            pattern = None if is_long else row_regex
        asked = last_user_text(body.responses_create_params)
        return _Case(
            question=await extracted(asked, config.question_extract_regex, self._patterns),
            expected=body.expected_text,
            message=message,
            answer=await self._answer_in(message, pattern) or config.msg_extraction_failure,
            is_long=is_long,
            has_row_regex=row_regex is not None,
        )

    async def _answer_in(self, message: str, pattern: str | None) -> str:
        try:
            return await extracted(message, pattern, self._patterns)
        except PatternTimeoutError as error:
            logger.warning("the whole message is judged: %s", error.detail)
            return message

    async def _score(self, case: _Case, evaluations: list[JudgeEvaluation]) -> float:
        """The reward; what the judge said on the way goes into `evaluations`."""
        config = self.config
        if not await self._are_equal(case, case.answer, evaluations):
            is_worth_another_look = config.check_full_generation_on_fail and case.has_row_regex and not case.is_long
            if is_worth_another_look and case.answer != case.message:
                is_in_message = await self._are_equal(case, case.message, evaluations)
                return config.reward_if_full_generation_succeeds if is_in_message else 0.0
            return 0.0
        if config.check_twice_swap and not case.is_long:
            stays_equal = await self._are_equal(case, case.answer, evaluations, swapped=True)
            return 1.0 if stays_equal else config.reward_if_swap_fails
        return 1.0

    async def _are_equal(
        self, case: _Case, answer: str, evaluations: list[JudgeEvaluation], *, swapped: bool = False
    ) -> bool:
        config = self.config
        question = partial(self._question, case, swapped=swapped)
        name = config.judge_model_server.name
        async with self._slots:
            evaluation = await ask_about(self.server_client, name, question, answer, self._labels)
        evaluations.append(evaluation)
        return evaluation.verdict_label == config.judge_equal_label != config.judge_not_equal_label

    @property
    def _labels(self) -> tuple[str, str]:
        return self.config.judge_equal_label, self.config.judge_not_equal_label

    def _question(self, case: _Case, answer: str, *, swapped: bool) -> NeMoGymResponseCreateParamsNonStreaming:
        config = self.config
        answers = (answer, case.expected) if swapped else (case.expected, answer)
        question, first, second = (without_labels(text, self._labels) for text in (case.question, *answers))
        prompt = self._template.format(
            question=question, expected_answer=fenced(first), generated_answer=fenced(second)
        )
        messages = [NeMoGymEasyInputMessage(role="user", content=prompt)]
        if config.judge_system_message is not None:
            messages.insert(0, NeMoGymEasyInputMessage(role="system", content=config.judge_system_message))
        return config.judge_responses_create_params.model_copy(update={"input": messages})

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """pass@k; there is no vote, since equal answers are worded differently."""
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


def _read_template(given: str) -> str:
    beside = Path(__file__).parent / Path(given).expanduser()
    path = beside if beside.is_file() else resolve_for_reading(given)
    try:
        template = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the judge's prompt {path} cannot be read ({error}); correct judge_prompt_template_fpath"
        ) from error
    try:
        template.format(question="", expected_answer="", generated_answer="")
    except (LookupError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the judge's prompt {path} cannot be filled in: {error!r}. It may use {{question}}, {{expected_answer}} "
            "and {generated_answer}; braces that mean themselves are doubled"
        ) from error
    return template


if __name__ == "__main__":
    LLMJudgeResourcesServer.run_webserver()
