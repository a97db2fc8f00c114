"""However an author writes the one handler of a model server, it answers in every dialect, streamed or not."""

from typing import Annotated, Any, Optional
from unittest.mock import MagicMock

import pytest
from fastapi import Body, Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import ServerClient

BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


class OwnParams(NeMoGymResponseCreateParamsNonStreaming):
    own: int = 7


def response(text: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": parts}
    return {"id": "r", "created_at": 1, "model": "any", "object": "response", "output": [message]}


def completion(text: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {"id": "c", "created": 1, "model": "any", "object": "chat.completion", "choices": [choice]}


def said(body: Any, request: Any = None) -> str:
    return f"said: {type(body).__name__} {type(request).__name__}"


class Model(SimpleResponsesAPIModel):
    config: BaseResponsesAPIModelConfig


class OwnType(Model):
    async def responses(self, body: OwnParams, request: Request) -> Any:  # type: ignore[override]
        return response(f"{said(body, request)} {body.own}")


class WithoutTypes(Model):
    def responses(self, request, body) -> Any:  # type: ignore[no-untyped-def,override]
        return response(said(body, request))


class WithoutTypeOfBody(Model):
    async def responses(self, body=Body()) -> Any:  # type: ignore[no-untyped-def]
        return response(said(body))


class MaybeRequest(Model):
    async def chat_completions(  # type: ignore[override]
        self,
        body: NeMoGymChatCompletionCreateParamsNonStreaming,
        request: Optional[Request] = None,  # noqa: UP045
    ) -> Any:
        return completion(said(body, request))


class Dictionary(Model):
    async def responses(self, body: dict[str, Any] = Body()) -> Any:  # type: ignore[override]
        return response(f"{said(body)} {'hi' in str(body['input'])}")


class AnnotatedAndNoCoroutine(Model):
    def chat_completions(  # type: ignore[override]
        self, body: Annotated[NeMoGymChatCompletionCreateParamsNonStreaming, Body()]
    ) -> Any:
        return completion(said(body))


class OfItsOwnMaking(Model):
    async def chat_completions(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> Any:  # type: ignore[override]
        return JSONResponse(completion(said(body)))


class RefusingChat(Model):
    async def chat_completions(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> Any:  # type: ignore[override]
        return JSONResponse({"error": "overloaded"}, 503)


class RefusingResponses(Model):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Any:  # type: ignore[override]
        return JSONResponse({"error": "overloaded"}, 503)


def answers_of(model: type[Model]) -> list[tuple[int, str]]:
    config = BaseResponsesAPIModelConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="any")
    with TestClient(model(config=config, server_client=MagicMock(spec=ServerClient)).complete_app()) as client:
        answers = [
            client.post(path, json={**body, "stream": is_streamed})
            for path, body in BODIES.items()
            for is_streamed in (False, True)
        ]
    return [(answer.status_code, answer.text) for answer in answers]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (OwnType, "said: OwnParams Request 7"),
        (WithoutTypes, "said: NeMoGymResponseCreateParamsNonStreaming Request"),
        (WithoutTypeOfBody, "said: NeMoGymResponseCreateParamsNonStreaming NoneType"),
        (MaybeRequest, "said: NeMoGymChatCompletionCreateParamsNonStreaming Request"),
        (Dictionary, "said: dict NoneType True"),
        (AnnotatedAndNoCoroutine, "said: NeMoGymChatCompletionCreateParamsNonStreaming NoneType"),
        (OfItsOwnMaking, "said: NeMoGymChatCompletionCreateParamsNonStreaming NoneType"),
    ],
)
def test_every_handler_answers_in_all_dialects(model: type[Model], expected: str) -> None:
    for status, text in answers_of(model):
        assert status == 200, text
        assert expected in text


@pytest.mark.parametrize("model", [RefusingChat, RefusingResponses])
def test_what_a_handler_refuses_is_refused_in_all_dialects(model: type[Model]) -> None:
    assert answers_of(model) == [(503, '{"error":"overloaded"}')] * 6
