"""`openai_model`: any OpenAI-compatible endpoint, asked through this run's own model server.

Requests go on as they came, with the configured model name and key. What a user can fix, such as a
wrong key, comes back as one sentence that names the endpoint and the setting.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.errors import GymError
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint, per_process_cap
from responses_api_models.openai_model.endpoint_errors import Settings, explained_error

_Answer = TypeVar("_Answer", bound=BaseModel)


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
    _client: NeMoGymAsyncOpenAI = PrivateAttr()
    _slots: AbstractAsyncContextManager[Any] = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make the client of the endpoint."""
        super().model_post_init(context)
        self._client = NeMoGymAsyncOpenAI(
            base_url=self.config.openai_base_url,
            api_key=self.config.openai_api_key,
            default_headers=self.config.openai_default_headers,
        )
        cap = per_process_cap(self.config.max_concurrent_requests)
        self._slots = asyncio.Semaphore(cap) if cap else nullcontext()

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:  # type: ignore[override]
        """Answer through the endpoint's `/responses`."""
        request = self._request(body)
        if self.config.drop_input_reasoning_items and isinstance(request["input"], list):
            request["input"] = [item for item in request["input"] if item.get("type") != "reasoning"]
        return self._validated(NeMoGymResponse, await self._ask(self._client.create_response, request))

    async def chat_completions(  # type: ignore[override]
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        """Answer through the endpoint's `/chat/completions`."""
        request = self._request(body)
        return self._validated(NeMoGymChatCompletion, await self._ask(self._client.create_chat_completion, request))

    def _request(self, body: BaseModel) -> dict[str, Any]:
        given = body.model_dump(exclude_unset=True)
        return {**self.config.extra_body, **given, "model": self.config.openai_model}

    async def _ask(self, call: Callable[..., Awaitable[dict[str, Any]]], request: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._slots:
                return await call(**request)
        except GymError as error:
            explained = explained_error(error, self._settings)
            if explained is None:
                raise
            raise explained from error

    def _validated(self, answer_type: type[_Answer], answer: dict[str, Any]) -> _Answer:
        try:
            return answer_type.model_validate(answer)
        except ValidationError as error:
            raise RuntimeError(
                f"The model endpoint {self._settings.base_url} answered with something that is no "
                f"{answer_type.__name__}; check {self._settings.base_url_key}. What is wrong with it: {error}"
            ) from error

    @property
    def _settings(self) -> Settings:
        return Settings(self.config.name, self.config.openai_base_url, self.config.openai_model)


if __name__ == "__main__":
    OpenAIModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = OpenAIModel.run_webserver()
