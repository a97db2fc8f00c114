"""`simple_agent`: let a model talk and call tools until it has answered, then have the result scored.

`/v1/responses` is the conversation, `/run` a whole rollout: seed the environment's session, hold the
conversation in it, verify. Tools are the routes of the resources server; whatever they answer,
errors too, is shown to the model.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import Body, Request, Response
from pydantic import ConfigDict, Field, ValidationError

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, ModelServerRef, ResourcesServerRef
from nemo_gym.http.local_request import JSON_HEADERS
from nemo_gym.http.request import json_bytes
from nemo_gym.openai_utils import (
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
)
from nemo_gym.server_utils import ClientResponse, raise_for_status
from nemo_gym.servers.routes import json_answer
from nemo_gym.servers.session_lifetime import END_SESSION_HEADER
from responses_api_agents.simple_agent.cookies import Cookies, cookie_text, merged
from responses_api_agents.simple_agent.trajectory import NO_ACTIONABLE_OUTPUT, Trajectory
from responses_api_agents.simple_agent.verdicts import Verdict, with_response

logger = logging.getLogger(__name__)

END_SESSION_TIMEOUT_S = 5.0
_VERIFY_HEADERS = {"content-type": "application/json", END_SESSION_HEADER: "true"}


class SimpleAgentConfig(BaseResponsesAPIAgentConfig):
    """Which environment, which model, and how long to go on."""

    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    max_steps: int | None = Field(None, ge=1)
    """Model calls per rollout; unlimited when unset."""
    max_idle_turns: int = Field(3, ge=1)
    """Turns in a row without message and without tool call after which the rollout is ended."""


class SimpleAgentRunRequest(BaseRunRequest):
    """A row, with any fields its verifier wants."""

    model_config = ConfigDict(extra="allow")


class SimpleAgentVerifyRequest(BaseVerifyRequest):
    """The row and the trajectory."""

    model_config = ConfigDict(extra="allow")


class SimpleAgentVerifyResponse(BaseVerifyResponse):
    """The verdict, with whatever the verifier adds."""

    model_config = ConfigDict(extra="allow")


class SimpleAgent(SimpleResponsesAPIAgent):
    """Calls the model, runs the tools it asks for, and repeats."""

    config: SimpleAgentConfig

    async def responses(  # type: ignore[override]
        self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        """Answer with the whole trajectory: calls, tool outputs and messages in order."""
        trajectory = await self._run_steps(body, request.cookies, None)
        for name, value in {**trajectory.resources_cookies, **(trajectory.model_cookies or {})}.items():
            response.set_cookie(name, cookie_text(value))
        return trajectory.response()

    async def run(  # type: ignore[override]
        self, request: Request, body: SimpleAgentRunRequest
    ) -> SimpleAgentVerifyResponse:
        """Make one rollout of a row."""
        result = await self._rollout(request, body)
        return self._validated(result.json) if isinstance(result, Verdict) else result

    def run_handler(self) -> Callable[..., Awaitable[Any]]:
        """Pass verdicts on as they came, unless a subclass does something with them."""
        return self._run_route if type(self).run is SimpleAgent.run else self.run

    async def _run_route(self, request: Request, body: SimpleAgentRunRequest) -> Any:
        result = await self._rollout(request, body, await request.body())
        if not isinstance(result, Verdict):
            return result
        return json_answer(result.json) if result.is_scored() else self._validated(result.json)

    def _validated(self, verdict: bytes) -> SimpleAgentVerifyResponse:
        try:
            return SimpleAgentVerifyResponse.model_validate_json(verdict)
        except ValidationError as error:
            name = self.config.resources_server.name
            raise RuntimeError(f"Received an invalid verdict from resources server {name!r}: {error}") from error

    async def _rollout(
        self, request: Request, body: SimpleAgentRunRequest, as_json: bytes | None = None
    ) -> SimpleAgentVerifyResponse | Verdict:
        """One rollout of a row: the environment's verdict, or ours if it was not asked.

        `as_json` is the row as it came, if nobody has changed it since.
        """
        row: dict[str, Any] = {"data": as_json, "headers": JSON_HEADERS} if as_json else {"json": body}
        seeded = await self._post_to_environment("/seed_session", request.cookies, **row)
        await raise_for_status(seeded)
        cookies = merged(request.cookies, seeded.cookies)
        try:
            response, cookies = await self._attempt(body, cookies)
        except Exception:
            await self._end_session(cookies)
            raise
        if self.config.skip_verification:
            await self._end_session(cookies)
            return self._unverified(body, response)
        return await self._verify(as_json or json_bytes(body), response, cookies)

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:
        """The metrics of the resources server, which knows what its fields mean."""
        if self.config.skip_verification:
            return await super().aggregate_metrics(body)
        answer = await self._post_to_environment("/aggregate_metrics", None, json=body)
        await raise_for_status(answer)
        return AggregateMetrics.model_validate_json(await answer.read())

    async def _run_steps(
        self,
        params: NeMoGymResponseCreateParamsNonStreaming,
        resources_cookies: Cookies,
        model_cookies: Cookies | None,
    ) -> Trajectory:
        """Hold the conversation that `params` begin, in the sessions the cookies name."""
        trajectory = Trajectory(params, resources_cookies, model_cookies)
        while self.config.max_steps is None or trajectory.steps < self.config.max_steps:
            calls = trajectory.add_turn(await self._ask_model(trajectory))
            if trajectory.ends_with_turn(calls, self.config.max_idle_turns):
                break
            for call in calls:  # in order: tools of one session rely on it
                trajectory.add_tool_output(call, await self._call_tool(call, trajectory))
        return trajectory

    async def _ask_model(self, trajectory: Trajectory) -> NeMoGymResponse:
        name = self.config.model_server.name
        answer = await self.server_client.post(
            server_name=name,
            url_path="/v1/responses",
            json=trajectory.next_request(),
            cookies=trajectory.model_cookies,
        )
        await raise_for_status(answer)
        trajectory.model_cookies = merged(trajectory.model_cookies, answer.cookies)
        response = getattr(answer, "parsed", None)  # of a colocated server
        if type(response) is not NeMoGymResponse:
            response = _parsed(await answer.read(), f"Received an invalid response from model server {name!r}")
        if response.error is not None:
            raise RuntimeError(
                f"The model behind {name!r} failed: {response.error.code}: {response.error.message}. "
                f"It answered {response.id!r} with an error instead of an output"
            )
        return response

    async def _call_tool(self, call: NeMoGymResponseFunctionToolCall, trajectory: Trajectory) -> str:
        """What the tool says, whatever its status: the model must be able to react to errors."""
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        answer = await self._post_to_environment(
            f"/{quote(call.name, safe='/')}", trajectory.resources_cookies, json=arguments
        )
        trajectory.resources_cookies = merged(trajectory.resources_cookies, answer.cookies)
        return (await answer.read()).decode(errors="replace")

    async def _attempt(self, row: SimpleAgentRunRequest, cookies: Cookies) -> tuple[NeMoGymResponse, Cookies]:
        """What is to be verified, and the cookies of the environment's session then."""
        return await self._respond(row.responses_create_params, cookies)

    async def _respond(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: Cookies
    ) -> tuple[NeMoGymResponse, Cookies]:
        """Hold the conversation here, or through `/v1/responses` when a subclass defines what that does."""
        if type(self).responses is SimpleAgent.responses:
            trajectory = await self._run_steps(params, cookies, None)
            return trajectory.response(), trajectory.resources_cookies
        answer = await self.server_client.post(
            server_name=self.config.name, url_path="/v1/responses", json=params, cookies=cookies
        )
        await raise_for_status(answer)
        response = _parsed(await answer.read(), f"Received an invalid response from agent {self.config.name!r}")
        return response, merged(cookies, answer.cookies)

    async def _verify(self, row: bytes, response: NeMoGymResponse, cookies: Cookies) -> Verdict:
        answer = await self._post_to_environment(
            "/verify", cookies, data=with_response(row, response), headers=_VERIFY_HEADERS
        )
        await raise_for_status(answer)
        verdict = await answer.read()
        if not (stop_reason := _stop_reason(response)):
            return Verdict(verdict, getattr(answer, "parsed", None))
        return Verdict(orjson.dumps({**self._validated(verdict).model_dump(mode="json"), **stop_reason}))

    def _unverified(self, row: SimpleAgentRunRequest, response: NeMoGymResponse) -> SimpleAgentVerifyResponse:
        verdict = {"reward": self.config.skip_verification_reward, "verification_skipped": True}
        return SimpleAgentVerifyResponse.model_construct(
            **{**dict(row), "response": response, **verdict, **_stop_reason(response)}
        )

    async def _end_session(self, cookies: Cookies) -> None:
        """Tell the environment that nobody will come back; its own time limit is the fallback."""
        try:
            async with asyncio.timeout(END_SESSION_TIMEOUT_S):
                await self._post_to_environment("/end_session", cookies)
        except Exception as error:  # noqa: BLE001 - tidying up must not hide what happened
            logger.info("/end_session of %r failed: %r", self.config.resources_server.name, error)

    async def _post_to_environment(self, path: str, cookies: Cookies | None, **options: Any) -> ClientResponse:
        return await self.server_client.post(
            server_name=self.config.resources_server.name, url_path=path, cookies=cookies, **options
        )


def _parsed(body: bytes, complaint: str) -> NeMoGymResponse:
    try:
        return NeMoGymResponse.model_validate_json(body)
    except ValidationError as error:
        raise RuntimeError(f"{complaint}: {error}") from error


def _stop_reason(response: NeMoGymResponse) -> dict[str, str]:
    """The field that marks a result whose conversation was ended for want of progress."""
    details = response.incomplete_details
    if details is None or details.reason != NO_ACTIONABLE_OUTPUT:
        return {}
    return {"ng_stop_reason": NO_ACTIONABLE_OUTPUT}


if __name__ == "__main__":
    SimpleAgent.run_webserver()
