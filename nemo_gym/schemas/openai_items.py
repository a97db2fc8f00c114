"""The items a conversation of the Responses API consists of, and which of them a JSON object is.

Input and output use the same ones. Each is a model with its fields; of what messages are made of, input parts stay
plain dicts and output parts are models: server code indexes the former and reads attributes of the latter.

What an object is read as is decided by its `type`, and for messages by what they carry. An object without `type` is a
message if it has a `role`. Among messages
    parts the model wrote (`output_text`, `refusal`)       NeMoGymResponseOutputMessage
    other parts and a `status`                              NeMoGymMessage
    anything else                                           NeMoGymEasyInputMessage
and an item with token ids is the ForTraining variant of its type. Everything else is
rejected with one error that names the accepted types.

The choice is made inside pydantic-core, by looking fields up in the unread JSON: asking
a Python function would first turn every item into a dict, and trying one type after the
other (pydantic's default) costs an order of magnitude more and fails with pages of errors.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias
from uuid import uuid4

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidatorFunctionWrapHandler,
    with_config,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from nemo_gym.schemas.hosted_items import HOSTED_ITEMS, HOSTED_TYPES, NeMoGymHostedToolItem
from nemo_gym.schemas.wire import TaggedModel, TextOrList, TokenIDLogProbMixin, WireModel, carries_token_ids, fields_of

_OPEN = ConfigDict(extra="allow")
INPUT_PART_TYPES = ("input_text", "input_image", "input_file", "input_audio", "input_video")
OUTPUT_PART_TYPES = ("output_text", "refusal")
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
_ROLES = ("user", "assistant", "system", "developer")
ACCEPTED_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", *HOSTED_TYPES)
# Where pydantic-core finds what decides: the first of these paths that exists.
_TYPE_OR_ROLE: list[list[str | int]] = [["type"], ["role"]]
_FIRST_PART_OR_ROLE: list[list[str | int]] = [["content", 0, "type"], ["role"]]
_ITEM_ERROR = (
    f"An item needs a type, one of {', '.join(ACCEPTED_ITEM_TYPES)}; "
    f"without one it needs a role ({', '.join(_ROLES)}) and is a message"
)
_MESSAGE_ERROR = (
    f"A message needs a role, one of {', '.join(_ROLES)}, and as content text or parts "
    f"of type {', '.join((*INPUT_PART_TYPES, *OUTPUT_PART_TYPES))}"
)


@with_config(_OPEN)
class NeMoGymResponseInputText(TypedDict):
    """Text for the model."""

    text: str
    type: Literal["input_text"]


@with_config(_OPEN)
class NeMoGymResponseInputImage(TypedDict):
    """An image, by URL (also a data URL) or by the id of an uploaded file."""

    type: Literal["input_image"]
    detail: NotRequired[str | None]
    image_url: NotRequired[str | None]
    file_id: NotRequired[str | None]


@with_config(_OPEN)
class NeMoGymResponseInputFile(TypedDict):
    """A file, inline, by URL or by id."""

    type: Literal["input_file"]
    file_data: NotRequired[str | None]
    file_id: NotRequired[str | None]
    file_url: NotRequired[str | None]
    filename: NotRequired[str | None]


@with_config(_OPEN)
class NeMoGymResponseInputAudio(TypedDict):
    """Sound: base64 `data` and its `format`."""

    type: Literal["input_audio"]
    input_audio: dict[str, Any]


@with_config(_OPEN)
class NeMoGymResponseInputVideo(TypedDict):
    """A video, in exactly one of `video_url` and `video`."""

    type: Literal["input_video"]
    video_url: NotRequired[Any]
    video: NotRequired[Any]


def _has_one_source(part: NeMoGymResponseInputVideo) -> NeMoGymResponseInputVideo:
    if bool(part.get("video_url")) == bool(part.get("video")):
        raise PydanticCustomError("input_video_source", "input_video needs exactly one non-empty video_url or video")
    return part


NeMoGymResponseInputPart: TypeAlias = Annotated[
    NeMoGymResponseInputText
    | NeMoGymResponseInputImage
    | NeMoGymResponseInputFile
    | NeMoGymResponseInputAudio
    | Annotated[NeMoGymResponseInputVideo, AfterValidator(_has_one_source)],
    Field(discriminator="type"),
]


class NeMoGymResponseOutputText(TaggedModel):
    """Text the model wrote. Absent `annotations` mean there are none."""

    always_dumped = ("annotations", "type")

    annotations: list[Any] = Field(default_factory=list)
    text: str
    type: Literal["output_text"] = "output_text"
    logprobs: list[Any] | None = None


class NeMoGymResponseOutputRefusal(TaggedModel):
    """What the model said instead of answering."""

    refusal: str
    type: Literal["refusal"] = "refusal"


NeMoGymResponseOutputPart: TypeAlias = Annotated[
    NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal, Field(discriminator="type")
]


class NeMoGymSummary(TaggedModel):
    """One paragraph of summarised reasoning."""

    text: str
    type: Literal["summary_text"] = "summary_text"


class NeMoGymReasoningText(TaggedModel):
    """One paragraph of reasoning as the model wrote it."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class NeMoGymEasyInputMessage(WireModel):
    """A message as people write it: a role and text, or a role and parts."""

    content: Annotated[str | list[NeMoGymResponseInputPart], TextOrList()]
    role: Literal["user", "assistant", "system", "developer"]
    type: Literal["message"] = "message"


class NeMoGymMessage(WireModel):
    """A message to the model as the API returns it, with a status."""

    content: list[NeMoGymResponseInputPart]
    role: Literal["user", "system", "developer"]
    status: ItemStatus = "completed"
    type: Literal["message"] = "message"


def _new_message_id() -> str:
    return f"msg_{uuid4().hex}"


class NeMoGymResponseOutputMessage(TaggedModel):
    """A message from the model.

    Clients replay such messages without `id`. They get a fresh one, which a full dump
    shows and which `exclude_unset` leaves out, as providers want no id they do not know.
    """

    always_dumped = ("role", "type")

    id: str = Field(default_factory=_new_message_id)
    content: list[NeMoGymResponseOutputPart]
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "completed"
    type: Literal["message"] = "message"

    def model_post_init(self, context: Any, /) -> None:
        """A message with an id is replayed in full, so its status is dumped as well."""
        super().model_post_init(context)
        if "id" in self.model_fields_set:
            self.model_fields_set.add("status")


class NeMoGymResponseFunctionToolCall(TaggedModel):
    """The model asks for a function to be run."""

    arguments: str
    """A JSON object as text, exactly as the model wrote it: it may be malformed."""
    call_id: str
    name: str
    type: Literal["function_call"] = "function_call"
    id: str | None = None
    status: ItemStatus | None = None


class NeMoGymFunctionCallOutput(TaggedModel):
    """What the function answered."""

    call_id: str
    output: Annotated[str | list[NeMoGymResponseInputPart], TextOrList()]
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    status: ItemStatus | None = None


def _is_none(value: object) -> bool:
    return value is None


class NeMoGymResponseReasoningItem(TaggedModel):
    """What the model thought before it answered.

    A `status` is dropped: providers send it, and reject it when it is sent back. Without `content`
    that key is left out, not null: readers ask for its length, or do not know it.
    """

    id: str
    summary: list[NeMoGymSummary]
    type: Literal["reasoning"] = "reasoning"
    content: list[NeMoGymReasoningText] | None = Field(default=None, exclude_if=_is_none)
    encrypted_content: str | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Forget the status."""
        super().model_post_init(context)
        if self.model_extra and "status" in self.model_extra:
            del self.model_extra["status"]
            self.model_fields_set.discard("status")


class NeMoGymEasyInputMessageForTraining(TokenIDLogProbMixin, NeMoGymEasyInputMessage):
    """`NeMoGymEasyInputMessage` with token ids."""


class NeMoGymMessageForTraining(TokenIDLogProbMixin, NeMoGymMessage):
    """`NeMoGymMessage` with token ids."""


class NeMoGymResponseOutputMessageForTraining(TokenIDLogProbMixin, NeMoGymResponseOutputMessage):
    """`NeMoGymResponseOutputMessage` with token ids."""


class NeMoGymResponseFunctionToolCallForTraining(TokenIDLogProbMixin, NeMoGymResponseFunctionToolCall):
    """`NeMoGymResponseFunctionToolCall` with token ids."""


class NeMoGymResponseReasoningItemForTraining(TokenIDLogProbMixin, NeMoGymResponseReasoningItem):
    """`NeMoGymResponseReasoningItem` with token ids."""


RESPONSES_TO_TRAIN: dict[type[WireModel], type[TokenIDLogProbMixin]] = {
    NeMoGymEasyInputMessage: NeMoGymEasyInputMessageForTraining,
    NeMoGymMessage: NeMoGymMessageForTraining,
    NeMoGymResponseOutputMessage: NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseFunctionToolCall: NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseReasoningItem: NeMoGymResponseReasoningItemForTraining,
}
"""Each item type that a model can generate, and the same with token ids."""


def training_variant_of(item_type: type[BaseModel]) -> type[TokenIDLogProbMixin]:
    """The type that is `item_type` with token ids.

    Raises:
        NotImplementedError: models do not generate `item_type`, so there is nothing to train on.
    """
    for plain, with_token_ids in RESPONSES_TO_TRAIN.items():
        if item_type is plain:
            return with_token_ids
    raise NotImplementedError(
        f"{item_type.__name__} has no variant for training; these have one: "
        f"{', '.join(plain.__name__ for plain in RESPONSES_TO_TRAIN)}"
    )


def _refine(item: WireModel) -> BaseModel:
    """`item` as the most specific type its fields allow."""
    extra = item.model_extra
    return _as_specific_type(item, extra) if extra else item


def _as_specific_type(item: WireModel, extra: dict[str, Any]) -> BaseModel:
    target: type[BaseModel] = type(item)
    if isinstance(item, NeMoGymEasyInputMessage):
        target = _message_type(item, extra)
    if carries_token_ids(extra):
        target = training_variant_of(target)
    if target is type(item):
        return item
    given = {name: value for name, value in item if name in item.model_fields_set}
    return target.model_validate({**given, **extra})


def _message_type(message: NeMoGymEasyInputMessage, extra: dict[str, Any]) -> type[BaseModel]:
    if isinstance(message.content, str):
        return NeMoGymEasyInputMessage
    if message.role == "assistant":
        is_empty_output = not message.content and "id" in extra
        return NeMoGymResponseOutputMessage if is_empty_output else NeMoGymEasyInputMessage
    return NeMoGymMessage if "status" in extra else NeMoGymEasyInputMessage


def _keep_items(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Take items built in Python as they are, and models of other libraries by their fields."""
    if isinstance(value, _ITEM_CLASSES):
        return value
    return validate(fields_of(value))


_ITEM_CLASSES: tuple[type[WireModel], ...] = (*RESPONSES_TO_TRAIN, NeMoGymFunctionCallOutput, NeMoGymHostedToolItem)


class _ByType:
    """Marks the item union; see the module's docstring."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        for item_class in (*_ITEM_CLASSES, *HOSTED_ITEMS.values()):
            item_class.model_rebuild()  # serialization goes by an item's own class, which must be complete then
        items = core_schema.tagged_union_schema(
            self._choices(handler),
            _TYPE_OR_ROLE,
            custom_error_type="unknown_item_type",
            custom_error_message=_ITEM_ERROR,
        )
        return core_schema.json_or_python_schema(
            items,
            core_schema.no_info_wrap_validator_function(_keep_items, items),
            serialization=core_schema.simple_ser_schema("any"),
        )

    def _choices(self, handler: GetCoreSchemaHandler) -> dict[Any, CoreSchema]:
        easy_message = self._refined(NeMoGymEasyInputMessage, handler)
        output_message = self._refined(NeMoGymResponseOutputMessage, handler)
        message = core_schema.tagged_union_schema(
            dict.fromkeys(OUTPUT_PART_TYPES, output_message)
            | dict.fromkeys((*INPUT_PART_TYPES, *_ROLES), easy_message),
            _FIRST_PART_OR_ROLE,
            custom_error_type="unknown_message",
            custom_error_message=_MESSAGE_ERROR,
        )
        return {
            "message": message,
            "assistant": message,
            **dict.fromkeys(("user", "system", "developer"), easy_message),
            "function_call": self._refined(NeMoGymResponseFunctionToolCall, handler),
            "function_call_output": handler.generate_schema(NeMoGymFunctionCallOutput),
            "reasoning": self._refined(NeMoGymResponseReasoningItem, handler),
            **{kind: handler.generate_schema(item_class) for kind, item_class in HOSTED_ITEMS.items()},
        }

    @staticmethod
    def _refined(item_class: type[WireModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_refine, handler.generate_schema(item_class))


NeMoGymResponseInputItem: TypeAlias = Annotated[
    NeMoGymEasyInputMessage
    | NeMoGymMessage
    | NeMoGymResponseOutputMessage
    | NeMoGymResponseFunctionToolCall
    | NeMoGymFunctionCallOutput
    | NeMoGymResponseReasoningItem
    | NeMoGymEasyInputMessageForTraining
    | NeMoGymMessageForTraining
    | NeMoGymResponseOutputMessageForTraining
    | NeMoGymResponseFunctionToolCallForTraining
    | NeMoGymResponseReasoningItemForTraining
    | NeMoGymHostedToolItem,
    _ByType(),
]
NeMoGymResponseInput: TypeAlias = list[NeMoGymResponseInputItem]
NeMoGymResponseOutputItem: TypeAlias = NeMoGymResponseInputItem
