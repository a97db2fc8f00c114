"""An endpoint that behaves like vLLM, on a real port, and models that talk to it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from nemo_gym.testing import listen, use_client_settings
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

END = "<end>"


def tokens(text: str) -> list[int]:
    return list(text.encode())


@dataclass
class FakeVLLM:
    """Answers with `replies`, one after the other, the last one for ever; a token is a byte of the template's text."""

    url: str = ""
    splits_reasoning: bool = True
    max_model_len: int = 10_000
    replies: list[dict[str, Any]] = field(default_factory=lambda: [{"text": "Hello."}])
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the completion: what a broken or different endpoint would send."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/completions", response_model=None)(self.complete)
        app.post("/v1/responses", response_model=None)(self.respond)
        app.post("/tokenize", response_model=None)(self.tokenize)
        return app

    async def chat(self, request: Request) -> JSONResponse:
        body = await self._noted(request)
        prompt = self._rendered(body)
        excess = len(tokens(prompt)) + (body.get("max_tokens") or 1) - self.max_model_len
        if excess > 0:
            return refusal(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{self.max_model_len + excess} tokens. Please reduce the length of the messages."
            )
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        generated = self._turn(reply.get("reasoning"), reply.get("text"), reply.get("calls"))
        return JSONResponse(self._completion(body, prompt, generated, self._message(reply)))

    async def complete(self, request: Request) -> dict[str, Any]:
        body = await self._noted(request)
        text = self.replies[0]["text"]
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        if body.get("logprobs") is not None:
            spelled = [f"token_id:{token}" for token in tokens(text)]
            choice["logprobs"] = {"tokens": spelled, "token_logprobs": [-0.5] * len(spelled), "top_logprobs": None}
        return self._envelope("text_completion", choice)

    async def respond(self, request: Request) -> dict[str, Any]:
        body = await self._noted(request)
        part = {"type": "output_text", "text": "native", "annotations": []}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        return {"id": "resp_1", "object": "response", "created_at": 1, "model": body["model"], "output": [message]}

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.tokenized.append(body)
        ids = tokens(body["prompt"] if "prompt" in body else self._rendered(body))
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}

    async def _noted(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        return body

    def _rendered(self, body: dict[str, Any]) -> str:
        """The chat template: what a model wrote is rendered exactly as it wrote it."""
        kwargs = json.dumps(body.get("chat_template_kwargs") or {}, sort_keys=True)
        rendered = f"{kwargs}{json.dumps(body.get('tools'))}"
        for message in body["messages"]:
            content = message.get("content")
            text = content if isinstance(content, str) or content is None else json.dumps(content)
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            turn = self._turn(message.get("reasoning_content"), text, calls)
            rendered += f"<{message['role']}>{turn}"
        return f"{rendered}<assistant>"

    def _turn(self, reasoning: str | None, text: str | None, calls: list[dict[str, str]] | None) -> str:
        thought = f"<think>{reasoning}</think>" if reasoning else ""
        written = "".join(f"[{call['name']} {call['arguments']}]" for call in calls or ())
        return f"{thought}{text or ''}{written}{END}"

    def _message(self, reply: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.get("text"),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning_content": None,
        }
        if self.splits_reasoning:
            message["reasoning_content"] = reply.get("reasoning")
        elif reply.get("reasoning"):
            message["content"] = f"<think>{reply['reasoning']}</think>{reply.get('text') or ''}"
        for number, call in enumerate(reply.get("calls") or ()):
            call_id = f"call_{len(self.requests)}_{number}"
            message["tool_calls"].append({"id": call_id, "type": "function", "function": call})
        return message

    def _completion(self, body: dict[str, Any], prompt: str, generated: str, message: dict[str, Any]) -> dict[str, Any]:
        ids = tokens(generated)
        finish_reason = "tool_calls" if message["tool_calls"] else "stop"
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        if body.get("logprobs"):
            as_ids = body.get("return_tokens_as_token_ids")
            spelled = [f"token_id:{token}" if as_ids else chr(token) for token in ids]
            choice["logprobs"] = {"content": [_log_prob(token, at) for at, token in enumerate(spelled)]}
        completion = self._envelope("chat.completion", {**choice, "stop_reason": None})
        if body.get("return_token_ids"):
            completion["prompt_token_ids"] = tokens(prompt)
            choice = completion["choices"][0]
            choice["token_ids"] = ids
        return completion | self.changes

    def _envelope(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{len(self.requests)}",
            "object": kind,
            "created": 1753000000,
            "model": "served-name",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {"prompt_tokens": 20, "total_tokens": 26, "completion_tokens": 6, "prompt_tokens_details": None},
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }


def _log_prob(token: str, position: int) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5 * position, "bytes": None, "top_logprobs": []}


def refusal(message: str) -> JSONResponse:
    return JSONResponse(
        {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}, 400
    )


@pytest.fixture(autouse=True)
def _settings_of_one_test() -> Iterator[None]:
    """Settings of the HTTP client end with the test that chose them."""
    yield
    use_client_settings(None)


@pytest.fixture
def serve() -> Iterator[Callable[[FastAPI], str]]:
    """Serve an app on a free port and return its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: FastAPI) -> str:
        bound = listen("127.0.0.1", 0, "a test", "another port")
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def start_vllm(serve: Callable[[FastAPI], str]) -> Callable[..., FakeVLLM]:
    def start(**settings: Any) -> FakeVLLM:
        fake = FakeVLLM(**settings)
        fake.url = f"{serve(fake.app())}/v1"
        return fake

    return start


@pytest.fixture
def make_model() -> Callable[..., VLLMModel]:
    def make(base_url: Any, model_class: type[VLLMModel] = VLLMModel, **settings: Any) -> VLLMModel:
        given: dict[str, Any] = {"return_token_id_information": False, "uses_reasoning_parser": True, **settings}
        config = VLLMModelConfig(
            name="policy_model",
            host="127.0.0.1",
            port=1,
            entrypoint="app.py",
            base_url=base_url,
            api_key="sk-right",
            model="configured-model",
            **given,
        )
        return model_class(config=config, server_client=MagicMock(spec=ServerClient))

    return make


@pytest.fixture
def post() -> Callable[..., list[httpx.Response]]:
    def post_all(
        model: VLLMModel, *bodies: Any, path: str = "/v1/responses", **http_settings: Any
    ) -> list[httpx.Response]:
        """The answers of the model's app to `bodies`, one after the other in one session."""

        async def ask() -> list[httpx.Response]:
            set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig(**http_settings))
            transport = httpx.ASGITransport(model.complete_app())
            async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=30) as client:
                return [await client.post(path, json=body) for body in bodies]

        return asyncio.run(ask())

    return post_all


@pytest.fixture
def respond(post: Callable[..., list[httpx.Response]]) -> Callable[[VLLMModel, Any], dict[str, Any]]:
    def respond_to(model: VLLMModel, body: Any) -> dict[str, Any]:
        """A response that is valid, as JSON."""
        (answer,) = post(model, body)
        assert answer.status_code == 200, answer.text
        NeMoGymResponse.model_validate_json(answer.content)
        got: dict[str, Any] = answer.json()
        return got

    return respond_to
