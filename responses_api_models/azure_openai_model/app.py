"""`azure_openai_model`: a deployment of Azure OpenAI as a model server.

Azure's addresses name the deployment, its key travels in a header of its own, and every request says
which version of the API it means.
"""

from urllib.parse import quote

from pydantic import Field

from nemo_gym.base_responses_api_model import EndpointSettings
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_models.inference_provider.chat_endpoint import ChatEndpointConfig, ChatEndpointModel


class AzureOpenAIModelServerConfig(ChatEndpointConfig):
    """Which resource, which deployment."""

    openai_base_url: str
    """Address of the resource, such as `https://name.openai.azure.com`; one with the deployment in it, or one that
    ends in `/v1`, is used as it is."""
    openai_api_key: str
    openai_model: str
    """Name of the deployment."""
    default_query: dict[str, str] = Field(default_factory=dict)
    """Query parameters of every request: `api-version`."""
    default_headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request."""
    num_concurrent_requests: int | None = Field(default=8, ge=1)
    """Requests at the same time, over all processes of this server; of this and `max_concurrent_requests` the lower."""


class AzureClient(NeMoGymAsyncOpenAI):
    """A client whose key is not a bearer token: Azure takes those for tokens of Entra ID."""

    def auth_headers(self) -> dict[str, str]:
        """The key in Azure's own header."""
        return {"api-key": self.api_key}


class AzureOpenAIModelServer(ChatEndpointModel):
    """Answers through a deployment's Chat Completions API."""

    replicable = True

    config: AzureOpenAIModelServerConfig

    def new_client(self) -> NeMoGymAsyncOpenAI:
        """A client of the deployment."""
        config = self.config
        return AzureClient(
            base_url=deployment_url(config.openai_base_url, config.openai_model),
            api_key=config.openai_api_key,
            default_headers=config.default_headers,
            default_query=config.default_query,
        )

    def settings(self) -> EndpointSettings:
        """As they are called in this server's config."""
        return EndpointSettings(self.config.name, self.config.openai_base_url, self.config.openai_model)


def deployment_url(base_url: str, deployment: str) -> str:
    """Where the API of a deployment begins."""
    root = base_url.rstrip("/")
    if "/deployments/" in root or root.endswith("/v1"):
        return root
    return f"{root.removesuffix('/openai')}/openai/deployments/{quote(deployment, safe='')}"


if __name__ == "__main__":
    AzureOpenAIModelServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = AzureOpenAIModelServer.run_webserver()
