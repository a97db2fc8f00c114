"""`openai_model`: any OpenAI-compatible endpoint, asked through this run's own model server.

Requests go on as they came, with the configured model name and key. What a user can fix, such as a
wrong key, comes back as one sentence that names the endpoint and the setting.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from time import time
from typing import Any, TypeGuard, TypeVar

import aiohttp
from pydantic import BaseModel, Field

from nemo_gym.base_responses_api_model import (
    Endpoint,
    EndpointSettings,
    PacedModelConfig,
    SimpleResponsesAPIModel,
    errors_explained,
    validated_answer,
)
from nemo_gym.openai_utils import (
    JsonObject,
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.responses_converter import empty_completion, is_too_long, too_long_response
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint, json_answer

_Answer = TypeVar("_Answer")


class OpenAIModelConfig(PacedModelConfig):
    """Which endpoint, which model, and what to add to every request."""

    openai_base_url: str
    """Address of the API, with the version: `https://host/v1`."""
    openai_api_key: str
    openai_model: str
    """The model asked for, whatever a request says."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Added to every request; fields of the request itself win."""
    openai_default_headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request to the endpoint."""
    drop_input_reasoning_items: bool = False
    """Do not send earlier reasoning back, for endpoints that refuse it."""


class OpenAIModel(SimpleResponsesAPIModel):
    """Passes requests on to the endpoint and its answers back."""

    replicable = True

    config: OpenAIModelConfig

    @cached_property  # found faster than a private attribute
    def _client(self) -> NeMoGymAsyncOpenAI:
        client = NeMoGymAsyncOpenAI(
            base_url=self.config.openai_base_url,
            api_key=self.config.openai_api_key,
            default_headers=self.config.openai_default_headers,
        )
        return self.paced(client)

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:  # type: ignore[override]
        """Answer through the endpoint's `/responses`."""
        answer = await self._ask(self._client.create_response(**self._outgoing(body)))
        if answer is None:
            return too_long_response(body, self.config.openai_model)
        return validated_answer(NeMoGymResponse, answer, self._settings)

    def asked_endpoints(self) -> Sequence[Endpoint]:
        """The one that is configured."""
        return (Endpoint(self._client, self._settings),)

    def responses_handler(self) -> Callable[..., Awaitable[Any]]:
        """Pass answers on as they came, unless a subclass does something with them."""
        return self._responses_route if type(self).responses is OpenAIModel.responses else self.responses

    async def _responses_route(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Any:
        answer = await self._ask(self._client.create_response(**self._outgoing(body)))
        if answer is None:
            return too_long_response(body, self.config.openai_model)
        response = validated_answer(NeMoGymResponse, answer, self._settings)
        return json_answer(answer.raw) if _can_be_passed_on(answer) else response

    async def chat_completions(  # type: ignore[override]
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        """Answer through the endpoint's `/chat/completions`."""
        answer = await self._ask(self._client.create_chat_completion(**self._request(body)))
        if answer is None:
            return empty_completion(self.config.openai_model, "length", int(time()))
        return validated_answer(NeMoGymChatCompletion, answer, self._settings)

    def _outgoing(self, body: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        request = self._request(body)
        if self.config.drop_input_reasoning_items and isinstance(request["input"], list):
            request["input"] = [item for item in request["input"] if item.get("type") != "reasoning"]
        return request

    def _request(self, body: BaseModel) -> dict[str, Any]:
        given = body.model_dump(exclude_unset=True)
        return {**self.config.extra_body, **given, "model": self.config.openai_model}

    async def _ask(self, made: Awaitable[_Answer]) -> _Answer | None:
        """What the endpoint answers; None when the request is longer than the model can read."""
        try:
            return await made
        except Exception as error:
            if isinstance(error, aiohttp.ClientResponseError) and is_too_long(error):
                return None
            with errors_explained(self._settings):
                raise

    @cached_property
    def _settings(self) -> EndpointSettings:
        return EndpointSettings(self.config.name, self.config.openai_base_url, self.config.openai_model)


def _can_be_passed_on(answer: dict[str, Any]) -> TypeGuard[JsonObject]:
    """Whether an endpoint's answer, which is a response, is what agents expect to the letter.

    Many endpoints tell no details of the usage, and send null for the content of reasoning.
    """
    if type(answer) is not JsonObject:
        return False
    for item in answer["output"]:
        if "content" in item and item["content"] is None:
            return False
    if "usage" not in answer or answer["usage"] is None:
        return True
    usage = answer["usage"]
    try:
        counts = usage["input_tokens_details"]["cached_tokens"], usage["output_tokens_details"]["reasoning_tokens"]
    except (KeyError, TypeError):
        return False
    return None not in counts


if __name__ == "__main__":
    OpenAIModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = OpenAIModel.run_webserver()
