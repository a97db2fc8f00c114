"""`scripted_model`: a model without weights, for trying things out, for tests and for demos.

It needs no key and no network, and answers equal requests equally. Without a script it uses the
tools it is offered and answers from what they say; a script (YAML) decides what it says, how long it
takes and what goes wrong. It speaks the Responses and the Chat Completions API, so it can also
stand in for a provider's endpoint: point `policy_base_url` at its `/v1`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, PrivateAttr

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_models.scripted_model.brain import Answer, Brain
from responses_api_models.scripted_model.broken_answers import FaultyAnswerError, answer_faultily, broken_answer
from responses_api_models.scripted_model.chat_format import completion_of
from responses_api_models.scripted_model.conversation import Conversation
from responses_api_models.scripted_model.faults import FaultPlan
from responses_api_models.scripted_model.reading import (
    UnreadableRequestError,
    conversation_of_chat,
    conversation_of_responses,
    extra_body,
)
from responses_api_models.scripted_model.responses_format import CREATED_AT, response_of
from responses_api_models.scripted_model.script import Script, load_script
from responses_api_models.scripted_model.script_faults import DisconnectFault, HangFault, StatusFault
from responses_api_models.scripted_model.tokens import VOCABULARY_SIZE, prompt_token_ids

_AnswerBody = TypeVar("_AnswerBody", bound=BaseModel)
_ANSWERLESS_FAULTS = (StatusFault, DisconnectFault, HangFault)


class ScriptedModelConfig(BaseResponsesAPIModelConfig):
    """What the model does, and what it tells."""

    script: str | dict[str, Any] | None = None
    """A YAML file, or its content; without one the model uses tools and answers from what they say."""
    model: str = "scripted_model"
    """The name in its answers."""
    return_token_id_information: bool = False
    """Attach token ids and log-probs of a toy tokenizer to every answer."""
    uses_reasoning_parser: bool = True
    """Chat Completions: reasoning in `reasoning_content`; else in think tags in the text."""


class ScriptedModel(SimpleResponsesAPIModel):
    """Answers by script."""

    replicable = True

    config: ScriptedModelConfig
    _script: Script = PrivateAttr()
    _brain: Brain = PrivateAttr()
    _faults: FaultPlan = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Load the script, so that its mistakes show when the server starts."""
        super().model_post_init(context)
        self._script, folder = load_script(self.config.script)
        self._brain = Brain(self._script, folder)
        self._faults = FaultPlan(self._script.faults)

    def is_replicable(self) -> bool:
        """Unless it counts requests, which one process must do."""
        return super().is_replicable() and not self._script.faults

    def setup_webserver(self) -> FastAPI:
        """The standard routes, and two more that clients of vLLM use."""
        app = super().setup_webserver()
        app.add_exception_handler(FaultyAnswerError, answer_faultily)
        app.get("/v1/models")(self.models)
        app.post("/tokenize")(self.tokenize)
        return app

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:  # type: ignore[override]
        """Answer a Responses request."""

        def written(answer: Answer) -> NeMoGymResponse:
            return response_of(
                answer,
                body,
                model=self.config.model,
                usage=self._script.usage,
                with_token_ids=self.config.return_token_id_information,
            )

        return await self._answered(_read(conversation_of_responses, body), written)

    async def chat_completions(  # type: ignore[override]
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        """Answer a Chat Completions request."""
        conversation = _read(conversation_of_chat, body)
        vendor_fields = {**extra_body(body.metadata), **orjson.loads(await request.body())}

        def written(answer: Answer) -> NeMoGymChatCompletion:
            return completion_of(
                answer,
                body,
                vendor_fields,
                model=self.config.model,
                usage=self._script.usage,
                with_token_ids=self.config.return_token_id_information,
                splits_reasoning=self.config.uses_reasoning_parser,
            )

        return await self._answered(conversation, written)

    async def models(self) -> dict[str, Any]:
        """The one model there is."""
        model = {"id": self.config.model, "object": "model", "created": CREATED_AT, "owned_by": "nemo_gym"}
        return {"object": "list", "data": [model]}

    async def tokenize(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> dict[str, Any]:
        """The token ids of a prompt, as vLLM's `/tokenize` tells them."""
        ids = prompt_token_ids(_read(conversation_of_chat, body))
        return {"count": len(ids), "max_model_len": VOCABULARY_SIZE, "tokens": ids}

    async def _answered(self, conversation: Conversation, written: Callable[[Answer], _AnswerBody]) -> _AnswerBody:
        """The answer in its time and wire format, unless a fault is due."""
        draws = self._brain.draws_for(conversation)
        fault = self._faults.strike(conversation, draws)
        if isinstance(fault, _ANSWERLESS_FAULTS):
            raise FaultyAnswerError(broken_answer(fault, b"", self.config.name))
        answer = self._brain.answer(conversation, draws)
        if answer.latency_s > 0:
            await asyncio.sleep(answer.latency_s)
        body = written(answer)
        if fault is not None:
            raise FaultyAnswerError(broken_answer(fault, body.model_dump_json().encode(), self.config.name))
        return body


_Body = TypeVar("_Body", bound=BaseModel)


def _read(read: Callable[[_Body], Conversation], body: _Body) -> Conversation:
    try:
        return read(body)
    except UnreadableRequestError as error:
        raise HTTPException(400, str(error)) from error


if __name__ == "__main__":
    ScriptedModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = ScriptedModel.run_webserver()
