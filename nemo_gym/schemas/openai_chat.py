"""The Chat Completions API: what is asked of a model and what it answers.

Messages to the model, their parts and tools are plain dicts, described by TypedDicts. Unknown keys are kept, since
vendors put reasoning and more into messages; a message must only have a known role, the keys that role needs and
parts and tool calls of known kinds.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, with_config
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from nemo_gym.schemas.wire import (
    TaggedModel,
    TextOrList,
    TokenIDLogProbMixin,
    TokenIDLogProbTypedDictMixin,
    WireModel,
    carries_token_ids,
    fastapi_body,
)

_OPEN = ConfigDict(extra="allow")


@with_config(_OPEN)
class NeMoGymFunctionDefinition(TypedDict):
    """A function offered to the model."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(_OPEN)
class NeMoGymChatCompletionToolParam(TypedDict):
    """A tool that is a function."""

    function: NeMoGymFunctionDefinition
    type: Literal["function"]


@with_config(_OPEN)
class NeMoGymChatCompletionCustomToolParam(TypedDict):
    """A tool that takes free text; `custom` holds its name, description and format."""

    custom: dict[str, Any]
    type: Literal["custom"]


NeMoGymChatCompletionToolUnionParam: TypeAlias = Annotated[
    NeMoGymChatCompletionToolParam | NeMoGymChatCompletionCustomToolParam, Field(discriminator="type")
]


@with_config(_OPEN)
class NeMoGymChatCompletionContentPartTextParam(TypedDict):
    """Text."""

    text: str
    type: Literal["text"]


@with_config(_OPEN)
class NeMoGymChatCompletionContentPartRefusalParam(TypedDict):
    """A refusal the model gave earlier."""

    refusal: str
    type: Literal["refusal"]


@with_config(_OPEN)
class NeMoGymChatCompletionContentPartImageParam(TypedDict):
    """An image: `url` and, optionally, `detail`."""

    image_url: dict[str, Any]
    type: Literal["image_url"]


@with_config(_OPEN)
class NeMoGymChatCompletionContentPartInputAudioParam(TypedDict):
    """Sound: base64 `data` and its `format`."""

    input_audio: dict[str, Any]
    type: Literal["input_audio"]


@with_config(_OPEN)
class NeMoGymChatCompletionContentPartAudioURLParam(TypedDict):
    """Sound behind a URL (also a data URL), as vLLM takes it."""

    audio_url: dict[str, Any]
    type: Literal["audio_url"]


@with_config(_OPEN)
class NeMoGymChatCompletionContentPartFileParam(TypedDict):
    """A file, inline or by id."""

    file: dict[str, Any]
    type: Literal["file"]


@with_config(_OPEN)
class NeMoGymChatCompletionContentPartVideoURLParam(TypedDict):
    """A video behind a URL, as vLLM takes it."""

    video_url: dict[str, Any]
    type: Literal["video_url"]


NeMoGymChatCompletionContentPartParam: TypeAlias = Annotated[
    NeMoGymChatCompletionContentPartTextParam
    | NeMoGymChatCompletionContentPartRefusalParam
    | NeMoGymChatCompletionContentPartImageParam
    | NeMoGymChatCompletionContentPartInputAudioParam
    | NeMoGymChatCompletionContentPartAudioURLParam
    | NeMoGymChatCompletionContentPartFileParam
    | NeMoGymChatCompletionContentPartVideoURLParam,
    Field(discriminator="type"),
]
_Content: TypeAlias = Annotated[str | list[NeMoGymChatCompletionContentPartParam], TextOrList()]


@with_config(_OPEN)
class NeMoGymChatCompletionMessageToolCallFunctionParam(TypedDict):
    """The function called and its arguments, a JSON object as text."""

    arguments: str
    name: str


@with_config(_OPEN)
class NeMoGymChatCompletionMessageToolCallParam(TypedDict):
    """A call of a function tool."""

    id: str
    function: NeMoGymChatCompletionMessageToolCallFunctionParam
    type: Literal["function"]


@with_config(_OPEN)
class NeMoGymChatCompletionMessageCustomToolCallParam(TypedDict):
    """A call of a custom tool."""

    id: str
    custom: dict[str, Any]
    type: Literal["custom"]


NeMoGymChatCompletionMessageToolCallUnionParam: TypeAlias = Annotated[
    NeMoGymChatCompletionMessageToolCallParam | NeMoGymChatCompletionMessageCustomToolCallParam,
    Field(discriminator="type"),
]


@with_config(_OPEN)
class NeMoGymChatCompletionUserMessageParam(TypedDict):
    """What the user says."""

    content: _Content
    role: Literal["user"]
    name: NotRequired[str | None]


@with_config(_OPEN)
class NeMoGymChatCompletionSystemMessageParam(TypedDict):
    """Instructions."""

    content: _Content
    role: Literal["system"]
    name: NotRequired[str | None]


@with_config(_OPEN)
class NeMoGymChatCompletionDeveloperMessageParam(TypedDict):
    """Instructions, in the newer spelling."""

    content: _Content
    role: Literal["developer"]
    name: NotRequired[str | None]


@with_config(_OPEN)
class NeMoGymChatCompletionAssistantMessageParam(TypedDict):
    """What the model said earlier, and the tools it called."""

    role: Literal["assistant"]
    content: NotRequired[_Content | None]
    name: NotRequired[str | None]
    refusal: NotRequired[str | None]
    tool_calls: NotRequired[list[NeMoGymChatCompletionMessageToolCallUnionParam] | None]


@with_config(_OPEN)
class NeMoGymChatCompletionAssistantMessageForTrainingParam(
    NeMoGymChatCompletionAssistantMessageParam, TokenIDLogProbTypedDictMixin
):
    """`NeMoGymChatCompletionAssistantMessageParam` with token ids."""


@with_config(_OPEN)
class NeMoGymChatCompletionToolMessageParam(TypedDict):
    """What a tool answered."""

    content: _Content
    role: Literal["tool"]
    tool_call_id: str


@with_config(_OPEN)
class _AssistantMessage(NeMoGymChatCompletionAssistantMessageParam, total=False):
    """Either kind of assistant message; `carries_token_ids` demands all or none of the token fields."""

    prompt_token_ids: list[int] | None
    generation_token_ids: list[int] | None
    generation_log_probs: list[float | None] | None
    routed_experts: str | list[Any] | None


def _check_token_ids(message: dict[str, Any]) -> dict[str, Any]:
    carries_token_ids(message)
    return message


class _ByRole:
    """Marks the union of messages as decided by `role`."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.tagged_union_schema(
            {
                "user": handler.generate_schema(NeMoGymChatCompletionUserMessageParam),
                "system": handler.generate_schema(NeMoGymChatCompletionSystemMessageParam),
                "developer": handler.generate_schema(NeMoGymChatCompletionDeveloperMessageParam),
                "assistant": core_schema.no_info_after_validator_function(
                    _check_token_ids, handler.generate_schema(_AssistantMessage)
                ),
                "tool": handler.generate_schema(NeMoGymChatCompletionToolMessageParam),
            },
            "role",
            serialization=core_schema.simple_ser_schema("any"),
        )


NeMoGymChatCompletionMessageParam: TypeAlias = Annotated[
    NeMoGymChatCompletionUserMessageParam
    | NeMoGymChatCompletionSystemMessageParam
    | NeMoGymChatCompletionDeveloperMessageParam
    | NeMoGymChatCompletionAssistantMessageParam
    | NeMoGymChatCompletionAssistantMessageForTrainingParam
    | NeMoGymChatCompletionToolMessageParam,
    _ByRole(),
]


@fastapi_body
class NeMoGymChatCompletionCreateParamsNonStreaming(BaseModel):
    """What to ask a model. Unknown parameters are ignored, so requests of any origin can be narrowed to this."""

    model_config = ConfigDict(defer_build=True)

    messages: list[NeMoGymChatCompletionMessageParam]
    model: str | None = None
    audio: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, int] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    metadata: dict[str, str] | None = None
    modalities: list[str] | None = None
    n: int | None = None
    parallel_tool_calls: bool = True
    prediction: dict[str, Any] | None = None
    presence_penalty: float | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[NeMoGymChatCompletionToolUnionParam] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None
    web_search_options: dict[str, Any] | None = None
    stream: Literal[False] | None = None


class NeMoGymFunction(WireModel):
    """The function called and its arguments, a JSON object as text that may be malformed."""

    arguments: str
    name: str


class NeMoGymChatCompletionMessageToolCall(TaggedModel):
    """A call of a function tool."""

    id: str
    function: NeMoGymFunction
    type: Literal["function"] = "function"


class NeMoGymCustom(WireModel):
    """The custom tool called and its input."""

    input: str
    name: str


class NeMoGymChatCompletionMessageCustomToolCall(TaggedModel):
    """A call of a custom tool."""

    id: str
    custom: NeMoGymCustom
    type: Literal["custom"] = "custom"


NeMoGymChatCompletionMessageToolCallUnion: TypeAlias = Annotated[
    NeMoGymChatCompletionMessageToolCall | NeMoGymChatCompletionMessageCustomToolCall, Field(discriminator="type")
]


class NeMoGymChatCompletionMessage(TaggedModel):
    """What the model said, and the tools it calls."""

    always_dumped = ("role",)

    content: str | None = None
    refusal: str | None = None
    role: Literal["assistant"] = "assistant"
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    tool_calls: list[NeMoGymChatCompletionMessageToolCallUnion] | None = None


class NeMoGymChatCompletionMessageForTraining(TokenIDLogProbMixin, NeMoGymChatCompletionMessage):
    """`NeMoGymChatCompletionMessage` with token ids."""


def _refine(message: NeMoGymChatCompletionMessage) -> NeMoGymChatCompletionMessage:
    extra = message.model_extra
    if not extra or not carries_token_ids(extra):
        return message
    given = {name: value for name, value in message if name in message.model_fields_set}
    return NeMoGymChatCompletionMessageForTraining.model_validate({**given, **extra})


class _ForTrainingWithTokenIds:
    """Reads a message with token ids as its ForTraining variant, and dumps it by its own class."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        NeMoGymChatCompletionMessage.model_rebuild()
        return core_schema.no_info_after_validator_function(
            _refine,
            handler.generate_schema(NeMoGymChatCompletionMessage),
            serialization=core_schema.simple_ser_schema("any"),
        )


class NeMoGymChoice(WireModel):
    """One of the answers asked for."""

    finish_reason: str | None
    """Why it ends: `stop`, `length`, `tool_calls`, `content_filter` or a provider's own reason."""
    index: int
    logprobs: dict[str, Any] | None = None
    message: Annotated[
        NeMoGymChatCompletionMessage | NeMoGymChatCompletionMessageForTraining, _ForTrainingWithTokenIds()
    ]


class NeMoGymCompletionTokensDetails(WireModel):
    """Of the tokens written, those spent on reasoning."""

    reasoning_tokens: int | None = None


class NeMoGymPromptTokensDetails(WireModel):
    """Of the tokens read, those that came from the provider's cache."""

    cached_tokens: int | None = None


class NeMoGymCompletionUsage(WireModel):
    """Tokens read and written."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    completion_tokens_details: NeMoGymCompletionTokensDetails | None = None
    prompt_tokens_details: NeMoGymPromptTokensDetails | None = None


@fastapi_body
class NeMoGymChatCompletion(WireModel):
    """What a model answered."""

    id: str
    choices: list[NeMoGymChoice]
    created: int
    model: str
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: NeMoGymCompletionUsage | None = None
