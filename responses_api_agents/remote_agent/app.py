"""`remote_agent`: an agent that lives anywhere, as a part of this run.

It passes a row's request on to `<url>/v1/responses` and has the environment score what comes back. The
agent behind the URL needs to know nothing about this project: it answers one Responses request.
"""

from collections.abc import Mapping
from typing import Any

from aiohttp import ClientTimeout
from fastapi import Request, Response
from pydantic import Field, ValidationError, field_validator

from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig
from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming, validated_json
from nemo_gym.responses_converter import is_too_long, too_long_response
from nemo_gym.server_utils import ServerResponseError, raise_for_status, request
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_agents.simple_agent.cookies import Cookies, cookie_text, merged

_PATH = "/v1/responses"


class RemoteAgentConfig(BaseResponsesAPIAgentConfig):
    """Where the agent lives, and which environment judges it."""

    url: str
    """With or without `/v1` or `/v1/responses` at its end."""
    resources_server: ResourcesServerRef
    api_key: str | None = None
    """Sent as a bearer token."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """How long one answer may take."""

    @field_validator("url")
    @classmethod
    def _root_of_api(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, but is {url!r}")
        root = url.rstrip("/")
        for ending in (_PATH, "/v1"):
            root = root.removesuffix(ending)
        return root.rstrip("/")


class RemoteAgent(SimpleAgent):
    """Lets somebody else do the work."""

    replicable = True

    config: RemoteAgentConfig  # type: ignore[assignment]  # it needs no model of its own

    async def responses(  # type: ignore[override]
        self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        """What the remote agent answers, with its cookies."""
        answer, cookies = await self._respond(body, request.cookies)
        for name, value in cookies.items():
            response.set_cookie(name, cookie_text(value))
        return answer

    async def _respond(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: Cookies
    ) -> tuple[NeMoGymResponse, Cookies]:
        answer = await request(
            "POST",
            self.config.url + _PATH,
            json=params,
            cookies={name: cookie_text(value) for name, value in cookies.items()},
            headers=self._headers(),
            timeout=ClientTimeout(total=self.config.timeout_s),
        )
        try:
            await raise_for_status(answer)
        except ServerResponseError as error:
            if not is_too_long(error):
                raise
            return too_long_response(params, self.config.name), cookies
        return self._read(await answer.read()), merged(cookies, answer.cookies)

    def _headers(self) -> Mapping[str, str]:
        if self.config.api_key is None:
            return self.config.headers
        return {"Authorization": f"Bearer {self.config.api_key}", **self.config.headers}

    def _read(self, body: bytes) -> NeMoGymResponse:
        where = f"the agent behind {self.config.name!r} at {self.config.url}"
        try:
            response = validated_json(NeMoGymResponse, body)
        except ValidationError as error:
            raise RuntimeError(f"Received an invalid response from {where}: {_first_problems(error)}") from error
        if response.error is not None:
            raise RuntimeError(f"{where} failed: {response.error.code}: {response.error.message}")
        return response


def _first_problems(error: ValidationError, limit: int = 3) -> str:
    problems: list[Any] = error.errors(include_url=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems[:limit])


if __name__ == "__main__":
    RemoteAgent.run_webserver()
