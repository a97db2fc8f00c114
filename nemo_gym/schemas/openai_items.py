"""The items a conversation of the Responses API consists of; input and output use the same ones.

Each is a model with its fields. Which one a JSON object is read as is decided in
`openai_item_union`.
"""

from typing import Annotated, Any, Literal, TypeAlias
from uuid import uuid4

from pydantic import Field

from nemo_gym.schemas.openai_content import (
    NeMoGymReasoningText,
    NeMoGymResponseInputPart,
    NeMoGymResponseOutputPart,
    NeMoGymSummary,
)
from nemo_gym.schemas.token_ids import TokenIDLogProbMixin
from nemo_gym.schemas.wire import TaggedModel, TextOrList, WireModel

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


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
        if "id" in self.__pydantic_fields_set__:
            self.__pydantic_fields_set__.add("status")


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


class NeMoGymResponseReasoningItem(TaggedModel):
    """What the model thought before it answered.

    A `status` is dropped: providers send it, and reject it when it is sent back.
    """

    id: str
    summary: list[NeMoGymSummary]
    type: Literal["reasoning"] = "reasoning"
    content: list[NeMoGymReasoningText] | None = None
    encrypted_content: str | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Forget the status."""
        super().model_post_init(context)
        if self.__pydantic_extra__ and "status" in self.__pydantic_extra__:
            del self.__pydantic_extra__["status"]
            self.__pydantic_fields_set__.discard("status")


HostedToolItemType: TypeAlias = Literal[
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "file_search_call",
    "web_search_call",
    "computer_call",
    "computer_call_output",
    "image_generation_call",
    "code_interpreter_call",
    "local_shell_call",
    "local_shell_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "tool_search_call",
    "tool_search_output",
    "compaction",
    "item_reference",
]


class NeMoGymHostedToolItem(WireModel):
    """An item of a tool that the provider runs. Passed on as it is: nothing here looks inside."""

    type: HostedToolItemType


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
