"""A proxy is asked for its version before it is told anything, and what it answers becomes a response."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse

from nemo_gym.config_types import ConfigError
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from nemo_gym.testing import listen
from responses_api_models.litellm_model.app import LiteLLMModel, LiteLLMModelConfig

KEY = "sk-hidden"
RESPONSE = {
    "id": "resp_1",
    "created_at": 1.0,
    "model": "m",
    "object": "response",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "reasoning": {"effort": "none"},
}
COMPLETION = {
    "id": "chatcmpl-1",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "hi", "reasoning_content": "A greeting."},
        }
    ],
    "created": 1,
    "model": "m",
    "object": "chat.completion",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


class Proxy:
    """Answers as told, and remembers the headers of those who ask for its version."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.details: Any = {"litellm_version": "1.83.0"}
        self.answer: dict[str, Any] = RESPONSE
        self.status = 200
        self.headers: list[dict[str, str]] = []
        self.asked: list[dict[str, Any]] = []

    def app(self) -> FastAPI:
        app = FastAPI()

        async def details(request: Request) -> Any:
            self.headers.append(dict(request.headers))
            return (
                self.details if isinstance(self.details, RedirectResponse) else JSONResponse(self.details, self.status)
            )

        async def responses(request: Request) -> JSONResponse:
            self.asked.append(await request.json())
            return JSONResponse(self.answer)

        app.get("/health/readiness/details", response_model=None)(details)
        app.post("/v1/responses")(responses)
        return app


@pytest.fixture(scope="module")
def served() -> Iterator[Proxy]:
    bound = listen("127.0.0.1", 0, "a test", "another port")
    proxy = Proxy(f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
    server = uvicorn.Server(uvicorn.Config(proxy.app(), log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield proxy
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def proxy(served: Proxy) -> Proxy:
    url = served.url
    served.__init__(url)  # type: ignore[misc]
    return served


def model(url: str, **settings: Any) -> LiteLLMModel:
    config = LiteLLMModelConfig(
        name="policy_model",
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        openai_base_url=url,
        openai_api_key=KEY,
        openai_model="m",
        **settings,
    )
    return LiteLLMModel(config=config, server_client=MagicMock(spec=ServerClient))


def ask(server: LiteLLMModel, path: str, body: dict[str, Any]) -> httpx.Response:
    async def one() -> httpx.Response:
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
        transport = httpx.ASGITransport(server.complete_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=30) as client:
            return await client.post(path, json=body)

    return asyncio.run(one())


@pytest.mark.parametrize(
    "version", ["1.83.0", "v1.84.2", "2.0.0", "1.83.4-stable", "1.83.4-stable.patch.2", "1.83.1.post1"]
)
def test_a_proxy_that_is_new_enough_is_asked_with_its_key(proxy: Proxy, version: str) -> None:
    proxy.details = {"litellm_version": version}
    model(proxy.url).complete_app()
    assert (proxy.headers[-1]["authorization"], proxy.headers[-1]["x-litellm-key"]) == (f"Bearer {KEY}", KEY)


@pytest.mark.parametrize(
    ("details", "status", "said"),
    [
        ({"litellm_version": "1.82.9"}, 200, "is LiteLLM 1.82.9; litellm_model needs a proxy of version 1.83.0"),
        ({"litellm_version": "1.82.8"}, 200, "published to steal keys"),
        ({"litellm_version": "1.82.7.post1"}, 200, "published to steal keys"),
        ({"litellm_version": "1.84.0-rc.1"}, 200, "no released version"),
        ({"status": "healthy"}, 200, "says litellm_version None"),
        ({"litellm_version": KEY}, 200, r"says litellm_version '\*\*\*\*'"),
        ({}, 401, r"does not tell its version \(status 401\)"),
        ([], 200, "says litellm_version None"),
    ],
)
def test_another_proxy_ends_the_start_in_one_line_without_the_key(
    proxy: Proxy, details: Any, status: int, said: str
) -> None:
    proxy.details, proxy.status = details, status
    with pytest.raises(ConfigError, match=said) as caught:
        model(proxy.url).complete_app()
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert proxy.asked == []


def test_the_key_follows_no_redirection_and_nobody_answering_is_told(proxy: Proxy) -> None:
    proxy.details = RedirectResponse("/v1/models")
    with pytest.raises(ConfigError, match=r"status 307"):
        model(proxy.url).complete_app()
    with pytest.raises(ConfigError, match="does not tell its version"):
        model("http://127.0.0.1:9/v1").complete_app()


def test_who_only_replays_asks_no_proxy_but_for_a_recording(tmp_path: Path) -> None:
    server = model("http://127.0.0.1:9/v1", recording={"folder": str(tmp_path), "mode": "replay"})
    with pytest.raises(ConfigError, match="no recorded calls of this server"):
        server.complete_app()


def test_a_response_comes_back_with_the_effort_that_has_a_name(proxy: Proxy) -> None:
    answer = ask(model(proxy.url), "/v1/responses", {"input": "hello", "model": "other"}).json()
    assert answer["id"] == "resp_1"
    assert answer["reasoning"]["effort"] is None
    assert proxy.asked == [{"input": "hello", "model": "m"}]


def test_a_chat_completion_becomes_a_response(proxy: Proxy) -> None:
    proxy.answer = COMPLETION
    answer = ask(model(proxy.url), "/v1/responses", {"input": "hello"}).json()
    assert answer["object"] == "response"
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"] == "hi"
    assert answer["usage"]["total_tokens"] == 5
