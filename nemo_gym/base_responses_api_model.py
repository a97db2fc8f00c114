"""PUBLIC: what a model server is built from: the Responses and the Chat Completions API."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Body, FastAPI

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.servers.base import BaseServer, SimpleServer

__all__ = ["BaseResponsesAPIModel", "BaseResponsesAPIModelConfig", "Body", "SimpleResponsesAPIModel"]


class BaseResponsesAPIModelConfig(BaseRunServerInstanceConfig):
    """Config of a model server; authors add their own fields."""


class BaseResponsesAPIModel(BaseServer):
    """A server that answers for a model."""

    config: BaseResponsesAPIModelConfig


class SimpleResponsesAPIModel(BaseResponsesAPIModel, SimpleServer):
    """What authors of model servers subclass."""

    config: BaseResponsesAPIModelConfig

    def setup_webserver(self) -> FastAPI:
        """The app with the standard routes."""
        app = self.new_app()
        app.post("/v1/chat/completions")(self.chat_completions)
        app.post("/v1/responses")(self.responses_handler())
        return app

    def responses_handler(self) -> Callable[..., Awaitable[Any]]:
        """What serves `/v1/responses`: `responses`, unless a class has a cheaper way to the same answer."""
        return self.responses

    @abstractmethod
    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer a Chat Completions request."""

    @abstractmethod
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer a Responses request."""
