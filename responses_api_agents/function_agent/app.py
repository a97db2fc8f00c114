"""`function_agent`: an agent that is one Python function, `async def run(row, model)`.

The function gets the row and a client of the model, and returns the answer: a text, or a response of the model. The
environment scores it like any other agent's.
"""

import asyncio
import importlib
import inspect
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from fastapi import Request, Response
from pydantic import Field, PrivateAttr, ValidationError, field_validator

from nemo_gym import resolve_for_reading
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig
from nemo_gym.config_types import ConfigError, ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import keep_partial
from responses_api_agents.function_agent.model_client import ModelClient
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentRunRequest
from responses_api_agents.simple_agent.cookies import Cookies

AgentFunction = Callable[[dict[str, Any], ModelClient], Awaitable[Any]]


class FunctionAgentConfig(BaseResponsesAPIAgentConfig):
    """Which function, which model, and which environment judges it."""

    function: str
    """As `module:function`."""
    path: str | None = None
    """A folder to import the module from, looked up like any relative path."""
    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    timeout_s: float = Field(default=3600.0, gt=0)
    """How long one call of the function may take."""

    @field_validator("function")
    @classmethod
    def _names_both(cls, function: str) -> str:
        module, _, name = function.partition(":")
        if not module or not name:
            raise ValueError(f"function must be given as module:function, but is {function!r}")
        return function


class FunctionAgent(SimpleAgent):
    """Calls the function once per rollout."""

    config: FunctionAgentConfig  # type: ignore[assignment]
    _function: AgentFunction = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Import the function, so that mistakes show when the server starts.

        Raises:
            ConfigError: it cannot be imported, or is no `async def` with two parameters.
        """
        super().model_post_init(context)
        self._function = load_function(self.config.function, self.config.path)

    async def responses(  # type: ignore[override]
        self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        """The function's answer to a row that has nothing but this request."""
        return await self._answer({"responses_create_params": body.model_dump(mode="json", exclude_unset=True)})

    async def _attempt(self, row: SimpleAgentRunRequest, cookies: Cookies) -> tuple[NeMoGymResponse, Cookies]:
        return await self._answer(row.model_dump(mode="json", exclude_unset=True)), cookies

    async def _called(self, row: dict[str, Any], model: ModelClient) -> NeMoGymResponse:
        limit = asyncio.timeout(self.config.timeout_s)
        try:
            async with limit:
                answer = await self._function(row, model)
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"{self.config.function} took longer than timeout_s={self.config.timeout_s:g}"
            raise TimeoutError(message) from error
        return self._as_response(answer, model)

    async def _answer(self, row: dict[str, Any]) -> NeMoGymResponse:
        model = ModelClient(self.server_client, self.config.model_server.name)
        try:
            return await self._called(row, model)
        except Exception as error:
            keep_partial(error, model.so_far())
            raise

    def _as_response(self, answer: Any, model: ModelClient) -> NeMoGymResponse:
        if isinstance(answer, NeMoGymResponse):
            return answer
        if isinstance(answer, str):
            return _said(answer, model)
        if isinstance(answer, dict):
            try:
                return NeMoGymResponse.model_validate(answer)
            except ValidationError as error:
                raise ValueError(f"{self.config.function} returned a dict that is no response: {error}") from error
        raise TypeError(f"{self.config.function} must return a text or a response, not {type(answer).__name__}")


def load_function(reference: str, path: str | None) -> AgentFunction:
    """Import `module:function`.

    Raises:
        ConfigError: it cannot be imported, or is no `async def` with two parameters.
    """
    if path is not None and (folder := str(resolve_for_reading(path))) not in sys.path:
        sys.path.append(folder)
    module, _, name = reference.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        hint = "" if path else "; name its folder with `path` if it is not installed"
        raise ConfigError(f"function {reference!r} cannot be imported: {error}{hint}") from error
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{reference!r} must be a function defined with `async def`")
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise ConfigError(f"{reference!r} must take two arguments, the row and the model: {error}") from error
    return function  # type: ignore[no-any-return]


def _said(text: str, model: ModelClient) -> NeMoGymResponse:
    """A response that says `text`, with the tokens of every call the function made."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return NeMoGymResponse.model_validate(
        {
            "id": f"resp_{uuid4().hex}",
            "created_at": int(time.time()),
            "model": model.last_model or "function_agent",
            "object": "response",
            "status": "completed",
            "output": [message],
            "usage": model.usage,
        }
    )


if __name__ == "__main__":
    FunctionAgent.run_webserver()
