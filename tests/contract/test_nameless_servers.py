"""Tests of environments build their servers under an empty name."""

from typing import Any
from unittest.mock import MagicMock

from fastapi.testclient import TestClient

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.schemas.run_requests import BaseRunRequest
from nemo_gym.server_utils import ServerClient

NAMELESS: dict[str, Any] = {"host": "0.0.0.0", "port": 8080, "entrypoint": "", "name": ""}
RESPONSE = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": []}
ROW = {"responses_create_params": {"input": "hi"}}


class Environment(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


class Agent(SimpleResponsesAPIAgent):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(RESPONSE)

    async def run(self, body: BaseRunRequest = Body()) -> BaseVerifyResponse:
        answer = await self.responses(body.responses_create_params)
        return BaseVerifyResponse(**body.model_dump(), response=answer, reward=1.0)


class Model(SimpleResponsesAPIModel):
    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        return NeMoGymChatCompletion(id="c", created=1, model="m", object="chat.completion", choices=[])

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(RESPONSE)


def client_of(server: Any) -> TestClient:
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    return TestClient(app)


def test_servers_of_every_kind_work_under_an_empty_name() -> None:
    client = MagicMock(spec=ServerClient)
    environment = client_of(Environment(config=BaseResourcesServerConfig(**NAMELESS), server_client=client))
    agent = client_of(Agent(config=BaseResponsesAPIAgentConfig(**NAMELESS), server_client=client))
    model = client_of(Model(config=BaseResponsesAPIModelConfig(**NAMELESS), server_client=client))

    verdict = environment.post("/verify", json={**ROW, "response": RESPONSE})
    assert verdict.json()["reward"] == 1.0
    assert "Environment___" in verdict.cookies
    assert agent.post("/run", json=ROW).json()["reward"] == 1.0
    assert model.post("/v1/responses", json={"input": "hi"}).json()["id"] == "r"
    assert environment.get("/openapi.json").json()["info"]["title"] == "Environment"
    assert [one.get("/").json() for one in (environment, agent, model)] == [{"status": "ok"}] * 3
