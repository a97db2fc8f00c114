"""The bodies of `/seed_session`, `/run` and `/verify`.

A row carries fields only its verifier knows. They are kept, so that
`BaseVerifyResponse(**body.model_dump(), reward=...)` answers with the whole row and the
rollout file shows it. A server that needs a field declares it in a subclass.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from nemo_gym.schemas.openai_responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

_VERDICT = ("reward", "reward_components")


class BaseRunRequest(BaseModel):
    """A row: what to ask the model, and whatever the verifier wants to know."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming


class BaseVerifyRequest(BaseRunRequest):
    """A row with the trajectory to score.

    A verdict of an earlier run is dropped: rollouts can be verified again, and the
    new verdict does not collide with the old one.
    """

    response: NeMoGymResponse

    @model_validator(mode="after")
    def _forget_earlier_verdict(self) -> Self:
        extra = self.__pydantic_extra__
        if extra and "reward" not in type(self).model_fields:
            for name in _VERDICT:
                extra.pop(name, None)
                self.__pydantic_fields_set__.discard(name)
        return self


class BaseVerifyResponse(BaseVerifyRequest):
    """The scored trajectory."""

    reward: float


class BaseMultiRewardVerifyResponse(BaseVerifyResponse):
    """The trajectory scored in several respects, which sum up to `reward`."""

    reward_components: dict[str, float]


class BaseSeedSessionRequest(BaseModel):
    """Prepares a session. Agents post the whole row; a subclass declares the fields it needs."""


class BaseSeedSessionResponse(BaseModel):
    """The session is ready."""
