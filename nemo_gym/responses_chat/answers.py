"""What endpoints answer, made uniform: reasoning as think blocks, and prompts that no longer fit as empty answers."""

import re
from typing import Any

import aiohttp

from nemo_gym.http.endpoint_errors import EndpointSettings
from nemo_gym.openai_utils import NeMoGymChatCompletion, NeMoGymChatCompletionMessage, NeMoGymChoice
from nemo_gym.responses_chat.think_tags import fields_as_tags

_TOO_LONG = re.compile(
    r"context[ _](?:length|window)|max_tokens|max_completion_tokens|max_model_len|maximum (?:model|input|prompt) length"
    r"|prompt is too long",
    re.IGNORECASE,
)
_WRONG_PARAMETER = re.compile(
    r"unsupported[ _](?:parameter|value)|not supported|unrecognized|unexpected keyword|extra_forbidden|extra inputs",
    re.IGNORECASE,
)


def is_too_long(error: aiohttp.ClientResponseError) -> bool:
    """Whether an endpoint refused a request because prompt and answer exceed what the model can hold.

    An endpoint that merely does not know a parameter (`max_tokens` at some providers) refuses every
    request; taking that for a long conversation would turn a wrong setting into empty answers.
    """
    if error.status not in (400, 413):
        return False
    content = getattr(error, "response_content", b"")
    said = content.decode(errors="replace") if isinstance(content, bytes) else str(content)
    return bool(_TOO_LONG.search(said)) and not _WRONG_PARAMETER.search(said)


def empty_completion(model: str, finish_reason: str, created: int) -> NeMoGymChatCompletion:
    """A completion in which the model says nothing, and why."""
    return NeMoGymChatCompletion(
        id="chtcmpl-123",
        created=created,
        model=model,
        choices=[
            NeMoGymChoice(
                index=0,
                finish_reason=finish_reason,
                message=NeMoGymChatCompletionMessage(content=None, tool_calls=None),
            )
        ],
    )


def with_reasoning_in_text(
    answer: dict[str, Any], settings: EndpointSettings, *, splits_reasoning: bool
) -> dict[str, Any]:
    """`answer` with the reasoning of its first choice, if any, in a think block before the text.

    Raises:
        RuntimeError: it holds no message.
        AssertionError: there is reasoning in a field although the endpoint is said not to split it off.
    """
    choices = answer.get("choices") or ()
    if not choices or not isinstance(choices[0].get("message"), dict):
        raise RuntimeError(
            f"The model endpoint {settings.base_url} answered without a message; check {settings.base_url_key}"
        )
    message = fields_as_tags(
        choices[0]["message"],
        splits_reasoning=splits_reasoning,
        setting=f"uses_reasoning_parser of {settings.server_name}",
    )
    return {**answer, "choices": [{**choices[0], "message": message}, *choices[1:]]}
