"""`vllm_model`: a model served by vLLM, or by anything that speaks Chat Completions as vLLM does.

Agents talk the Responses API. A request is converted to a chat, sent to the endpoint that the session is
bound to, and the completion converted back: reasoning, text, tool calls, and for training the token ids
and log-probs of exactly what was sampled.

To change what is sent, subclass `VLLMModel` and override `_preprocess_chat_completion_create_params`.
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from time import time
from typing import Any
from uuid import uuid4

import aiohttp
from fastapi import Body, FastAPI, Request
from pydantic import PrivateAttr

from nemo_gym.base_responses_api_model import (
    Endpoint,
    EndpointSettings,
    PausableModel,
    errors_explained,
    validated_answer,
)
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.responses_converter import (
    ResponsesConverter,
    empty_completion,
    is_too_long,
    set_fields,
    split_responses_input_output_items,
    too_long_response,
    with_reasoning_in_text,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from responses_api_models.vllm_model.affinity import SessionAffinity
from responses_api_models.vllm_model.completions import PlainCompletions, as_chat_answer, plain_completions
from responses_api_models.vllm_model.config import VLLMModelConfig
from responses_api_models.vllm_model.interruptions import said_nothing, whole_answer, with_no_tokens
from responses_api_models.vllm_model.outgoing import (
    ends_in_bare_reasoning,
    extra_fields,
    outgoing_chat_request,
    template_settings,
)
from responses_api_models.vllm_model.token_ids import tokenize_request, with_token_ids
from responses_api_models.vllm_model.transport_log import TransportLog

logger = logging.getLogger(__name__)

__all__ = ["VLLMConverter", "VLLMModel", "VLLMModelConfig", "split_responses_input_output_items"]


class VLLMConverter(ResponsesConverter):
    """`ResponsesConverter` that asks without what vLLM's chats cannot honour, and says so once.

    Programs elsewhere replace this module's `uuid4`, or that of `nemo_gym.responses_converter`: both change its ids.
    """

    def responses_to_chat_completion_create_params(
        self, responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymChatCompletionCreateParamsNonStreaming:
        """The Chat Completions request that asks the same, without stored conversations and tools nobody offers."""
        without: dict[str, Any] = {}
        if responses_create_params.previous_response_id is not None:
            warn_once("previous_response_id is dropped: vLLM stores no conversations; send the whole one as input")
            without["previous_response_id"] = None
        if not responses_create_params.tools and responses_create_params.tool_choice not in ("auto", "none"):
            warn_once("tool_choice is dropped from requests that force a tool but offer none: add them to `tools`")
            without["tool_choice"] = "auto"
        if without:
            responses_create_params = responses_create_params.model_copy(update=without)
        return super().responses_to_chat_completion_create_params(responses_create_params)

    def new_id(self, prefix: str) -> str:
        """An id for an item or a response."""
        return super().new_id(prefix) if uuid4 is uuid.uuid4 else f"{prefix}_{uuid4().hex}"


@cache
def warn_once(text: str) -> None:
    """Say `text` in the log, the first time only: every request of a run may have the same flaw."""
    logger.warning("%s", text)


class VLLMModel(PausableModel):
    """Answers through one or several vLLM endpoints."""

    replicable = True

    config: VLLMModelConfig
    _clients: list[NeMoGymAsyncOpenAI] = PrivateAttr()
    _converter: VLLMConverter = PrivateAttr()
    _affinity: SessionAffinity = PrivateAttr()
    _completions: PlainCompletions | None = PrivateAttr(None)
    _transport_log: TransportLog = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make a client for every endpoint."""
        super().model_post_init(context)
        config = self.config
        self._clients = [
            self.paced(NeMoGymAsyncOpenAI(base_url=url, api_key=config.api_key, default_headers=config.default_headers))
            for url in config.base_url
        ]
        self._converter = VLLMConverter(
            return_token_id_information=config.return_token_id_information,
            uses_reasoning_parser=config.uses_reasoning_parser,
        )
        self._affinity = SessionAffinity(config.session_ttl_s)
        self._transport_log = TransportLog.from_environment()
        if config.use_completions_api:
            tokenizer = config.tokenizer or config.model
            self._completions = plain_completions(tokenizer if config.render_chat_template else None)

    def setup_webserver(self) -> FastAPI:
        """The standard routes; settings that do not go together are refused before the first request."""
        self.config.check_combination()
        return super().setup_webserver()

    @property
    def is_pausable(self) -> bool:
        """Whether it answers for a policy that is trained: only then token ids are returned."""
        return self.config.return_token_id_information

    def asked_endpoints(self) -> Sequence[Endpoint]:
        """Every one that is configured."""
        return [self._endpoint(number) for number in range(len(self._clients))]

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        """Answer a Responses request."""
        if self.config.is_responses_native:
            return await self._native_response(request, body)
        params = self._converter.responses_to_chat_completion_create_params(body)
        completion = await self.chat_completions(request, params)
        return self._converter.chat_completion_to_response(body, completion, model=self.config.model)

    async def chat_completions(  # type: ignore[override]
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer a Chat Completions request; reasoning stands in think blocks before the text."""
        outgoing = self._preprocess_chat_completion_create_params(request, set_fields(body))
        if not self.config.sequential_reasoning_allowed and ends_in_bare_reasoning(outgoing["messages"]):
            return self._nothing_said("content_filter")
        with self._endpoint_of(request) as endpoint, errors_explained(endpoint.settings):
            try:
                answer = await self._answer(endpoint, outgoing, request)
            except aiohttp.ClientResponseError as error:
                if not is_too_long(error):
                    raise
                return self._nothing_said("length")
        return validated_answer(NeMoGymChatCompletion, answer, endpoint.settings)

    def _preprocess_chat_completion_create_params(self, request: Request, body_dict: dict[str, Any]) -> dict[str, Any]:
        """The request to send for `body_dict`, the fields that were set. Override this to change it."""
        return outgoing_chat_request(body_dict, self.config)

    async def _native_response(
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        self.config.check_combination()
        outgoing = {
            **extra_fields(body.metadata, self.config),
            **template_settings(body.metadata, self.config),
            **set_fields(body),
            "model": self.config.model,
            **(self.config.sampling_overrides or {}),
        }
        with self._endpoint_of(request) as endpoint, errors_explained(endpoint.settings):
            try:
                answer = await self._call(endpoint, "create_response", outgoing, request)
            except aiohttp.ClientResponseError as error:
                if not is_too_long(error):
                    raise
                return too_long_response(body, self.config.model)
        return validated_answer(NeMoGymResponse, answer, endpoint.settings)

    async def _answer(self, endpoint: Endpoint, outgoing: dict[str, Any], request: Request) -> dict[str, Any]:
        """The endpoint's answer in a uniform shape, with token ids where they are wanted."""

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            answer = await self._ask(endpoint, body, request)
            answer = with_reasoning_in_text(
                answer, endpoint.settings, splits_reasoning=self.config.uses_reasoning_parser
            )
            if not self.config.return_token_id_information:
                return answer
            if said_nothing(answer):
                return with_no_tokens(answer)
            return await with_token_ids(answer, lambda: self._prompt_token_ids(endpoint, body, request))

        async def go_on(body: dict[str, Any]) -> dict[str, Any]:
            answer = as_chat_answer(await self._call(endpoint, "create_completion", body, request))
            if said_nothing(answer):
                return with_no_tokens(answer)

            async def prompt() -> list[int]:
                return body["prompt"]  # type: ignore[no-any-return]

            return await with_token_ids(answer, prompt)

        if not self.config.return_token_id_information:
            return await ask(outgoing)
        return await whole_answer(self.gate, outgoing, ask, go_on)

    async def _ask(self, endpoint: Endpoint, outgoing: dict[str, Any], request: Request) -> dict[str, Any]:
        if self._completions is None:
            return await self._call(endpoint, "create_chat_completion", outgoing, request)
        answer = await self._call(endpoint, "create_completion", self._completions.request(outgoing), request)
        return as_chat_answer(answer)

    async def _prompt_token_ids(self, endpoint: Endpoint, outgoing: dict[str, Any], request: Request) -> list[int]:
        if self._completions is not None:
            outgoing = self._completions.request(outgoing)
        answer = await self._call(endpoint, "create_tokenize", tokenize_request(outgoing), request)
        tokens: list[int] = answer["tokens"]
        return tokens

    async def _call(self, endpoint: Endpoint, method: str, body: dict[str, Any], request: Request) -> dict[str, Any]:
        call = getattr(endpoint.client, method)
        return await self._transport_log.noted(call, body, endpoint.settings.base_url, request.headers)

    def _nothing_said(self, finish_reason: str) -> NeMoGymChatCompletion:
        return empty_completion(self.config.model, finish_reason, int(time()))

    @contextmanager
    def _endpoint_of(self, request: Request) -> Iterator[Endpoint]:
        """The endpoint that the caller's session is bound to."""
        with self._affinity.endpoint_for(request.session[SESSION_ID_KEY], len(self._clients)) as number:
            yield self._endpoint(number)

    def _endpoint(self, number: int) -> Endpoint:
        config = self.config
        settings = EndpointSettings(config.name, config.base_url[number], config.model, "base_url", "api_key", "model")
        return Endpoint(self._clients[number], settings)


if __name__ == "__main__":
    VLLMModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = VLLMModel.run_webserver()
