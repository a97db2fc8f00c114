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
    UnreadAnswer,
    errors_explained,
    validated_answer,
    validated_as_it_is,
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
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint, json_answer, json_bytes, reads_only, request_json

_Answer = TypeVar("_Answer")
_CREATE_RESPONSE = NeMoGymAsyncOpenAI.create_response
_MOST_TOKENS = "max_output_tokens"


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

    @reads_only
    async def _responses_route(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Any:
        given = await self._ask(self._unread_answer(body))
        if given is None:
            return too_long_response(body, self.config.openai_model)
        if isinstance(given, UnreadAnswer):
            response = validated_as_it_is(NeMoGymResponse, given.raw)
            if response is not None:
                return json_answer(given.raw, response)
            with errors_explained(self._settings):
                given = given.read()
        response = validated_answer(NeMoGymResponse, given, self._settings)
        return json_answer(given.raw, response) if _can_be_passed_on(given) else response

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
        if type(body).model_dump is BaseModel.model_dump:  # the same, and the step saved is for every model call
            given = body.__pydantic_serializer__.to_python(body, exclude_unset=True)
        else:
            given = body.model_dump(exclude_unset=True)
        return {**self.config.extra_body, **given, "model": self.config.openai_model}

    def _unread_answer(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Awaitable[Any]:
        """What the endpoint answers, not read unless somebody has put something else in the client's place."""
        client = self._client
        if getattr(client.create_response, "__func__", None) is not _CREATE_RESPONSE:
            return client.create_response(**self._outgoing(body))
        return client.create_response_unread(self._written(body), {_MOST_TOKENS: body.max_output_tokens})

    def _written(self, body: NeMoGymResponseCreateParamsNonStreaming) -> bytes:
        """The request in JSON; if nothing but the model's name is to be added, it is that of whoever asks us."""
        if self._name_to_add is None or "model" in body.__pydantic_fields_set__:
            return json_bytes(self._outgoing(body))
        return request_json(body)[:-1] + self._name_to_add

    @cached_property
    def _name_to_add(self) -> bytes | None:
        """What follows the fields of a request; None if there is more to do, or a subclass has its own way."""
        ways = ("_outgoing", "_request")
        is_own = not all(getattr(type(self), way) is getattr(OpenAIModel, way) for way in ways)
        if is_own or self.config.extra_body or self.config.drop_input_reasoning_items:
            return None
        return b',"model":%b}' % json_bytes(self.config.openai_model)

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
