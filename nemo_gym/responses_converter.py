"""PUBLIC: from the Responses API to Chat Completions and back.

A request goes through `responses_to_chat_completion_create_params`, the completion that comes back
through `chat_completion_to_response`. In between, reasoning travels as `<think>` blocks in the text of
assistant messages, and token ids of earlier turns on the messages they belong to. What the model
said in one turn survives the way there and back: reasoning, text and tool calls, to the last space.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChoice,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseOutputItem,
)
from nemo_gym.responses_chat.from_chat import items_of_assistant, items_of_messages, response_of
from nemo_gym.responses_chat.given import given_fields
from nemo_gym.responses_chat.to_chat import to_chat_request

__all__ = ["ResponsesConverter", "SplitItems", "split_responses_input_output_items"]

_Item = TypeVar("_Item")
_BY_MODEL = ("reasoning", "function_call", "custom_tool_call")


@dataclass(frozen=True)
class ResponsesConverter:
    """Translates requests one way and completions the other."""

    return_token_id_information: bool = False
    """Send the token ids of earlier turns back with them, for endpoints that continue from exactly those."""
    uses_reasoning_parser: bool = True
    """Read `<think>` blocks in what the model says as reasoning; else they stay in its text."""

    def new_id(self, prefix: str) -> str:
        """An id for an item or a response: `msg_...`, `rs_...`, `resp_...`."""
        return f"{prefix}_{uuid4().hex}"

    def responses_to_chat_completion_create_params(
        self, responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymChatCompletionCreateParamsNonStreaming:
        """The Chat Completions request that asks the same; of the request only fields that were set count.

        Raises:
            NotImplementedError: it holds something the Chat Completions API has no form for.
            ValueError: it contradicts itself.
        """
        given = given_fields(responses_create_params)
        request = to_chat_request(given, with_token_ids=self.return_token_id_information)
        return NeMoGymChatCompletionCreateParamsNonStreaming.model_construct(**request)

    def chat_completion_to_response(
        self,
        responses_create_params: NeMoGymResponseCreateParamsNonStreaming,
        chat_completion: NeMoGymChatCompletion,
        *,
        model: str,
    ) -> NeMoGymResponse:
        """The response to `responses_create_params` that the first choice of a completion amounts to."""
        return response_of(
            chat_completion,
            self.postprocess_chat_response(chat_completion.choices[0]),
            responses_create_params,
            response_id=self.new_id("resp"),
            model=model,
        )

    def postprocess_chat_response(self, choice: NeMoGymChoice) -> list[NeMoGymResponseOutputItem]:
        """The output items of one choice."""
        return self.postprocess_assistant_message_dict(choice.message.model_dump(exclude_none=True))

    def postprocess_assistant_message_dict(self, message_dict: Mapping[str, Any]) -> list[NeMoGymResponseOutputItem]:
        """The output items of one assistant message."""
        return items_of_assistant(message_dict, self.new_id, reads_think_tags=self.uses_reasoning_parser)

    def chat_completions_messages_to_responses_items(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> list[NeMoGymResponseOutputItem]:
        """A whole chat, of whatever origin, as items of the Responses API."""
        return items_of_messages(messages, self.new_id, reads_think_tags=self.uses_reasoning_parser)


class SplitItems(NamedTuple):
    """A conversation, split where the model first has a say."""

    input: list[Any]
    output: list[Any]


def split_responses_input_output_items(items: Sequence[_Item]) -> SplitItems:
    """Split before the first assistant message, reasoning or function call; without one, all is input."""
    for position, item in enumerate(items):
        if _is_by_model(item):
            return SplitItems(list(items[:position]), list(items[position:]))
    return SplitItems(list(items), [])


def _is_by_model(item: Any) -> bool:
    fields = item if isinstance(item, Mapping) else vars(item)
    return fields.get("role") == "assistant" or fields.get("type") in _BY_MODEL
