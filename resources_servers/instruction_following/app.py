"""`instruction_following`: instructions whose fulfilment a program can check, as in the IFEval benchmark.

Every id of IFEval's registry is known. A row with an unknown id, or with arguments that do not fit, is refused: it
would otherwise count as an instruction that no model ever follows.
"""

import asyncio
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.judge import last_message_text
from resources_servers.instruction_following.instructions import Instruction
from resources_servers.instruction_following.registry import instructions_of

_FIELDS = ("instruction_id_list", "prompt", "kwargs", "grading_mode")


class InstructionFollowingResourcesServerConfig(BaseResourcesServerConfig):
    """Nothing to configure: the rows say what was asked for."""


class Asked(BaseModel):  # type: ignore[no-redef]  # mypy takes the field for a parameter of its own
    """What a row asked for."""

    instruction_id_list: list[str] = Field(min_length=1)
    kwargs: list[dict[str, Any] | None]
    """The arguments of each instruction."""
    prompt: str | None = None
    grading_mode: Literal["binary", "fraction"] = "binary"
    """Whether only following all counts, or the share of those followed."""

    def instructions(self) -> list[Instruction]:
        """The instructions with their arguments."""
        return instructions_of(self.instruction_id_list, self.kwargs)


class InstructionFollowingRunRequest(BaseRunRequest):
    """A row. What was asked for stands in `verifier_metadata`, or as in older data sets in the row itself."""

    model_config = ConfigDict(extra="allow")

    verifier_metadata: dict[str, Any] | None = None

    @property
    def asked(self) -> Asked:
        """What was asked for; `verifier_metadata` wins."""
        extra = self.model_extra or {}
        own = {name: extra[name] for name in _FIELDS if name in extra}
        return Asked.model_validate({**own, **(self.verifier_metadata or {})})

    @model_validator(mode="after")
    def _asks_for_what_can_be_checked(self) -> Self:
        self.asked.instructions()
        return self


class InstructionFollowingVerifyRequest(InstructionFollowingRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class InstructionFollowingVerifyResponse(InstructionFollowingVerifyRequest, BaseVerifyResponse):
    """The verdict."""

    follow_all_instructions: bool
    follow_instruction_list: list[bool]
    """In the order of the instructions."""


class InstructionFollowingResourcesServer(SimpleResourcesServer):
    """Checks instruction after instruction."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: InstructionFollowingResourcesServerConfig

    async def verify(self, body: InstructionFollowingVerifyRequest) -> InstructionFollowingVerifyResponse:
        """Check the last message; an empty one follows nothing."""
        asked = body.asked
        text = last_message_text(body.response)
        followed = await asyncio.to_thread(check_all, asked.instructions(), text)
        share = sum(followed) / len(followed)
        verdict = {
            "reward": share if asked.grading_mode == "fraction" else float(all(followed)),
            "follow_all_instructions": all(followed),
            "follow_instruction_list": followed,
        }
        return InstructionFollowingVerifyResponse(**{**dict(body), **verdict})

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """pass@k by prompt and, as IFEval tells it, by instruction."""
        from nemo_gym.reward_profile import compute_pass_majority_metrics  # loads numpy

        return compute_pass_majority_metrics(tasks, score_fn=_scores)[0]

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean, and the curves at their highest k."""
        from nemo_gym.reward_profile import highest_k_metrics

        return {
            **{key: agent_metrics[key] for key in ["mean/reward"] if key in agent_metrics},
            **highest_k_metrics(agent_metrics, "pass@1[avg-of-{k}]"),
            **highest_k_metrics(agent_metrics, "pass@{k}"),
        }


def check_all(instructions: list[Instruction], text: str) -> list[bool]:
    """Whether each instruction is followed."""
    return [bool(text.strip()) and instruction.is_followed(text) for instruction in instructions]


def _scores(rollout: dict[str, Any]) -> dict[str, float]:
    followed = rollout.get("follow_instruction_list")
    if not isinstance(followed, list) or not followed:  # not checked, as with skip_verification
        return {}
    followed = [bool(each) for each in followed]
    return {"accuracy": float(all(followed)), "instruction_accuracy": sum(followed) / len(followed)}


if __name__ == "__main__":
    InstructionFollowingResourcesServer.run_webserver()
