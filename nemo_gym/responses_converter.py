"""PUBLIC: from the Responses API to Chat Completions and back.

A request goes through `responses_to_chat_completion_create_params`, the completion that comes back
through `chat_completion_to_response`. In between, reasoning travels as `<think>` blocks in the text of
assistant messages, and token ids of earlier turns on the messages they belong to. What the model
said in one turn survives the way there and back: reasoning, text and tool calls, to the last space.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar
from uuid import uuid4

from pydantic import BaseModel, Field

from nemo_gym.dialects.base import (
    CHAT_TEMPLATE_KWARGS,
    EXTRA_BODY,
    UnusableRequestError,
    object_in_metadata,
    set_fields,
)
from nemo_gym.dialects.chat import (
    ChatDialect,
    empty_completion,
    is_too_long,
    too_long_response,
    usage_detail,
    with_reasoning_in_text,
)
from nemo_gym.dialects.to_chat import PROMPT_DIGEST, only_text, plain_text, tags_as_fields, taken_apart
from nemo_gym.jsonl import is_deeper
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChoice,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseOutputItem,
    TokenIDLogProbMixin,
)
from nemo_gym.schemas.hosted_items import CALLED_BY_MODEL

__all__ = [
    "CHAT_TEMPLATE_KWARGS",
    "EXTRA_BODY",
    "PROMPT_DIGEST",
    "ResponsesConverter",
    "ResponsesConverterState",
    "SplitItems",
    "UnusableRequestError",
    "VLLMConverter",
    "VLLMConverterResponsesToChatCompletionsState",
    "empty_completion",
    "is_deeper",
    "is_too_long",
    "object_in_metadata",
    "only_text",
    "plain_text",
    "set_fields",
    "split_responses_input_output_items",
    "tags_as_fields",
    "taken_apart",
    "too_long_response",
    "with_reasoning_in_text",
]

_Item = TypeVar("_Item")
_usage_detail = usage_detail
_BY_MODEL = ("reasoning", "function_call", *CALLED_BY_MODEL)


@dataclass
class ResponsesConverter(ChatDialect):
    """Translates requests one way and completions the other: the chat dialect under the names programs know."""

    THINK_TAG_PATTERN: ClassVar[re.Pattern[str]] = re.compile(r"<think>(.*?)</think>", re.DOTALL)

    def responses_to_chat_completion_create_params(
        self, responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymChatCompletionCreateParamsNonStreaming:
        """The Chat Completions request that asks the same; of the request only fields that were set count.

        Raises:
            NotImplementedError: it holds something the Chat Completions API has no form for.
            ValueError: it contradicts itself.
        """
        return NeMoGymChatCompletionCreateParamsNonStreaming.model_construct(**self.request_to(responses_create_params))

    def chat_completion_to_response(
        self,
        responses_create_params: NeMoGymResponseCreateParamsNonStreaming,
        chat_completion: NeMoGymChatCompletion,
        model: str | None = None,
    ) -> NeMoGymResponse:
        """The response to `responses_create_params` that the first choice of a completion amounts to.

        Its `model` is the one asked for, else the one that answered, unless another is given.
        """
        return self.response_from(responses_create_params, chat_completion, model)

    def chat_completion_to_responses_create_params(
        self, chat_completion_create_params: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymResponseCreateParamsNonStreaming:
        """The Responses request that asks the same as a Chat Completions request."""
        return self.request_from(set_fields(chat_completion_create_params))

    def postprocess_chat_response(self, choice: NeMoGymChoice) -> list[NeMoGymResponseOutputItem]:
        """The output items of one choice."""
        return self.postprocess_assistant_message_dict(choice.message.model_dump(exclude_none=True))

    def postprocess_assistant_message_dict(self, message_dict: Mapping[str, Any]) -> list[NeMoGymResponseOutputItem]:
        """The output items of one assistant message."""
        return self.items_of_message(message_dict)

    def chat_completions_messages_to_responses_items(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> list[NeMoGymResponseOutputItem]:
        """A whole chat, of whatever origin, as items of the Responses API."""
        return self.items_from(messages)

    def items_of_choice(self, choice: NeMoGymChoice) -> list[NeMoGymResponseOutputItem]:
        """The output items of one choice, by the method that programs override."""
        return self.postprocess_chat_response(choice)

    def new_id(self, prefix: str) -> str:
        """Return an id for an item or a response; programs elsewhere replace this module's `uuid4`."""
        return f"{prefix}_{uuid4().hex}"

    def read_reasoning(self, text: str) -> tuple[list[str], str]:
        """Return the reasoning in a text of the model and the rest, by the method that programs override."""
        return self._extract_reasoning_from_content(text)

    def write_reasoning(self, texts: Iterable[str]) -> str:
        """Return reasoning as text, by the method that programs override."""
        return self._wrap_reasoning_in_think_tags([*texts])

    def _extract_reasoning_from_content(self, content: str) -> tuple[list[str], str]:
        return super().read_reasoning(content)

    def _wrap_reasoning_in_think_tags(self, texts: list[str]) -> str:
        return super().write_reasoning(texts)


VLLMConverter = ResponsesConverter


class ResponsesConverterState(BaseModel):
    """Chat messages in the making, for programs that gather them by hand: those done, and the one being gathered."""

    return_token_id_information: bool
    messages: list[Any] = Field(default_factory=list)
    content_buffer: str = ""
    tool_calls_buffer: list[Any] = Field(default_factory=list)
    assistant_item_buffered: bool = False
    """An assistant item was met: then there is a message, if only an empty one."""
    token_information: TokenIDLogProbMixin | None = None

    def flush_assistant(self) -> None:
        """Make a message of what was gathered, if anything was, and begin anew."""
        if self.content_buffer or self.tool_calls_buffer or self.assistant_item_buffered:
            message: dict[str, Any] = {"content": self.content_buffer or None, "role": "assistant"}
            if self.tool_calls_buffer:
                message["tool_calls"] = self.tool_calls_buffer
            if self.return_token_id_information and self.token_information is not None:
                message |= self.token_information.model_dump(exclude_none=True)
            self.messages.append(message)
        self.content_buffer, self.tool_calls_buffer = "", []
        self.assistant_item_buffered, self.token_information = False, None


VLLMConverterResponsesToChatCompletionsState = ResponsesConverterState


class SplitItems(NamedTuple):
    """A conversation, split where the model first has a say."""

    input: list[Any]
    output: list[Any]


def split_responses_input_output_items(items: Sequence[_Item]) -> SplitItems:
    """Split before the first assistant message, reasoning or call of any kind; without one, all is input."""
    for position, item in enumerate(items):
        if _is_by_model(item):
            return SplitItems(list(items[:position]), list(items[position:]))
    return SplitItems(list(items), [])


def _is_by_model(item: Any) -> bool:
    fields = item if isinstance(item, Mapping) else vars(item)
    return fields.get("role") == "assistant" or fields.get("type") in _BY_MODEL
