"""The Responses API: what is asked of a model, what it answers, and how many tokens that cost.

Requests are strict, since a misspelt parameter would silently change an experiment;
answers keep whatever a provider adds. Providers leave the details of the cost out, or send null for them, and clients
count on them: what is read may lack them, what is written always has them, with 0 for what nobody told.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, with_config
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from nemo_gym.schemas.openai_items import (
    NeMoGymEasyInputMessage,
    NeMoGymResponseInput,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
)
from nemo_gym.schemas.wire import OrObject, TextOrList, WireModel, fastapi_body, fields_of

_DETAILS = frozenset({"input_tokens_details", "output_tokens_details"})
_Counts = TypeVar("_Counts", bound=WireModel)
_Object: TypeAlias = Annotated[dict[str, Any], OrObject()]
"""An object nobody here looks into; Python programs may give a model of OpenAI's SDK for it."""


class NeMoGymResponseInputTokensDetails(WireModel):
    """Of the input tokens, those that came from the provider's cache."""

    cached_tokens: int


class NeMoGymResponseOutputTokensDetails(WireModel):
    """Of the output tokens, those spent on reasoning."""

    reasoning_tokens: int


class _ToldOrZero:
    """Marks details whose `count` may be missing or null, as may the details themselves.

    Complete ones, the usual case, are read without calling Python.
    """

    def __init__(self, count: str) -> None:
        self._count = count

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        complete = handler(source)

        def completed(given: Any) -> Any:
            fields = fields_of(given) or {}
            if not isinstance(fields, Mapping):
                raise ValueError
            counted = 0 if fields.get(self._count) is None else fields[self._count]
            return source.model_validate({**fields, self._count: counted})

        return core_schema.union_schema(
            [complete, core_schema.no_info_plain_validator_function(completed)],
            mode="left_to_right",
            custom_error_type="token_details",
            custom_error_message=f"Token details are null or an object whose {self._count} is a whole number",
            serialization=core_schema.simple_ser_schema("any"),
        )


class NeMoGymResponseUsage(WireModel):
    """Tokens read and written, and the details, which count 0 when the provider does not tell."""

    input_tokens: int
    input_tokens_details: Annotated[NeMoGymResponseInputTokensDetails, _ToldOrZero("cached_tokens")] = Field(
        default_factory=lambda: NeMoGymResponseInputTokensDetails(cached_tokens=0)
    )
    output_tokens: int
    output_tokens_details: Annotated[NeMoGymResponseOutputTokensDetails, _ToldOrZero("reasoning_tokens")] = Field(
        default_factory=lambda: NeMoGymResponseOutputTokensDetails(reasoning_tokens=0)
    )
    total_tokens: int

    def model_post_init(self, context: Any, /) -> None:
        """Count the details as given, so that every dump has them."""
        self.model_fields_set.update(_DETAILS)

    @classmethod
    def sum_from_list(cls, usages: Iterable["NeMoGymResponseUsage"]) -> "NeMoGymResponseUsage":
        """What all `usages` cost together; nothing costs nothing."""
        summands = list(usages)
        if summands:
            return reduce(_add_usages, summands)
        return cls(input_tokens=0, output_tokens=0, total_tokens=0)


def _add_usages(left: NeMoGymResponseUsage, right: NeMoGymResponseUsage) -> NeMoGymResponseUsage:
    details = {
        "input_tokens_details": _added(left.input_tokens_details, right.input_tokens_details),
        "output_tokens_details": _added(left.output_tokens_details, right.output_tokens_details),
    }
    return type(left).model_validate({**_added(left, right), **details})


def _added(left: WireModel, right: WireModel) -> dict[str, int]:
    """The sums of what both sides count; a count that one side lacks is unknown."""
    ours, theirs = dict(left), dict(right)
    return {
        name: count + theirs[name]
        for name, count in ours.items()
        if isinstance(count, int) and isinstance(theirs.get(name), int)
    }


def accumulate_response_usage(
    total: NeMoGymResponseUsage | None, additional: NeMoGymResponseUsage | None
) -> NeMoGymResponseUsage | None:
    """Add one call's usage to a running total, which starts as None.

    A call without usage changes nothing. A count besides the documented ones that one of the two
    lacks is left out of the sum: a number that covers only some calls would pass for the whole.
    """
    if total is None or additional is None:
        return additional if total is None else total
    return _add_usages(total, additional)


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
    prompt: _Object | None = None
    reasoning: _Object | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    temperature: float | None = None
    text: _Object | None = None
    tool_choice: Literal["none", "auto", "required"] | _Object = "auto"
    tools: Annotated[list[ToolParam], OrObject()] = Field(default_factory=list)
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
    error: Annotated[NeMoGymResponseError, OrObject()] | None = None
    incomplete_details: Annotated[NeMoGymIncompleteDetails, OrObject()] | None = None
    instructions: str | list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None
    model: str
    object: Literal["response"] = "response"
    output: list[NeMoGymResponseOutputItem]
    parallel_tool_calls: bool = True
    temperature: float | None = None
    tool_choice: str | _Object = "auto"
    tools: Annotated[list[dict[str, Any]], OrObject()] = Field(default_factory=list)
    top_p: float | None = None
    background: bool | None = None
    conversation: _Object | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: _Object | None = None
    prompt_cache_key: str | None = None
    reasoning: _Object | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    status: str | None = None
    text: _Object | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    usage: Annotated[NeMoGymResponseUsage, OrObject()] | None = None
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
