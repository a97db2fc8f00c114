"""What is sent to a Chat Completions endpoint: messages, their parts, tools.

All are plain dicts, described by TypedDicts. Unknown keys are kept, since vendors put
reasoning and more into messages; a message must only have a known role, the keys that
role needs and parts and tool calls of known kinds.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, with_config
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from nemo_gym.schemas.token_ids import TokenIDLogProbTypedDictMixin, carries_token_ids
from nemo_gym.schemas.wire import TextOrList

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
