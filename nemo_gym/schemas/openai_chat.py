"""The Chat Completions API: what is asked of a model and what it answers."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from nemo_gym.schemas.openai_chat_messages import (
    NeMoGymChatCompletionMessageParam,
    NeMoGymChatCompletionToolUnionParam,
)
from nemo_gym.schemas.token_ids import TokenIDLogProbMixin, carries_token_ids
from nemo_gym.schemas.wire import TaggedModel, WireModel, fastapi_body


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
    extra = message.__pydantic_extra__
    if not extra or not carries_token_ids(extra):
        return message
    given = {name: value for name, value in message.__dict__.items() if name in message.__pydantic_fields_set__}
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
