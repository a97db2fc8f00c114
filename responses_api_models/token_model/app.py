"""`token_model`: a model behind an engine that is prompted with token ids, so that training sees what was sampled.

Agents talk the Responses API. What the model has seen and said before is sent as the ids it was; only what is new is
written with the tokenizer's chat template. Thoughts and tool calls are read from the decoded answer, whose ids are the
engine's own. So the tokens of a rollout fit together whatever its template does with earlier turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time
from typing import Any
from uuid import uuid4

import aiohttp
from fastapi import Body, Request
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
    CHAT_TEMPLATE_KWARGS,
    EXTRA_BODY,
    PROMPT_DIGEST,
    ResponsesConverter,
    UnusableRequestError,
    empty_completion,
    is_too_long,
    object_in_metadata,
    only_text,
    set_fields,
    tags_as_fields,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.config import TokenModelConfig
from responses_api_models.token_model.engines import ENGINES, Generation, sampling_of
from responses_api_models.token_model.parsers import TOOL_PARSERS, read_answer
from responses_api_models.token_model.pausing import whole_generation
from responses_api_models.token_model.prompts import Prompt, PromptBuilder
from responses_api_models.vllm_model.affinity import SessionAffinity

__all__ = ["TokenModel", "TokenModelConfig"]

_BESIDE_TOKENS = (PROMPT_DIGEST, "weight_versions", "weight_segments", "weight_version")


class TokenModel(PausableModel):
    """Answers through one or several engines that take token ids."""

    replicable = True

    config: TokenModelConfig
    _clients: list[NeMoGymAsyncOpenAI] = PrivateAttr()
    _converter: ResponsesConverter = PrivateAttr()
    _affinity: SessionAffinity = PrivateAttr()
    _tokenizer: ChatTokenizer = PrivateAttr()
    _prompts: PromptBuilder = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make a client for every engine, and read the tokenizer."""
        super().model_post_init(context)
        config = self.config
        self._clients = [
            self.paced(NeMoGymAsyncOpenAI(base_url=url, api_key=config.api_key, default_headers=config.default_headers))
            for url in config.base_url
        ]
        self._converter = ResponsesConverter(
            return_token_id_information=True, uses_reasoning_parser=config.reasoning_parser is not None
        )
        self._affinity = SessionAffinity(config.session_ttl_s)
        self._tokenizer = ChatTokenizer(config.tokenizer, config.end_of_turn)
        self._prompts = PromptBuilder(self._tokenizer)

    def asked_endpoints(self) -> Sequence[Endpoint]:
        """Every one that is configured."""
        return [self._endpoint(number) for number in range(len(self._clients))]

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        """Answer a Responses request."""
        params = self._converter.responses_to_chat_completion_create_params(body)
        completion = await self.chat_completions(request, params)
        response = self._converter.chat_completion_to_response(body, completion, model=self.config.model)
        message = completion.choices[0].message
        for name in _BESIDE_TOKENS:
            value = getattr(message, name, None)
            if value is not None:
                setattr(response.output[-1], name, value)
        return response

    async def chat_completions(  # type: ignore[override]
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer a Chat Completions request; reasoning stands in think blocks before the text."""
        chat = self._chat_request(set_fields(body))
        sampling = self._sampling(chat)
        prompt = self._prompts.prompt(chat)
        room = None if self.config.max_model_len is None else self.config.max_model_len - len(prompt.ids)
        if room is not None and room < 1:
            return self._nothing_said()
        if room is not None:
            sampling["max_tokens"] = min(room, sampling["max_tokens"] or room)
        engine = ENGINES[self.config.engine]
        with self._endpoint_of(request) as endpoint, errors_explained(endpoint.settings):
            post = getattr(endpoint.client, engine.method)

            async def ask(ids: list[int], limit: int | None) -> Generation:
                request = engine.request(ids, {**sampling, "max_tokens": limit}, self.config.model)
                return engine.read(await post(**request), ids)

            try:
                generation, weights = await whole_generation(self.gate, ask, prompt.ids, sampling["max_tokens"])
            except aiohttp.ClientResponseError as error:
                if not is_too_long(error):
                    raise
                return self._nothing_said()
        completion = self._completion(chat, prompt, generation, weights)
        return validated_answer(NeMoGymChatCompletion, completion, endpoint.settings)

    def _chat_request(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request as the chat template is to see it."""
        metadata = body.get("metadata")
        messages = []
        for number, message in enumerate(body["messages"]):
            if message.get("content") is not None and not only_text(message["content"]):
                raise UnusableRequestError(f"message {number} has more than text, which token_model cannot write")
            if message.get("content") is None:
                message = {**message, "content": ""}  # what templates do with null differs
            if self.config.replace_developer_role_with_system and message["role"] == "developer":
                message = {**message, "role": "system"}
            if self.config.reasoning_parser is not None:
                message = tags_as_fields(message, keep_reasoning=True)
            messages.append(message)
        kwargs = {**(self.config.chat_template_kwargs or {}), **object_in_metadata(metadata, CHAT_TEMPLATE_KWARGS)}
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        return {**body, "messages": messages, "tools": tools, "chat_template_kwargs": kwargs}

    def _sampling(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        given = {**(self.config.extra_body or {}), **object_in_metadata(chat.get("metadata"), EXTRA_BODY)}
        if chat.get("response_format") is not None:
            given["response_format"] = chat["response_format"]
        return {**given, **sampling_of(chat), **(self.config.sampling_overrides or {})}

    def _completion(
        self, chat: Mapping[str, Any], prompt: Prompt, generation: Generation, weights: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The Chat Completions answer that a generation amounts to."""
        functions = [tool["function"] for tool in chat.get("tools") or () if "function" in tool]
        tools = {function["name"]: function.get("parameters") for function in functions}
        said = self._said(generation.token_ids, chat.get("stop"))
        parser = TOOL_PARSERS[self.config.tool_parser] if tools and self.config.tool_parser else None
        has_reasoning = self.config.reasoning_parser is not None
        message = read_answer(
            said, parser=parser, tools=tools, is_open=prompt.opens_reasoning, has_reasoning=has_reasoning
        )
        if message["content"]:
            message["content"] = self._tokenizer.without_special(message["content"])
        message |= {
            "prompt_token_ids": prompt.ids,
            "generation_token_ids": generation.token_ids,
            "generation_log_probs": generation.log_probs,
            PROMPT_DIGEST: prompt.digest,
            **weights,
        }
        counts = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(generation.token_ids)}
        is_call = bool(message.get("tool_calls")) and generation.finish_reason != "length"
        choice = {
            "index": 0,
            "finish_reason": "tool_calls" if is_call else generation.finish_reason,
            "message": message,
        }
        return {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion",
            "created": int(time()),
            "model": self.config.model,
            "choices": [choice],
            "usage": {
                **counts,
                "total_tokens": sum(counts.values()),
                "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
            },
        }

    def _said(self, ids: Sequence[int], stop: str | Sequence[str] | None) -> str:
        """The text of an answer without the end of its turn, up to the text that it was to stop at."""
        ends, length = set(self._tokenizer.ends.values()), len(ids)
        while length and ids[length - 1] in ends:
            length -= 1
        text = self._tokenizer.decode(ids[:length])
        for each in [stop] if isinstance(stop, str) else stop or ():
            text = text.partition(each)[0]
        return text

    def _nothing_said(self) -> NeMoGymChatCompletion:
        return empty_completion(self.config.model, "length", int(time()))

    @contextmanager
    def _endpoint_of(self, request: Request) -> Iterator[Endpoint]:
        """The engine that the caller's session is bound to, which has the conversation in its prefix cache."""
        with self._affinity.endpoint_for(request.session[SESSION_ID_KEY], len(self._clients)) as number:
            yield self._endpoint(number)

    def _endpoint(self, number: int) -> Endpoint:
        config = self.config
        settings = EndpointSettings(config.name, config.base_url[number], config.model, "base_url", "api_key", "model")
        return Endpoint(self._clients[number], settings)


if __name__ == "__main__":
    TokenModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = TokenModel.run_webserver()
