"""PUBLIC: the types of OpenAI's Responses and Chat Completions APIs, importable from one place.

`NeMoGymAsyncOpenAI`, the client that speaks them, is loaded when it or one of its constants
is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nemo_gym.schemas.openai_chat import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionMessage,
    NeMoGymChatCompletionMessageCustomToolCall,
    NeMoGymChatCompletionMessageForTraining,
    NeMoGymChatCompletionMessageToolCall,
    NeMoGymChatCompletionMessageToolCallUnion,
    NeMoGymChoice,
    NeMoGymCompletionTokensDetails,
    NeMoGymCompletionUsage,
    NeMoGymCustom,
    NeMoGymFunction,
    NeMoGymPromptTokensDetails,
)
from nemo_gym.schemas.openai_chat_messages import (
    NeMoGymChatCompletionAssistantMessageForTrainingParam,
    NeMoGymChatCompletionAssistantMessageParam,
    NeMoGymChatCompletionContentPartAudioURLParam,
    NeMoGymChatCompletionContentPartFileParam,
    NeMoGymChatCompletionContentPartImageParam,
    NeMoGymChatCompletionContentPartInputAudioParam,
    NeMoGymChatCompletionContentPartParam,
    NeMoGymChatCompletionContentPartRefusalParam,
    NeMoGymChatCompletionContentPartTextParam,
    NeMoGymChatCompletionContentPartVideoURLParam,
    NeMoGymChatCompletionCustomToolParam,
    NeMoGymChatCompletionDeveloperMessageParam,
    NeMoGymChatCompletionMessageCustomToolCallParam,
    NeMoGymChatCompletionMessageParam,
    NeMoGymChatCompletionMessageToolCallFunctionParam,
    NeMoGymChatCompletionMessageToolCallParam,
    NeMoGymChatCompletionMessageToolCallUnionParam,
    NeMoGymChatCompletionSystemMessageParam,
    NeMoGymChatCompletionToolMessageParam,
    NeMoGymChatCompletionToolParam,
    NeMoGymChatCompletionToolUnionParam,
    NeMoGymChatCompletionUserMessageParam,
    NeMoGymFunctionDefinition,
)
from nemo_gym.schemas.openai_content import (
    NeMoGymReasoningText,
    NeMoGymResponseInputAudio,
    NeMoGymResponseInputFile,
    NeMoGymResponseInputImage,
    NeMoGymResponseInputPart,
    NeMoGymResponseInputText,
    NeMoGymResponseInputVideo,
    NeMoGymResponseOutputPart,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymSummary,
)
from nemo_gym.schemas.openai_item_union import (
    NeMoGymResponseInput,
    NeMoGymResponseInputItem,
    NeMoGymResponseOutputItem,
    training_variant_of,
)
from nemo_gym.schemas.openai_items import (
    RESPONSES_TO_TRAIN,
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
from nemo_gym.schemas.openai_responses import (
    NeMoGymFunctionToolParam,
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseError,
)
from nemo_gym.schemas.openai_usage import (
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseUsage,
    accumulate_response_usage,
)
from nemo_gym.schemas.token_ids import (
    TokenIDLogProbMixin,
    TokenIDLogProbTypedDictMixin,
)

if TYPE_CHECKING:
    from nemo_gym.http.openai_client import RATE_LIMIT_ERROR_CODES, RETRY_ERROR_CODES, NeMoGymAsyncOpenAI

__all__ = [
    "RATE_LIMIT_ERROR_CODES",
    "RESPONSES_TO_TRAIN",
    "RETRY_ERROR_CODES",
    "NeMoGymAsyncOpenAI",
    "NeMoGymChatCompletion",
    "NeMoGymChatCompletionAssistantMessageForTrainingParam",
    "NeMoGymChatCompletionAssistantMessageParam",
    "NeMoGymChatCompletionContentPartAudioURLParam",
    "NeMoGymChatCompletionContentPartFileParam",
    "NeMoGymChatCompletionContentPartImageParam",
    "NeMoGymChatCompletionContentPartInputAudioParam",
    "NeMoGymChatCompletionContentPartParam",
    "NeMoGymChatCompletionContentPartRefusalParam",
    "NeMoGymChatCompletionContentPartTextParam",
    "NeMoGymChatCompletionContentPartVideoURLParam",
    "NeMoGymChatCompletionCreateParamsNonStreaming",
    "NeMoGymChatCompletionCustomToolParam",
    "NeMoGymChatCompletionDeveloperMessageParam",
    "NeMoGymChatCompletionMessage",
    "NeMoGymChatCompletionMessageCustomToolCall",
    "NeMoGymChatCompletionMessageCustomToolCallParam",
    "NeMoGymChatCompletionMessageForTraining",
    "NeMoGymChatCompletionMessageParam",
    "NeMoGymChatCompletionMessageToolCall",
    "NeMoGymChatCompletionMessageToolCallFunctionParam",
    "NeMoGymChatCompletionMessageToolCallParam",
    "NeMoGymChatCompletionMessageToolCallUnion",
    "NeMoGymChatCompletionMessageToolCallUnionParam",
    "NeMoGymChatCompletionSystemMessageParam",
    "NeMoGymChatCompletionToolMessageParam",
    "NeMoGymChatCompletionToolParam",
    "NeMoGymChatCompletionToolUnionParam",
    "NeMoGymChatCompletionUserMessageParam",
    "NeMoGymChoice",
    "NeMoGymCompletionTokensDetails",
    "NeMoGymCompletionUsage",
    "NeMoGymCustom",
    "NeMoGymEasyInputMessage",
    "NeMoGymEasyInputMessageForTraining",
    "NeMoGymFunction",
    "NeMoGymFunctionCallOutput",
    "NeMoGymFunctionDefinition",
    "NeMoGymFunctionToolParam",
    "NeMoGymHostedToolItem",
    "NeMoGymIncompleteDetails",
    "NeMoGymMessage",
    "NeMoGymMessageForTraining",
    "NeMoGymPromptTokensDetails",
    "NeMoGymReasoningText",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "NeMoGymResponseError",
    "NeMoGymResponseFunctionToolCall",
    "NeMoGymResponseFunctionToolCallForTraining",
    "NeMoGymResponseInput",
    "NeMoGymResponseInputAudio",
    "NeMoGymResponseInputFile",
    "NeMoGymResponseInputImage",
    "NeMoGymResponseInputItem",
    "NeMoGymResponseInputPart",
    "NeMoGymResponseInputText",
    "NeMoGymResponseInputTokensDetails",
    "NeMoGymResponseInputVideo",
    "NeMoGymResponseOutputItem",
    "NeMoGymResponseOutputMessage",
    "NeMoGymResponseOutputMessageForTraining",
    "NeMoGymResponseOutputPart",
    "NeMoGymResponseOutputRefusal",
    "NeMoGymResponseOutputText",
    "NeMoGymResponseOutputTokensDetails",
    "NeMoGymResponseReasoningItem",
    "NeMoGymResponseReasoningItemForTraining",
    "NeMoGymResponseUsage",
    "NeMoGymSummary",
    "TokenIDLogProbMixin",
    "TokenIDLogProbTypedDictMixin",
    "accumulate_response_usage",
    "training_variant_of",
]

_CLIENT_NAMES = ("NeMoGymAsyncOpenAI", "RATE_LIMIT_ERROR_CODES", "RETRY_ERROR_CODES")


def __getattr__(name: str) -> Any:
    if name not in _CLIENT_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("nemo_gym.http.openai_client"), name)
