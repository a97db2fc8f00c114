"""PUBLIC: a request and an answer of the Anthropic Messages API, as models.

Blocks, tools and settings are kept as they are: their shapes are the provider's, who adds to them often.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["NeMoGymAnthropicMessage", "NeMoGymAnthropicMessageCreateParamsNonStreaming"]

_Object = dict[str, Any]


class NeMoGymAnthropicMessageCreateParamsNonStreaming(BaseModel):
    """What to ask a model."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int
    messages: list[_Object]
    model: str
    cache_control: _Object | None = None
    container: str | None = None
    inference_geo: str | None = None
    metadata: _Object | None = None
    output_config: _Object | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: list[str] | None = None
    system: str | list[_Object] | None = None
    temperature: float | None = None
    thinking: _Object | None = None
    tool_choice: _Object | None = None
    tools: list[_Object] | None = Field(default=None)
    top_k: int | None = None
    top_p: float | None = None
    stream: Literal[False] | None = None


class NeMoGymAnthropicMessage(BaseModel):
    """What it said."""

    model_config = ConfigDict(extra="allow")

    id: str
    content: list[_Object]
    model: str
    role: Literal["assistant"] = "assistant"
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    usage: _Object
