"""A model server in front of one endpoint that speaks Chat Completions only.

Requests of both APIs become chat requests with the fields that were set; the completion comes back as it is, or
converted to a response. `inference_provider` and `azure_openai_model` differ in how they reach the endpoint.
"""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from time import time
from typing import Any, ClassVar

import aiohttp
from fastapi import Body
from pydantic import Field, PrivateAttr

from nemo_gym.base_responses_api_model import (
    Endpoint,
    EndpointSettings,
    Pace,
    PacedModelConfig,
    SimpleResponsesAPIModel,
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
    CHAT_TEMPLATE_KWARGS,
    EXTRA_BODY,
    ResponsesConverter,
    empty_completion,
    is_too_long,
    object_in_metadata,
    set_fields,
    tags_as_fields,
    with_reasoning_in_text,
)
from nemo_gym.server_utils import SharedSlots, per_process_cap

logger = logging.getLogger(__name__)


class ChatEndpointConfig(PacedModelConfig):
    """What can be said about any such endpoint."""

    UNRELATED_TO_ANSWERS: ClassVar[frozenset[str]] = frozenset({"default_query", "num_concurrent_requests"})

    uses_reasoning_parser: bool = False
    """The endpoint returns reasoning in a field of its own, and think blocks in its text are reasoning, too."""
    uses_interleaved_reasoning: bool = False
    """Send earlier reasoning back, in fields of its own; some endpoints want it, others refuse it."""
    uses_max_completion_tokens: bool = False
    """Call the limit of an answer `max_completion_tokens`, as some endpoints demand."""
    num_concurrent_requests: int | None = Field(default=1000, ge=1)
    """Requests to the endpoint at the same time, over all processes of this server; of this and
    `max_concurrent_requests`, the name that all model servers know, the lower holds."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Added to every request; a request's `metadata.extra_body` wins over it, and its own fields over both."""


class ChatEndpointModel(SimpleResponsesAPIModel):
    """Answers through the endpoint of a client that subclasses make."""

    config: ChatEndpointConfig
    _client: NeMoGymAsyncOpenAI = PrivateAttr()
    _converter: ResponsesConverter = PrivateAttr()
    _slots: AbstractAsyncContextManager[Any] = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make the client of the endpoint."""
        super().model_post_init(context)
        self._client = self.paced(self.new_client())
        self._converter = ResponsesConverter(uses_reasoning_parser=self.config.uses_reasoning_parser)
        cap = self.config.num_concurrent_requests if self.pacer is None else None
        if cap:
            part = per_process_cap(cap)
            logger.info("%s: at most %d requests at a time (num_concurrent_requests)", self.config.name, part)
        self._slots = SharedSlots(cap) if cap else nullcontext()

    def pace(self) -> Pace:
        """The configured one, which also keeps to the other cap."""
        pace, cap = super().pace(), self.config.num_concurrent_requests
        if not pace.is_set or cap is None:
            return pace
        return replace(pace, max_concurrent_requests=min(cap, pace.max_concurrent_requests or cap))

    @abstractmethod
    def new_client(self) -> NeMoGymAsyncOpenAI:
        """The client of the endpoint."""

    @abstractmethod
    def settings(self) -> EndpointSettings:
        """What errors name: address, model, and the keys they are set with."""

    def asked_endpoints(self) -> Sequence[Endpoint]:
        """The one that is configured."""
        return (Endpoint(self._client, self.settings()),)

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer a Responses request."""
        params = self._converter.responses_to_chat_completion_create_params(body)
        completion = await self.chat_completions(params)
        return self._converter.chat_completion_to_response(body, completion, model=self.settings().model)

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer a Chat Completions request; reasoning stands in think blocks before the text."""
        settings = self.settings()
        with errors_explained(settings):
            try:
                async with self._slots:
                    answer = await self._client.create_chat_completion(**self._outgoing(body))
            except aiohttp.ClientResponseError as error:
                if not is_too_long(error):
                    raise
                return empty_completion(settings.model, "length", int(time()))
        answer = with_reasoning_in_text(answer, settings, splits_reasoning=self.config.uses_reasoning_parser)
        return validated_answer(NeMoGymChatCompletion, answer, settings)

    def _outgoing(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> dict[str, Any]:
        given = set_fields(body)
        extra = {**self.config.extra_body, **object_in_metadata(body.metadata, EXTRA_BODY)}
        template_kwargs = object_in_metadata(body.metadata, CHAT_TEMPLATE_KWARGS)
        if template_kwargs:
            extra["chat_template_kwargs"] = {**extra.get("chat_template_kwargs", {}), **template_kwargs}
        if self.config.uses_reasoning_parser:
            keep = self.config.uses_interleaved_reasoning
            given["messages"] = [tags_as_fields(message, keep_reasoning=keep) for message in given["messages"]]
        if self.config.uses_max_completion_tokens and "max_tokens" in given:
            given.setdefault("max_completion_tokens", given.pop("max_tokens"))
        if not given.get("store"):
            given.pop("metadata", None)  # endpoints accept it with stored completions only
        return {**extra, **given, "model": self.settings().model}
