"""Mathematical answers: compared symbolically, and by a judge where that is not enough.

math-verify finds the answer in the text and compares it with the expected one. It misses some answers
that are right but written in words or in an unusual form; a judge model can be asked about what it does
not accept, twice, with the answers swapped, so that it does not matter which one the judge likes to
see first.
"""

from typing import Annotated, Any, Self

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
from nemo_gym.config_types import ModelServerRef
from nemo_gym.judge import JudgeEvaluation, ask_about, last_user_text
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import per_process_cap, while_serving
from resources_servers.math_with_judge.judging import EQUAL, LABELS, judge_request
from resources_servers.math_with_judge.library_pool import LibraryPool

_KEY_MEANS = ("mean/reward", "mean/input_tokens", "mean/output_tokens")


class LibraryJudgeMathResourcesServerConfig(BaseResourcesServerConfig):
    """Which judge, if any, and how much patience with math-verify."""

    judge_model_server: ModelServerRef | None = None
    judge_responses_create_params: NeMoGymResponseCreateParamsNonStreaming = Field(
        default_factory=lambda: NeMoGymResponseCreateParamsNonStreaming(input=[])
    )
    """Parameters of every question to the judge; its `input` is replaced."""
    should_use_judge: bool = True
    """Ask the judge about answers that math-verify does not accept."""
    library_verifier_timeout_seconds: float = Field(default=10.0, gt=0)
    """Processor time: an answer on which math-verify works longer counts as not equal."""
    library_verifier_max_concurrency: int = Field(default=32, ge=1)
    """math-verify processes at the same time; no more work at a time than there are processors."""

    @model_validator(mode="after")
    def _judge_is_named(self) -> Self:
        if self.should_use_judge and self.judge_model_server is None:
            raise ValueError("should_use_judge needs a judge_model_server; name one, or set should_use_judge to false")
        return self


def _as_text(value: Any) -> Any:
    """Data sets write whole numbers as JSON numbers, some as 18.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class LibraryJudgeMathRunRequest(BaseRunRequest):
    """A row."""

    question: str | None = None
    """For the judge; left out: what the user said last."""
    expected_answer: Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]
    """A number or LaTeX, with or without dollar signs."""


class LibraryJudgeMathVerifyRequest(LibraryJudgeMathRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class LibraryJudgeMathVerifyResponse(LibraryJudgeMathVerifyRequest, BaseVerifyResponse):
    """The verdict, and how it came about."""

    extracted_answer: str | None
    """What math-verify takes for the answer."""
    library_reward: float
    library_timed_out: bool
    judge_evaluations: list[JudgeEvaluation] | None
    """None: the judge was not asked."""


class LibraryJudgeMathResourcesServer(SimpleResourcesServer):
    """math-verify first, then the judge."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: LibraryJudgeMathResourcesServerConfig
    _library: LibraryPool = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Prepare the pool; its processes start when they are needed."""
        super().model_post_init(context)
        processes = per_process_cap(self.config.library_verifier_max_concurrency) or 1
        self._library = LibraryPool(processes, self.config.library_verifier_timeout_seconds)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; the pool ends with the app."""
        return while_serving(super().setup_webserver(), begin=self._library.open, end=self._library.close)

    async def verify(self, body: LibraryJudgeMathVerifyRequest) -> LibraryJudgeMathVerifyResponse:
        """Right when math-verify says so, else when the judge does, both ways round."""
        text = body.response.output_text
        library = await self._library.grade(without_delimiters(body.expected_answer), text)
        evaluations = None
        if self.config.should_use_judge and library.reward <= 0.5 and text.strip():
            evaluations = await self._judge(body, library.extracted_answer or text)
        is_right = library.reward > 0.5 or _all_equal(evaluations)
        verdict = {
            "reward": float(is_right),
            "extracted_answer": library.extracted_answer,
            "library_reward": library.reward,
            "library_timed_out": library.timed_out,
            "judge_evaluations": evaluations,
        }
        return LibraryJudgeMathVerifyResponse(**{**dict(body), **verdict})

    async def _judge(self, body: LibraryJudgeMathVerifyRequest, given: str) -> list[JudgeEvaluation]:
        """One evaluation if it says that the answers differ, else two."""
        first = await self._ask_judge(body, given)
        if first.verdict_label != EQUAL:
            return [first]
        return [first, await self._ask_judge(body, given, swapped=True)]

    async def _ask_judge(
        self, body: LibraryJudgeMathVerifyRequest, given: str, *, swapped: bool = False
    ) -> JudgeEvaluation:
        assert self.config.judge_model_server is not None
        question = last_user_text(body.responses_create_params) if body.question is None else body.question

        def question_about(answer: str) -> NeMoGymResponseCreateParamsNonStreaming:
            answers = (answer, body.expected_answer) if swapped else (body.expected_answer, answer)
            return judge_request(self.config.judge_responses_create_params, question, *answers)

        name = self.config.judge_model_server.name
        return await ask_about(self.server_client, name, question_about, given, LABELS)

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """pass@k and majority vote, for both ways of comparing and for what they amount to together."""
        from nemo_gym.reward_profile import compute_pass_majority_metrics  # loads numpy

        return compute_pass_majority_metrics(tasks, score_fn=self._scores, answer_key="extracted_answer")[0]

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """Means, and the curves at their highest k."""
        from nemo_gym.reward_profile import highest_k_metrics

        return {
            **{key: agent_metrics[key] for key in _KEY_MEANS if key in agent_metrics},
            **highest_k_metrics(agent_metrics, "pass@1[avg-of-{k}]"),
            **highest_k_metrics(agent_metrics, "pass@{k}", exclude_names=("no_answer",)),
            **highest_k_metrics(agent_metrics, "majority@{k}", exclude_names=("no_answer",)),
        }

    def _scores(self, rollout: dict[str, Any]) -> dict[str, Any]:
        scores = {"symbolic_accuracy": rollout.get("library_reward")}
        if self.config.should_use_judge:
            scores["accuracy"] = rollout.get("reward")
        if rollout.get("judge_evaluations") is not None:
            scores["judge_accuracy"] = rollout.get("reward")
        return scores


def without_delimiters(formula: str) -> str:
    r"""`formula` without the dollar signs or `\( \)` around it."""
    formula = formula.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if formula.startswith(opening) and formula.endswith(closing) and len(formula) > len(opening + closing):
            return formula[len(opening) : -len(closing)].strip()
    return formula


def _all_equal(evaluations: list[JudgeEvaluation] | None) -> bool:
    return bool(evaluations) and all(evaluation.verdict_label == EQUAL for evaluation in evaluations or [])


if __name__ == "__main__":
    LibraryJudgeMathResourcesServer.run_webserver()
