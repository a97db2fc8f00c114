"""Token ids and log-probs that ride on a model's output, for training on exactly what was sampled.

They are one bundle: ids without log-probs (or the reverse) would train on something
else than what was generated, so part of a bundle is an error and never ignored.
"""

from collections.abc import Mapping
from typing import Any, NotRequired

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

REQUIRED_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOKEN_FIELDS = (*REQUIRED_TOKEN_FIELDS, "routed_experts")


class TokenIDLogProbMixin(BaseModel):
    """What an item or message for training carries in addition."""

    model_config = ConfigDict(defer_build=True)

    prompt_token_ids: list[int]
    """Every token the model saw."""
    generation_token_ids: list[int]
    """The tokens it sampled."""
    generation_log_probs: list[float | None]
    """The log-probability of each sampled token; null where it was NaN, which JSON cannot say."""
    routed_experts: str | list[Any] | None = None
    """Mixture-of-experts routing: an encoded envelope, or nested lists of expert indices."""


class TokenIDLogProbTypedDictMixin(TypedDict):
    """The same for messages that stay plain dicts."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float | None]
    routed_experts: NotRequired[str | list[Any] | None]


def carries_token_ids(fields: Mapping[str, Any]) -> bool:
    """Whether `fields` hold a complete bundle; a null counts as absent.

    Raises:
        PydanticCustomError: only part of a bundle is there.
    """
    present = [name for name in TOKEN_FIELDS if fields.get(name) is not None]
    if not present:
        return False
    missing = [name for name in REQUIRED_TOKEN_FIELDS if name not in present]
    if missing:
        raise PydanticCustomError(
            "token_metadata_incomplete",
            "Token metadata is all or nothing: {present} without {missing}. Supply {missing} too, or leave all out",
            {"present": ", ".join(present), "missing": ", ".join(missing)},
        )
    return True
