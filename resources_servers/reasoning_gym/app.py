"""`reasoning_gym`: generated puzzles, scored by the reasoning-gym library.

The library knows more than a hundred kinds of tasks and how to score each. Scorers read what the
model wrote, and some compare formulas, which can take for ever: they are called in processes apart,
isolated as far as the system allows, that are killed when they take too long. None of them runs the
text of a model.
"""

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import Field, PrivateAttr, field_validator

from nemo_gym import PARENT_DIR
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.sandbox import IsolatedPool, IsolatedProcess, Limits, Outcome, Work
from nemo_gym.server_utils import per_process_cap, while_serving
from resources_servers.reasoning_gym.answers import extract_answer

_WORK = Work("resources_servers.reasoning_gym.scoring", roots=(Path(__file__).absolute().parents[2], PARENT_DIR))
_WAITING_FACTOR = 6
"""Seconds on the clock per second on a processor, so that an overloaded machine does not count against an answer."""


class ReasoningGymResourcesServerConfig(BaseResourcesServerConfig):
    """How much scoring may cost."""

    scoring_processes: int | None = Field(default=None, ge=1)
    """Processes that score at the same time, never more than there are processors; as many as these when unset. Each
    holds the library, about 150 MB, and is started when those that are there are busy."""
    scoring_cpu_limit_s: int = Field(default=10, ge=1)
    """An answer that keeps the scorer busy for longer scores 0."""


class ReasoningGymRunRequest(BaseRunRequest):
    """A row, as the library generates it."""

    question: str
    answer: str | None = None
    """The reference answer; some tasks have none, because many answers are right."""
    metadata: dict[str, Any]
    """What the library's scorer wants to know."""

    @field_validator("metadata")
    @classmethod
    def _names_its_task(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        task = metadata.get("source_dataset")
        if not isinstance(task, str) or not task:
            raise ValueError(
                f"metadata.source_dataset must name the reasoning-gym task, such as 'gcd', but is {task!r}"
            )
        return metadata


class ReasoningGymVerifyRequest(ReasoningGymRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class ReasoningGymVerifyResponse(ReasoningGymVerifyRequest, BaseVerifyResponse):
    """The verdict."""

    task_name: str
    score: float
    """As the library says; some tasks give partial credit."""
    extracted_answer: str | None
    scoring_error: str | None = None
    """Why the answer could not be read, which then scores 0, or what the library gives for any text."""


class ReasoningGymResourcesServer(SimpleResourcesServer):
    """Finds the answer in the text and has the library score it."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: ReasoningGymResourcesServerConfig
    _scorers: IsolatedPool = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Prepare the scoring processes; they start when they are needed."""
        super().model_post_init(context)
        processes = per_process_cap(self.config.scoring_processes)
        self._scorers = IsolatedPool(_WORK, processes, require_isolation=False)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; the scoring processes end with the app."""
        app = super().setup_webserver()
        return while_serving(app, begin=self._scorers.start_in_background, end=self._scorers.close)

    async def verify(self, body: ReasoningGymVerifyRequest) -> ReasoningGymVerifyResponse:
        """Score the answer; no answer scores 0."""
        task = body.metadata["source_dataset"]
        given = extract_answer(body.response.output_text)
        score, error = (0.0, None) if given is None else await self._score(task, body, given)
        verdict = {
            "reward": score,
            "score": score,
            "task_name": task,
            "extracted_answer": given,
            "scoring_error": error,
        }
        return ReasoningGymVerifyResponse(**{**dict(body), **verdict})

    async def _score(self, task: str, row: ReasoningGymVerifyRequest, given: str) -> tuple[float, str | None]:
        entry = {"question": row.question, "answer": row.answer, "metadata": row.metadata}
        payload = {"task": task, "entry": entry, "given": given}
        cpu_s = self.config.scoring_cpu_limit_s
        limits = Limits(wall_s=cpu_s * _WAITING_FACTOR, cpu_s=cpu_s)
        job = partial(IsolatedProcess.call, payload=payload, limits=limits)
        outcome: Outcome = await self._scorers.run(job)
        if outcome.end != "done" or outcome.value is None:
            return 0.0, f"the scorer was {_how(outcome)}"
        if "problem" in outcome.value:
            raise HTTPException(422, outcome.value["problem"])
        return outcome.value["score"], outcome.value["error"]

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """pass@k and the majority vote, over all and per task; `accuracy` counts full scores only."""
        from nemo_gym.reward_profile import compute_pass_majority_metrics, compute_subset_metrics  # loads numpy

        overall = compute_pass_majority_metrics(tasks, score_fn=_scores, answer_key="extracted_answer")[0]
        return {**overall, **compute_subset_metrics(tasks, "task_name", _scores, "extracted_answer")}

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean, and the curves at their highest k."""
        from nemo_gym.reward_profile import highest_k_metrics

        return {
            **{key: agent_metrics[key] for key in ["mean/reward"] if key in agent_metrics},
            **highest_k_metrics(agent_metrics, "pass@1[avg-of-{k}]"),
            **highest_k_metrics(agent_metrics, "pass@{k}", exclude_names=["no_answer"]),
            **highest_k_metrics(agent_metrics, "majority@{k}", exclude_names=["no_answer"]),
        }


def _scores(rollout: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(rollout["reward"] >= 1.0), "score": rollout["reward"]}


def _how(outcome: Outcome) -> str:
    words = {
        "timeout": f"still running after {outcome.seconds:.0f} s",
        "cpu_limit": "stopped at its CPU limit",
        "output_limit": "stopped for printing too much",
    }
    last_line = outcome.stderr.strip().rpartition("\n")[2][:300]
    return words.get(outcome.end, f"ended by {outcome.detail}{': ' + last_line if last_line else ''}")


if __name__ == "__main__":
    ReasoningGymResourcesServer.run_webserver()
