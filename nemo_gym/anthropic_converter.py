"""PUBLIC: from the Responses API to the Anthropic Messages API and back, in both directions."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from nemo_gym.dialects.anthropic import SUPPORTED_ANTHROPIC_IMAGE_MEDIA_TYPES, AnthropicDialect
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

__all__ = ["SUPPORTED_ANTHROPIC_IMAGE_MEDIA_TYPES", "AnthropicConverter"]


class AnthropicConverter:
    """The dialect of the Messages API under the names that programs know."""

    def responses_to_anthropic(
        self,
        body: NeMoGymResponseCreateParamsNonStreaming,
        model: str,
        max_tokens: int,
        thinking: Mapping[str, Any] | None,
        thinking_budget_tokens: int | None,
        extra_body: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The Messages request that asks an endpoint the same as a Responses request; `extra_body` is added to it.

        Raises:
            ValueError: more than one of the three places says how the model is to think.
        """
        given = {
            "thinking": thinking,
            "thinking_budget_tokens": thinking_budget_tokens,
            "extra_body.thinking": extra_body.get("thinking"),
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} both say how the model is to think; give only one of them")
        if thinking_budget_tokens is not None:
            thinking = {"type": "enabled", "budget_tokens": thinking_budget_tokens}
        dialect = AnthropicDialect(model=model, max_tokens=max_tokens, thinking=thinking)
        return {**dialect.request_to(body), **extra_body}

    def anthropic_to_responses(
        self, anthropic_response: Mapping[str, Any], request_body: NeMoGymResponseCreateParamsNonStreaming, model: str
    ) -> NeMoGymResponse:
        """The response that an endpoint's message amounts to."""
        return AnthropicDialect().response_from(request_body, anthropic_response, model)

    def anthropic_request_to_responses(
        self, anthropic_body: Mapping[str, Any]
    ) -> NeMoGymResponseCreateParamsNonStreaming:
        """The Responses request that asks the same as a Messages request."""
        return AnthropicDialect().request_from(anthropic_body)

    def responses_to_anthropic_response(self, response: NeMoGymResponse, model: str) -> dict[str, Any]:
        """The message that says the same as a response."""
        return AnthropicDialect().response_to(orjson.loads(response.model_dump_json()), model)

    def anthropic_response_to_sse(self, anthropic_response: Mapping[str, Any]) -> Iterator[str]:
        """A message as the events of a stream."""
        return AnthropicDialect().events_of(anthropic_response)
