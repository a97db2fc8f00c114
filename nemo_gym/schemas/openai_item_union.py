"""Which item a JSON object is: decided by its `type`, and for messages by what they carry.

An object without `type` is a message if it has a `role`. Among messages
    parts the model wrote (`output_text`, `refusal`)       NeMoGymResponseOutputMessage
    other parts and a `status`                              NeMoGymMessage
    anything else                                           NeMoGymEasyInputMessage
and an item with token ids is the ForTraining variant of its type. Everything else is
rejected with one error that names the accepted types.

The choice is made inside pydantic-core, by looking fields up in the unread JSON: asking
a Python function would first turn every item into a dict, and trying one type after the
other (pydantic's default) costs an order of magnitude more and fails with pages of errors.
"""

from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

from nemo_gym.schemas.openai_content import INPUT_PART_TYPES, OUTPUT_PART_TYPES
from nemo_gym.schemas.openai_items import (
    RESPONSES_TO_TRAIN,
    HostedToolItemType,
    NeMoGymEasyInputMessage,
    NeMoGymEasyInputMessageForTraining,
    NeMoGymFunctionCallOutput,
    NeMoGymHostedToolItem,
    NeMoGymMessage,
    NeMoGymMessageForTraining,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseReasoningItemForTraining,
)
from nemo_gym.schemas.token_ids import TokenIDLogProbMixin, carries_token_ids
from nemo_gym.schemas.wire import WireModel

_ROLES = ("user", "assistant", "system", "developer")
_HOSTED_TYPES: tuple[str, ...] = get_args(HostedToolItemType)
ACCEPTED_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", *_HOSTED_TYPES)

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
    extra = item.__pydantic_extra__
    return _as_specific_type(item, extra) if extra else item


def _as_specific_type(item: WireModel, extra: dict[str, Any]) -> BaseModel:
    target: type[BaseModel] = type(item)
    if isinstance(item, NeMoGymEasyInputMessage):
        target = _message_type(item, extra)
    if carries_token_ids(extra):
        target = training_variant_of(target)
    if target is type(item):
        return item
    given = {name: value for name, value in item.__dict__.items() if name in item.__pydantic_fields_set__}
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
    return validate(value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else value)


_ITEM_CLASSES: tuple[type[WireModel], ...] = (*RESPONSES_TO_TRAIN, NeMoGymFunctionCallOutput, NeMoGymHostedToolItem)


class _ByType:
    """Marks the item union; see the module's docstring."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        for item_class in _ITEM_CLASSES:
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
            **dict.fromkeys(_HOSTED_TYPES, handler.generate_schema(NeMoGymHostedToolItem)),
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
