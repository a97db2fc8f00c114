"""`code_gen`: the model writes a Python program, and unit tests in a sandbox say whether it is right.

What a model writes is run in processes that reach neither files, nor the network, nor other processes, with
bounded time and memory. Where the system does not allow such processes, the server refuses to start
unless it is told that this does not matter.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from nemo_gym import PARENT_DIR
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.config_types import ConfigError
from nemo_gym.sandbox import IsolatedPool, SandboxUnavailableError, Work
from nemo_gym.server_utils import per_process_cap, while_serving
from resources_servers.code_gen.grading import UnitTests, Verdict, run_tests
from resources_servers.code_gen.submission import breaks_reasoning_format, extract_code

logger = logging.getLogger(__name__)

_WORK = Work("resources_servers.code_gen.program", roots=(Path(__file__).absolute().parents[2], PARENT_DIR))
_NO_ROOM = (
    "%s: this machine has not the memory for %d programs of %d MB each: one that is killed because memory runs out "
    "scores 0. Lower `num_processes` or `memory_limit_mb` to be sure that it was the machine's doing"
)


class CodeGenResourcesServerConfig(BaseResourcesServerConfig):
    """What programs may use."""

    num_processes: int | None = Field(default=None, ge=1)
    """Programs that run at the same time, never more than there are processors; as many as these when unset."""
    unit_test_timeout_secs: float = Field(default=10, gt=0)
    """Time for one test."""
    memory_limit_mb: int = Field(default=1024, ge=64)
    """Memory for one test."""
    reasoning_format_penalty: float = 0.0
    """The reward when the answer contains think tags, or the reasoning more than one of a kind."""
    allow_unsandboxed: bool = False
    """Start even if the system cannot isolate programs. They can then do whatever this server can."""
    debug: bool = False
    """Log how every program fared."""


class VerifierMetadata(BaseModel):
    """What the judge of a row needs."""

    model_config = ConfigDict(extra="allow")

    unit_tests: UnitTests
    difficulty: str | None = None


class CodeGenRunRequest(BaseRunRequest):
    """A row."""

    verifier_metadata: VerifierMetadata
    difficulty: str | None = None
    """Metrics are also told per difficulty; may also stand in `verifier_metadata`."""


class CodeGenVerifyRequest(CodeGenRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class CodeGenVerifyResponse(CodeGenVerifyRequest, BaseVerifyResponse):
    """The verdict, and how it came about."""

    extracted_model_output: str | None = None
    """All that the model said."""
    extracted_model_code: str | None = None
    """The program in it."""
    result: list[bool | int] | None = None
    """True for a test passed; -2 wrong answer, -3 time limit, -4 runtime error; -1 for all: too slow altogether."""
    metadata: dict[str, Any] | None = None
    """What was wrong with the test that failed."""
    unit_tests_time_taken: float | None = None
    reasoning_format_violation_rate: float = 0.0


class CodeGenResourcesServer(SimpleResourcesServer):
    """Runs what the model wrote."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: CodeGenResourcesServerConfig
    _programs: IsolatedPool = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make sure that programs can be isolated before anything is served.

        Raises:
            ConfigError: they cannot, and nobody allowed that.
        """
        super().model_post_init(context)
        self._programs = IsolatedPool(
            _WORK,
            per_process_cap(self.config.num_processes),
            require_isolation=not self.config.allow_unsandboxed,
            size_everywhere=self.config.num_processes,
        )
        try:
            first = self._programs.start()
        except SandboxUnavailableError as error:
            raise ConfigError(
                f"{self.config.name}: what models write would run unprotected: {error}. Move it to such a system, "
                "or set `allow_unsandboxed: true` if this machine has nothing to lose"
            ) from error
        if not self._programs.has_room_for(self.config.memory_limit_mb):
            logger.warning(_NO_ROOM, self.config.name, self._programs.size, self.config.memory_limit_mb)
        if not first.holds:
            logger.warning("%s runs what models write WITHOUT a sandbox: %s", self.config.name, first.problems)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; the isolated processes end with the app."""
        return while_serving(super().setup_webserver(), end=self._programs.close)

    async def verify(self, body: CodeGenVerifyRequest) -> CodeGenVerifyResponse:
        """Right when the program passes every test."""
        text = body.response.output_text
        code = extract_code(text)
        verdict = None if code is None else await self._judge(code, body.verifier_metadata.unit_tests)
        reward = float(verdict is not None and verdict.all_passed)
        breaks_format = breaks_reasoning_format(body.response)
        fields: dict[str, Any] = {
            "reward": self.config.reasoning_format_penalty if breaks_format else reward,
            "reasoning_format_violation_rate": float(breaks_format),
            "extracted_model_output": text or None,
            "extracted_model_code": code,
            "difficulty": body.difficulty or body.verifier_metadata.difficulty,
        }
        if verdict is not None:
            fields |= {"result": verdict.results, "metadata": verdict.metadata}
            fields["unit_tests_time_taken"] = verdict.seconds
        return CodeGenVerifyResponse(**{**dict(body), **fields})

    async def _judge(self, code: str, tests: UnitTests) -> Verdict:
        job = partial(
            run_tests,
            code=code,
            tests=tests,
            timeout_s=self.config.unit_test_timeout_secs,
            memory_mb=self.config.memory_limit_mb,
        )
        verdict = await self._programs.run(job)
        if self.config.debug:
            logger.info("%s: %s in %.2f s: %s", self.config.name, verdict.results, verdict.seconds, verdict.metadata)
        return verdict

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """pass@k and the majority vote over equal programs, over all rows and per difficulty."""
        from nemo_gym.reward_profile import (  # loads numpy
            add_avg_sample_std_dev,
            compute_pass_majority_metrics,
            compute_subset_metrics,
        )

        metrics, scores, names, max_k = compute_pass_majority_metrics(tasks, _scores, "extracted_model_code")
        add_avg_sample_std_dev(metrics, scores, names, max_k)
        return {**metrics, **compute_subset_metrics(tasks, "difficulty", _scores, "extracted_model_code")}

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """The means that matter, and the curves at their highest k."""
        from nemo_gym.reward_profile import highest_k_metrics

        means = ("mean/reward", "mean/reasoning_format_violation_rate")
        return {
            **{key: agent_metrics[key] for key in means if key in agent_metrics},
            **highest_k_metrics(agent_metrics, "pass@1[avg-of-{k}]"),
            **highest_k_metrics(agent_metrics, "pass@{k}", exclude_names=["no_answer"]),
        }


def _scores(rollout: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(rollout["reward"] > 0)}


if __name__ == "__main__":
    CodeGenResourcesServer.run_webserver()
