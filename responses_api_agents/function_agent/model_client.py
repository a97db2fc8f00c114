"""What a function gets to talk to the model: the agent's model server, with one session per rollout."""

from typing import Any

from pydantic import ValidationError

from nemo_gym.openai_utils import (
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseOutputItem,
    NeMoGymResponseUsage,
    accumulate_response_usage,
    validated_json,
)
from nemo_gym.server_utils import ServerClient, raise_for_status
from responses_api_agents.simple_agent.cookies import Cookies, merged


class ModelClient:
    """The model of one rollout."""

    def __init__(self, server_client: ServerClient, server_name: str) -> None:
        self._server_client = server_client
        self._server_name = server_name
        self._cookies: Cookies | None = None
        self.usage: NeMoGymResponseUsage | None = None
        """The tokens of all calls so far."""
        self.last_model: str | None = None
        """The name of the model that answered last."""
        self._last: NeMoGymResponse | None = None
        self._output: list[NeMoGymResponseOutputItem] = []

    async def create_response(self, **params: Any) -> NeMoGymResponse:
        """Ask the model, with the parameters of the Responses API: `input`, `instructions`, `tools`, `temperature`...

        Calls may be made at the same time.

        Raises:
            ValueError: a parameter that there is not, or a value that does not fit.
            ClientResponseError: the model server answered with an error status.
            RuntimeError: it answered with something that is no response, or that its model failed.
        """
        try:
            body = NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
        except ValidationError as error:
            raise ValueError(f"create_response(...) was called with parameters that do not fit: {error}") from error
        answer = await self._server_client.post(
            server_name=self._server_name, url_path="/v1/responses", json=body, cookies=self._cookies
        )
        await raise_for_status(answer)
        self._cookies = merged(self._cookies, answer.cookies)
        response = self._read(await answer.read())
        self.usage = accumulate_response_usage(self.usage, response.usage)
        self.last_model = response.model
        self._last = response
        self._output += response.output
        return response

    def so_far(self) -> NeMoGymResponse | None:
        """Everything the model has answered as one response; None if it has not answered."""
        if self._last is None:
            return None
        return self._last.model_copy(update={"output": self._output, "usage": self.usage})

    def _read(self, body: bytes) -> NeMoGymResponse:
        try:
            response = validated_json(NeMoGymResponse, body)
        except ValidationError as error:
            message = f"Received an invalid response from model server {self._server_name!r}: {error}"
            raise RuntimeError(message) from error
        if response.error is not None:
            raise RuntimeError(
                f"The model behind {self._server_name!r} failed: {response.error.code}: {response.error.message}"
            )
        return response
