"""A checkout of another nemo-gym, as far as servers are wanted from it: its own package, which must never load,
an agent with a name of ours that imports the newest names, a model server, and an environment."""

from pathlib import Path

PACKAGE = 'raise ImportError("the nemo_gym of a checkout among the search roots was imported")\n'

AGENT = """
import asyncio

from fastapi import Request
from pydantic import ConfigDict

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.global_config import OBSERVABILITY_ENABLED_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.openai_utils import (
    TOKEN_METADATA_FIELDS,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    accumulate_response_usage,
)
from nemo_gym.responses_converter import VLLMConverter, VLLMConverterResponsesToChatCompletionsState
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.rollout_observability import (
    AgentEpisode,
    AgentInvocation,
    AgentObservationBundle,
    ModelCallRef,
    ObservationGap,
    ToolCallObservation,
    TrajectoryRecord,
)
from nemo_gym.server_utils import apply_rollout_prefix, get_response_json, raise_for_status
from nemo_gym.skills import stage_skills
from responses_api_agents.simple_agent.beside import WHERE


class Config(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class RunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class VerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class NewestAgent(SimpleResponsesAPIAgent):
    config: Config

    async def responses(
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        answer = await self.server_client.post(
            server_name=self.config.model_server.name,
            url_path=self.url_path_for_request("/v1/responses", request),
            json=body,
            cookies=request.cookies,
        )
        await raise_for_status(answer)
        return NeMoGymResponse.model_validate(await get_response_json(answer))

    async def run(self, request: Request, body: RunRequest) -> VerifyResponse:
        seeded = await self.server_client.post(
            server_name=self.config.resources_server.name, url_path="/seed_session", json=body.model_dump()
        )
        await raise_for_status(seeded)
        answer = await self.server_client.post(
            server_name=self.config.name,
            url_path=self.url_path_for_run("/v1/responses", body),
            json=body.responses_create_params,
            cookies=seeded.cookies,
        )
        await raise_for_status(answer)
        verify = VerifyRequest.model_validate(body.model_dump() | {"response": await get_response_json(answer)})
        verdict = await self.server_client.post(
            server_name=self.config.resources_server.name,
            url_path=self.url_path_for_run("/verify", body) if self.rollout_id_from_run(body) else "/verify",
            json=verify.model_dump(),
            cookies=seeded.cookies,
        )
        await raise_for_status(verdict)
        told = {"agent_from": WHERE, "id_of_run": self.rollout_id_from_run(body)}
        told["model_at"] = self.resolve_model_base_url(self.config.model_server.name, told["id_of_run"])
        return VerifyResponse.model_validate(await get_response_json(verdict) | told)


if __name__ == "__main__":
    NewestAgent.run_webserver()
"""
BESIDE = 'WHERE = "the checkout"\n'

ENVIRONMENT = """
from nemo_gym.base_resources_server import (
    NEMO_GYM_MCP_METADATA_KEY,
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    NeMoGymResponse,
    ReverifyMode,
    SimpleResourcesServer,
    normalize_tool_name,
)
from nemo_gym.rollout_correlation import RolloutContextMiddleware, current_rollout_id, rollout_context


class Config(BaseResourcesServerConfig):
    REVERIFY_MODE = ReverifyMode.STATELESS


class VerifyResponse(BaseVerifyResponse):
    rollout_of_verify: str | None


class Environment(SimpleResourcesServer):
    config: Config

    async def verify(self, body: BaseVerifyRequest) -> VerifyResponse:
        return VerifyResponse(**body.model_dump(), reward=1.0, rollout_of_verify=current_rollout_id())


if __name__ == "__main__":
    Environment.run_webserver()
"""

MODEL = """
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, Body, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.rollout_correlation import current_rollout_id


class Model(SimpleResponsesAPIModel):
    config: BaseResponsesAPIModelConfig

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        raise NotImplementedError

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        part = {"type": "output_text", "text": str(current_rollout_id()), "annotations": []}
        message = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [part]}
        return NeMoGymResponse(id="r", created_at=0, model="newest", object="response", output=[message])


if __name__ == "__main__":
    Model.run_webserver()
"""


def write_checkout(root: Path, workers: int = 1) -> Path:
    """Write it below `root`; the path of its config."""
    files = {
        "nemo_gym/__init__.py": PACKAGE,
        "nemo_gym/server_utils.py": PACKAGE,
        "responses_api_agents/simple_agent/app.py": AGENT,
        "responses_api_agents/simple_agent/beside.py": BESIDE,
        "responses_api_agents/simple_agent/requirements.txt": "-e nemo-gym[dev] @ ../../\n",
        "responses_api_models/newest_model/app.py": MODEL,
        "responses_api_models/newest_model/requirements.txt": "-e nemo-gym[dev] @ ../../\n",
        "resources_servers/newest_environment/app.py": ENVIRONMENT,
        "resources_servers/newest_environment/requirements.txt": "-e nemo-gym[dev] @ ../../\n",
        "pyproject.toml": '[project]\nname = "nemo-gym"\nversion = "0.5.1"\n',
        "newest.yaml": f"""
newest_environment:
  resources_servers:
    newest_environment: {{entrypoint: app.py, domain: other}}
newest_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      num_workers: {workers}
      resources_server: {{type: resources_servers, name: newest_environment}}
      model_server: {{type: responses_api_models, name: newest_model}}
newest_model:
  responses_api_models:
    newest_model: {{entrypoint: app.py}}
ours:
  resources_servers:
    example_single_tool_call: {{entrypoint: app.py, domain: other}}
""",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "newest.yaml"
