"""One model call as it is kept: what the model saw, what it sampled, and what became of that."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym.schemas.wire import REQUIRED_TOKEN_FIELDS, TOKEN_FIELDS

__all__ = [
    "TOKEN_ENTRY_RECORD_SCHEMA_VERSION",
    "TOKEN_FIELDS",
    "TokenEntry",
    "extract_token_fields",
    "response_to_output_items",
    "strip_token_fields",
    "weights_of",
]

TOKEN_ENTRY_RECORD_SCHEMA_VERSION = 1
BESIDE_TOKENS = ("weight_versions", "weight_version", "weight_segments")
"""What model servers tell about the weights that generated an answer; an entry keeps it among its extra fields."""


class TokenEntry(BaseModel):
    """One call of a rollout; its tokens, and the output items they were read as."""

    model_config = ConfigDict(extra="allow")

    schema_version: int = TOKEN_ENTRY_RECORD_SCHEMA_VERSION
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: Any | None = None
    output_items: list[dict[str, Any]] = Field(default_factory=list)
    """What the model said as items, without token fields."""
    token_item_index: int | None = None
    """Which of the items the tokens were on."""
    created_at: float = 0.0

    @model_validator(mode="after")
    def _fits_together(self) -> "TokenEntry":
        if self.schema_version > TOKEN_ENTRY_RECORD_SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {self.schema_version}, and this program reads up to "
                f"{TOKEN_ENTRY_RECORD_SCHEMA_VERSION}; read it with the version that wrote it"
            )
        ids, log_probs = self.generation_token_ids, self.generation_log_probs
        if len(ids) != len(log_probs):
            raise ValueError(f"{len(ids)} generated tokens and {len(log_probs)} log-probs; there must be one for each")
        if not all(map(math.isfinite, log_probs)):
            raise ValueError("a log-prob is not a finite number; look for overflow in the policy's logits")
        index = self.token_item_index
        if index is not None and not 0 <= index < len(self.output_items):
            raise ValueError(f"token_item_index is {index}, but there are {len(self.output_items)} output items")
        return self


def response_to_output_items(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The output items of an answer, of the Responses API or of Chat Completions; token fields stay where they were."""
    output = payload.get("output")
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [dict(item) for item in output]
    choices = payload.get("choices") or ()
    message = choices[0].get("message") if choices else None
    if not isinstance(message, Mapping):
        return []
    from nemo_gym.dialects.chat import ChatDialect  # costs what only chats need

    bare = {name: value for name, value in message.items() if name not in TOKEN_FIELDS}
    items = [item.model_dump(mode="json", exclude_none=True) for item in ChatDialect().items_of_message(bare)]
    items[-1] |= {name: message[name] for name in TOKEN_FIELDS if message.get(name) is not None} | weights_of(message)
    return items


def strip_token_fields(items: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int | None]:
    """The items without token fields, and which of them had some.

    Raises:
        ValueError: several had.
    """
    with_tokens = [index for index, item in enumerate(items) if _token_fields(item)]
    if len(with_tokens) > 1:
        raise ValueError(f"{len(with_tokens)} items of one answer have token ids; only one can have those of the call")
    left_out = (*TOKEN_FIELDS, *BESIDE_TOKENS, "prompt_digest")
    bare = [{name: value for name, value in item.items() if name not in left_out} for item in items]
    return bare, with_tokens[0] if with_tokens else None


def extract_token_fields(response_json: Mapping[str, Any]) -> dict[str, Any] | None:
    """The token fields of an answer; None when it has none.

    Raises:
        ValueError: several of its items have some, or one has only part of them.
    """
    items = response_to_output_items(response_json)
    _, index = strip_token_fields(items)
    if index is None:
        return None
    fields = _token_fields(items[index])
    missing = [name for name in REQUIRED_TOKEN_FIELDS if name not in fields]
    if missing:
        raise ValueError(f"an item has {', '.join(fields)} but not {', '.join(missing)}; they are of use only together")
    return fields


def weights_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """What an item says about the weights that generated it."""
    return {name: item[name] for name in BESIDE_TOKENS if item.get(name) is not None}


def _token_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item[name] for name in TOKEN_FIELDS if item.get(name) is not None}
