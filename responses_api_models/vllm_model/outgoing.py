"""What is changed about a chat request before it goes to vLLM."""

from typing import Any

from nemo_gym.responses_converter import (
    CHAT_TEMPLATE_KWARGS,
    EXTRA_BODY,
    UnusableRequestError,
    object_in_metadata,
    tags_as_fields,
)
from responses_api_models.vllm_model.audio import with_audio
from responses_api_models.vllm_model.config import VLLMModelConfig


def outgoing_chat_request(body: dict[str, Any], config: VLLMModelConfig) -> dict[str, Any]:
    """The request to send for `body`, which is left as it is."""
    changed = {**body, "messages": _messages(body["messages"], config), "model": config.model}
    changed |= template_settings(body.get("metadata"), config)
    if config.return_token_id_information:
        changed |= {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
        if config.request_prompt_and_generation_token_ids:
            changed["return_token_ids"] = True
    changed = {**extra_fields(body.get("metadata"), config), **changed}
    changed = with_audio(changed, config.audio_root) | (config.sampling_overrides or {})
    if config.return_token_id_information and changed.get("n") not in (None, 1):
        raise UnusableRequestError(
            f"n is {changed['n']!r}: token ids are returned for one answer at a time, so n must be 1"
        )
    return changed


def template_settings(metadata: dict[str, Any] | None, config: VLLMModelConfig) -> dict[str, Any]:
    """`chat_template_kwargs`, if there are any."""
    kwargs = {**(config.chat_template_kwargs or {}), **object_in_metadata(metadata, CHAT_TEMPLATE_KWARGS)}
    return {"chat_template_kwargs": kwargs} if kwargs else {}


def extra_fields(metadata: dict[str, Any] | None, config: VLLMModelConfig) -> dict[str, Any]:
    """Fields that config and row add to a request, which wins over them."""
    return {**(config.extra_body or {}), **object_in_metadata(metadata, EXTRA_BODY)}


def ends_in_bare_reasoning(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is one of the model's that neither says anything nor calls a tool."""
    if not messages or messages[-1]["role"] != "assistant":
        return False
    return not messages[-1].get("content") and not messages[-1].get("tool_calls")


def _messages(messages: list[dict[str, Any]], config: VLLMModelConfig) -> list[dict[str, Any]]:
    if config.replace_developer_role_with_system:
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    if config.uses_reasoning_parser and not config.preserve_reasoning_in_assistant_content:
        messages = [tags_as_fields(message, keep_reasoning=config.uses_interleaved_reasoning) for message in messages]
    return messages
