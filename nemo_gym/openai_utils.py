"""PUBLIC: the types of OpenAI's Responses and Chat Completions APIs, importable from one place.

`NeMoGymAsyncOpenAI`, the client that speaks them, and what reads its answers are loaded when they are
first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nemo_gym.schemas.openai_chat import (
    NeMoGymChatCompletion,
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
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionCustomToolParam,
    NeMoGymChatCompletionDeveloperMessageParam,
    NeMoGymChatCompletionMessage,
    NeMoGymChatCompletionMessageCustomToolCall,
    NeMoGymChatCompletionMessageCustomToolCallParam,
    NeMoGymChatCompletionMessageForTraining,
    NeMoGymChatCompletionMessageParam,
    NeMoGymChatCompletionMessageToolCall,
    NeMoGymChatCompletionMessageToolCallFunctionParam,
    NeMoGymChatCompletionMessageToolCallParam,
    NeMoGymChatCompletionMessageToolCallUnion,
    NeMoGymChatCompletionMessageToolCallUnionParam,
    NeMoGymChatCompletionSystemMessageParam,
    NeMoGymChatCompletionToolMessageParam,
    NeMoGymChatCompletionToolParam,
    NeMoGymChatCompletionToolUnionParam,
    NeMoGymChatCompletionUserMessageParam,
    NeMoGymChoice,
    NeMoGymCompletionTokensDetails,
    NeMoGymCompletionUsage,
    NeMoGymCustom,
    NeMoGymFunction,
    NeMoGymFunctionDefinition,
    NeMoGymPromptTokensDetails,
)
from nemo_gym.schemas.openai_items import (
    RESPONSES_TO_TRAIN,
    NeMoGymEasyInputMessage,
    NeMoGymEasyInputMessageForTraining,
    NeMoGymFunctionCallOutput,
    NeMoGymHostedToolItem,
    NeMoGymMessage,
    NeMoGymMessageForTraining,
    NeMoGymReasoningText,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseInput,
    NeMoGymResponseInputAudio,
    NeMoGymResponseInputFile,
    NeMoGymResponseInputImage,
    NeMoGymResponseInputItem,
    NeMoGymResponseInputPart,
    NeMoGymResponseInputText,
    NeMoGymResponseInputVideo,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseOutputPart,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseReasoningItemForTraining,
    NeMoGymSummary,
    training_variant_of,
)
from nemo_gym.schemas.openai_responses import (
    NeMoGymFunctionToolParam,
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseError,
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseUsage,
    accumulate_response_usage,
)
from nemo_gym.schemas.token_lists import with_lists_beside
from nemo_gym.schemas.wire import (
    REQUIRED_TOKEN_FIELDS,
    TOKEN_FIELDS,
    ListsBeside,
    RoutedExperts,
    TokenIDLogProbMixin,
    TokenIDLogProbTypedDictMixin,
)

if TYPE_CHECKING:
    from nemo_gym.http.model_answers import JsonObject, validated_json
    from nemo_gym.http.model_endpoint import RATE_LIMIT_ERROR_CODES, RETRY_ERROR_CODES, NeMoGymAsyncOpenAI

__all__ = [
    "RATE_LIMIT_ERROR_CODES",
    "REQUIRED_TOKEN_FIELDS",
    "REQUIRED_TOKEN_METADATA_FIELDS",
    "RESPONSES_TO_TRAIN",
    "RETRY_ERROR_CODES",
    "TOKEN_METADATA_FIELDS",
    "JsonObject",
    "ListsBeside",
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
    "NeMoGymChatCompletionContentPartVideoUrlParam",
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
    "NeMoGymChatCompletionOutputMessage",
    "NeMoGymChatCompletionSystemMessageParam",
    "NeMoGymChatCompletionToolMessageParam",
    "NeMoGymChatCompletionToolParam",
    "NeMoGymChatCompletionToolUnionParam",
    "NeMoGymChatCompletionUserMessageParam",
    "NeMoGymChoice",
    "NeMoGymCompletionTokensDetails",
    "NeMoGymCompletionUsage",
    "NeMoGymContent",
    "NeMoGymCustom",
    "NeMoGymEasyInputMessage",
    "NeMoGymEasyInputMessageForTraining",
    "NeMoGymFunction",
    "NeMoGymFunctionCallOutput",
    "NeMoGymFunctionDefinition",
    "NeMoGymFunctionToolParam",
    "NeMoGymHostedToolItem",
    "NeMoGymIncompleteDetails",
    "NeMoGymInputVideoPart",
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
    "NeMoGymResponseInputContentList",
    "NeMoGymResponseInputContentPart",
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
    "RoutedExperts",
    "TokenIDLogProbMixin",
    "TokenIDLogProbTypedDictMixin",
    "accumulate_response_usage",
    "training_variant_of",
    "validated_json",
    "with_lists_beside",
]

REQUIRED_TOKEN_METADATA_FIELDS = frozenset(REQUIRED_TOKEN_FIELDS)
TOKEN_METADATA_FIELDS = frozenset(TOKEN_FIELDS)
NeMoGymContent = NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal
NeMoGymInputVideoPart = NeMoGymResponseInputVideo
NeMoGymResponseInputContentPart = NeMoGymResponseInputPart
NeMoGymResponseInputContentList = list[NeMoGymResponseInputPart]
NeMoGymChatCompletionOutputMessage = NeMoGymChatCompletionMessage | NeMoGymChatCompletionMessageForTraining
NeMoGymChatCompletionContentPartVideoUrlParam = NeMoGymChatCompletionContentPartVideoURLParam

_CLIENT = "nemo_gym.http.model_endpoint"
_ANSWERS = "nemo_gym.http.model_answers"
_LAZY = {
    "JsonObject": _ANSWERS,
    "NeMoGymAsyncOpenAI": _CLIENT,
    "RATE_LIMIT_ERROR_CODES": _CLIENT,
    "RETRY_ERROR_CODES": _CLIENT,
    "validated_json": _ANSWERS,
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
