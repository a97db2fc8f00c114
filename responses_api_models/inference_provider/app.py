"""`inference_provider`: any host that speaks OpenAI's Chat Completions API, as a model server."""

from pydantic import Field

from nemo_gym.base_responses_api_model import EndpointSettings
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_models.inference_provider.chat_endpoint import ChatEndpointConfig, ChatEndpointModel


class InferenceProviderModelConfig(ChatEndpointConfig):
    """Which host, which model."""

    base_url: str
    """Address of the API, with the version: `https://host/v1`."""
    api_key: str
    model: str
    """The model asked for, whatever a request says."""
    default_headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request to the endpoint."""


class InferenceProviderModel(ChatEndpointModel):
    """Answers through a host's Chat Completions API."""

    replicable = True

    config: InferenceProviderModelConfig

    def new_client(self) -> NeMoGymAsyncOpenAI:
        """A client with the key as bearer token."""
        return NeMoGymAsyncOpenAI(
            base_url=self.config.base_url, api_key=self.config.api_key, default_headers=self.config.default_headers
        )

    def settings(self) -> EndpointSettings:
        """As they are called in this server's config."""
        config = self.config
        return EndpointSettings(config.name, config.base_url, config.model, "base_url", "api_key", "model")


if __name__ == "__main__":
    InferenceProviderModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = InferenceProviderModel.run_webserver()
