"""Azure is spoken to in its own way: the deployment in the address, the key in a header, the version in the query."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from omegaconf import OmegaConf

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import listen
from responses_api_models.azure_openai_model.app import (
    AzureOpenAIModelServer,
    AzureOpenAIModelServerConfig,
    deployment_url,
)

CONFIG = Path(__file__).parents[1] / "configs" / "azure_openai_model.yaml"


@dataclass
class Azure:
    """A resource with one deployment."""

    url: str
    requests: list[Request] = field(default_factory=list)

    async def answer(self, deployment: str, request: Request) -> JSONResponse:
        self.requests.append(request)
        if deployment != "my deployment":
            error = {"code": "DeploymentNotFound", "message": "The API deployment for this resource does not exist."}
            return JSONResponse({"error": error}, 404)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello."}}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return JSONResponse({"id": "c", "created": 7, "model": "gpt", "choices": [choice], "usage": usage})


@pytest.fixture
def azure() -> Iterator[Azure]:
    bound = listen("127.0.0.1", 0, "a test", "another port")
    azure = Azure(f"http://127.0.0.1:{bound.getsockname()[1]}")
    app = FastAPI()
    app.post("/openai/deployments/{deployment}/chat/completions", response_model=None)(azure.answer)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield azure
    server.should_exit = True
    thread.join(10)


def ask(azure: Azure, **settings: Any) -> httpx.Response:
    """The answer to a Responses request, with the shipped config."""
    policy = {"policy_base_url": azure.url, "policy_api_key": "secret", "policy_model_name": "my deployment"}
    loaded: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(CONFIG), policy), resolve=True)
    block = loaded["policy_model"]["responses_api_models"]["azure_openai_model"] | settings
    config = AzureOpenAIModelServerConfig.model_validate({**block, "name": "policy_model", "host": "h", "port": 1})
    model = AzureOpenAIModelServer(config=config, server_client=MagicMock(spec=ServerClient))

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(model.complete_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=30) as client:
            return await client.post("/v1/responses", json={"input": "hello"})

    return asyncio.run(post())


def test_a_request_reaches_the_deployment_with_key_and_version(azure: Azure) -> None:
    answer = ask(azure)

    (request,) = azure.requests
    assert dict(request.query_params) == {"api-version": "2024-10-21"}
    assert request.headers["api-key"] == "secret"
    assert "authorization" not in request.headers
    got = answer.json()
    assert got["output"][0]["content"][0]["text"] == "Hello."
    assert (got["model"], got["usage"]["total_tokens"]) == ("my deployment", 5)


def test_a_deployment_that_is_not_there_is_an_error_that_names_the_setting(azure: Azure) -> None:
    answer = ask(azure, openai_model="gone")

    assert answer.headers["x-nemo-gym-error-status"] == "404"
    assert "correct policy_model_name (openai_model of policy_model)" in answer.json()


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("https://r.openai.azure.com/", "https://r.openai.azure.com/openai/deployments/d"),
        ("https://r.openai.azure.com/openai", "https://r.openai.azure.com/openai/deployments/d"),
        ("https://h/openai/deployments/other", "https://h/openai/deployments/other"),
        ("https://r.openai.azure.com/openai/v1/", "https://r.openai.azure.com/openai/v1"),
    ],
)
def test_addresses_are_completed_as_far_as_needed(base_url: str, expected: str) -> None:
    assert deployment_url(base_url, "d") == expected
