"""The Responses API: what is asked of a model and what it answers.

Requests are strict, since a misspelt parameter would silently change an experiment;
answers keep whatever a provider adds.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from nemo_gym.schemas.openai_item_union import NeMoGymResponseInput, NeMoGymResponseOutputItem
from nemo_gym.schemas.openai_items import NeMoGymEasyInputMessage, NeMoGymResponseOutputMessage
from nemo_gym.schemas.openai_usage import NeMoGymResponseUsage
from nemo_gym.schemas.wire import TextOrList, WireModel, fastapi_body


@with_config(ConfigDict(extra="allow"))
class NeMoGymFunctionToolParam(TypedDict):
    """A function offered to the model."""

    name: str
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]
    type: Literal["function"]
    description: NotRequired[str | None]


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    tool_type = tool.get("type")
    if not isinstance(tool_type, str):
        raise PydanticCustomError("tool_type", "A tool needs a type, such as 'function'")
    if tool_type == "function" and not isinstance(tool.get("name"), str):
        raise PydanticCustomError("tool_name", "A function tool needs a name at its top level, next to type")
    return tool


ToolParam: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_tool)]
"""A tool of any kind: function tools are checked, those of a provider are its own business."""


@fastapi_body
class NeMoGymResponseCreateParamsNonStreaming(BaseModel):
    """What to ask a model. Unknown parameters are an error; a vendor's own go into `metadata.extra_body`."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    background: bool | None = None
    include: list[str] | None = None
    input: Annotated[str | NeMoGymResponseInput, TextOrList()]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    tools: list[ToolParam] = Field(default_factory=list)
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    stream: Literal[False] | None = None


class NeMoGymResponseError(WireModel):
    """Why the provider produced no answer."""

    code: str
    message: str


class NeMoGymIncompleteDetails(WireModel):
    """Why an answer stops early: `max_output_tokens`, `content_filter`, ..."""

    reason: str | None = None


@fastapi_body
class NeMoGymResponse(WireModel):
    """What a model answered, or a whole trajectory in the same shape.

    `parallel_tool_calls`, `tool_choice` and `tools` echo the request; bodies without
    them are accepted and get the API's defaults.
    """

    id: str
    created_at: float
    error: NeMoGymResponseError | None = None
    incomplete_details: NeMoGymIncompleteDetails | None = None
    instructions: str | list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None
    model: str
    object: Literal["response"] = "response"
    output: list[NeMoGymResponseOutputItem]
    parallel_tool_calls: bool = True
    temperature: float | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_p: float | None = None
    background: bool | None = None
    conversation: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    status: str | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    usage: NeMoGymResponseUsage | None = None
    user: str | None = None

    @property
    def output_text(self) -> str:
        """Everything the model said, without separators: its text parts, and messages that are plain text."""
        return "".join(text for item in self.output for text in _spoken_texts(item))


def _spoken_texts(item: NeMoGymResponseOutputItem) -> list[str]:
    if isinstance(item, NeMoGymResponseOutputMessage):
        return [part.text for part in item.content if part.type == "output_text"]
    if isinstance(item, NeMoGymEasyInputMessage) and item.role == "assistant" and isinstance(item.content, str):
        return [item.content]
    return []
