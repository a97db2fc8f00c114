"""`openai_model`: any OpenAI-compatible endpoint, asked through this run's own model server.

Requests go on as they came, with the configured model name and key. What a user can fix, such as a
wrong key, comes back as one sentence that names the endpoint and the setting.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property
from typing import Any

from pydantic import BaseModel, Field

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.http.endpoint_errors import EndpointSettings, errors_explained, validated_answer
from nemo_gym.http.openai_client import JsonObject
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint, per_process_cap
from nemo_gym.servers.routes import json_answer, reads_only


class OpenAIModelConfig(BaseResponsesAPIModelConfig):
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
    max_concurrent_requests: int | None = Field(None, ge=1)
    """Requests to the endpoint at the same time, over all processes of this server; unlimited when unset."""
    drop_input_reasoning_items: bool = False
    """Do not send earlier reasoning back, for endpoints that refuse it."""


class OpenAIModel(SimpleResponsesAPIModel):
    """Passes requests on to the endpoint and its answers back."""

    config: OpenAIModelConfig

    @cached_property  # found faster than a private attribute
    def _client(self) -> NeMoGymAsyncOpenAI:
        return NeMoGymAsyncOpenAI(
            base_url=self.config.openai_base_url,
            api_key=self.config.openai_api_key,
            default_headers=self.config.openai_default_headers,
        )

    @cached_property
    def _slots(self) -> AbstractAsyncContextManager[Any]:
        cap = per_process_cap(self.config.max_concurrent_requests)
        return asyncio.Semaphore(cap) if cap else nullcontext()

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:  # type: ignore[override]
        """Answer through the endpoint's `/responses`."""
        response, _ = await self._answered(body)
        return response

    def responses_handler(self) -> Callable[..., Awaitable[Any]]:
        """Pass answers on as they came, unless a subclass does something with them."""
        return self._responses_route if type(self).responses is OpenAIModel.responses else self.responses

    @reads_only
    async def _responses_route(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Any:
        response, answer = await self._answered(body)
        return json_answer(answer.raw, response) if isinstance(answer, JsonObject) else response

    async def _answered(self, body: NeMoGymResponseCreateParamsNonStreaming) -> tuple[NeMoGymResponse, dict[str, Any]]:
        request = self._request(body)
        if self.config.drop_input_reasoning_items and isinstance(request["input"], list):
            request["input"] = [item for item in request["input"] if item.get("type") != "reasoning"]
        answer = await self._ask(self._client.create_response, request)
        return validated_answer(NeMoGymResponse, answer, self._settings), answer

    async def chat_completions(  # type: ignore[override]
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        """Answer through the endpoint's `/chat/completions`."""
        request = self._request(body)
        answer = await self._ask(self._client.create_chat_completion, request)
        return validated_answer(NeMoGymChatCompletion, answer, self._settings)

    def _request(self, body: BaseModel) -> dict[str, Any]:
        given = body.model_dump(exclude_unset=True)
        return {**self.config.extra_body, **given, "model": self.config.openai_model}

    async def _ask(self, call: Callable[..., Awaitable[dict[str, Any]]], request: dict[str, Any]) -> dict[str, Any]:
        with errors_explained(self._settings):
            async with self._slots:
                return await call(**request)

    @cached_property
    def _settings(self) -> EndpointSettings:
        return EndpointSettings(self.config.name, self.config.openai_base_url, self.config.openai_model)


if __name__ == "__main__":
    OpenAIModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = OpenAIModel.run_webserver()
