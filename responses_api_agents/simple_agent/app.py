"""`simple_agent`: let a model talk and call tools until it has answered, then have the result scored.

`/v1/responses` is the conversation, `/run` a whole rollout: seed the environment's session, hold the
conversation in it, verify. Tools are those routes of the resources server that the request offers; whatever
they answer, errors too, is shown to the model. Nothing that a model says ends a rollout without a score.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, ClassVar

import orjson
from fastapi import Body, Request, Response
from pydantic import ConfigDict, Field, ValidationError

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import (
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    validated_json,
)
from nemo_gym.rollout_correlation import current_rollout_id
from nemo_gym.rollout_observability import TRAJECTORY_KEY, task_id_of
from nemo_gym.server_utils import (
    END_SESSION_HEADER,
    JSON_HEADERS,
    VERIFY,
    VERIFY_REPEATEDLY,
    WANTS_PARTIAL,
    Backoff,
    ClientResponse,
    ServerResponseError,
    json_answer,
    json_bytes,
    keep_partial,
    raise_for_status,
)
from responses_api_agents.simple_agent.account import KEPT, Account, AccountOfRollout
from responses_api_agents.simple_agent.cookies import Cookies, cookie_text, merged
from responses_api_agents.simple_agent.tools import (
    BadCallError,
    declared_tools,
    offered_names,
    output_of,
    parsed_arguments,
    tool_path,
)
from responses_api_agents.simple_agent.trajectory import (
    CALL_REFUSED,
    CONTENT_REFUSED,
    MAX_STEPS,
    STOP_REASONS,
    Trajectory,
)
from responses_api_agents.simple_agent.verdicts import Verdict, with_response

logger = logging.getLogger(__name__)

END_SESSION_TIMEOUT_S = 5.0
MOST_STEPS = 1000
"""Model calls after which a conversation without `max_steps` is ended: more than any task needs."""
_REFUSALS = (400, 422)
_FILTER_STATUSES = (400, 403, 422, 451)
_FILTER_WORDS_LENGTH = 4_000
_FILTERED = re.compile(
    r"content.?filter|content.?management|content.?polic|usage.?polic|moderation|\bflagged\b", re.IGNORECASE
)
"""Words of endpoints whose filter refuses what they are sent."""
VERIFY_TRIES = 3
"""How often an environment that fails is asked for the verdict on one rollout."""
_SERVER_FAILED = 500
_NOT_ASKED_AGAIN = frozenset({None, "SessionLostError", "MissingCallError", "DamagedRecordingError"})
"""Classes of failures that come again: the session is lost, or a recording lacks a call. Other servers name none."""
_RESPONSES_PATH = "/v1/responses"
_OF_ITSELF = {WANTS_PARTIAL: "true"}
_VERIFY_HEADERS = {"content-type": "application/json", END_SESSION_HEADER: "true"}


class _ModelFailedError(RuntimeError):
    """The model answered with an error instead of an output."""


class SimpleAgentConfig(BaseResponsesAPIAgentConfig):
    """Which environment, which model, and how long to go on."""

    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    max_steps: int | None = Field(default=None, ge=1)
    """Model calls per rollout; when unset, a model that never stops calling tools is stopped after `MOST_STEPS`."""
    max_idle_turns: int = Field(default=3, ge=1)
    """Turns in a row without message and without tool call after which the rollout is ended."""
    tool_timeout_s: float = Field(default=3600.0, gt=0)
    """How long one tool may take; then the model is told so."""


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

    replicable = True
    verify_pauses: ClassVar[Backoff] = Backoff(1.0, 4.0, certain=0.5)
    """How long a failed `/verify` waits before it is asked again."""

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
        return self._run_route if type(self).run is SimpleAgent.run else super().run_handler()

    async def _run_route(self, request: Request, body: SimpleAgentRunRequest) -> Any:
        result = await self._rollout(request, body, await request.body())
        if not isinstance(result, Verdict):
            return result
        return json_answer(result.json)

    def _validated(self, verdict: bytes) -> SimpleAgentVerifyResponse:
        try:
            return SimpleAgentVerifyResponse.model_validate_json(verdict)
        except ValidationError as error:
            name = self.config.resources_server.name
            raise RuntimeError(f"Received an invalid verdict from resources server {name!r}: {error}") from error

    async def _rollout(
        self, request: Request, body: SimpleAgentRunRequest, as_json: bytes | None = None
    ) -> SimpleAgentVerifyResponse | Verdict:
        """One rollout of a row, told in full if the run observes its rollouts; see `_scored_rollout`."""
        if not self._is_observed or (rollout_id := current_rollout_id()) is None:
            return await self._scored_rollout(request, body, as_json)
        kept = AccountOfRollout(rollout_id, task_id_of(body.model_extra or {}))
        token = KEPT.set(kept)
        try:
            result = await self._scored_rollout(request, body, as_json)
        finally:
            KEPT.reset(token)
        if kept.account is None:
            return result
        if isinstance(result, Verdict):
            return kept.account.added_to(result)
        return result.model_copy(update={TRAJECTORY_KEY: orjson.loads(kept.account.as_json(None))})

    @cached_property
    def _is_observed(self) -> bool:
        return self._model_call_capture_enabled()

    async def _scored_rollout(
        self, request: Request, body: SimpleAgentRunRequest, as_json: bytes | None
    ) -> SimpleAgentVerifyResponse | Verdict:
        """One rollout of a row: the environment's verdict, or ours if it was not asked.

        `as_json` is the row as it came, if nobody has changed it since.
        """
        row: dict[str, Any] = {"data": as_json, "headers": JSON_HEADERS} if as_json else {"json": body}
        own = request.cookies
        seeded = await self._post_to_environment("/seed_session", own, **row)
        if not seeded.ok:
            await raise_for_status(seeded)
        cookies = merged(own, seeded.cookies)
        try:
            offered = _with_tools(body, declared_tools(await seeded.read(), self.config.resources_server.name))
            response, cookies = await self._attempt(offered, cookies)
        except Exception:
            await self._end_session(cookies)
            raise
        if self.config.skip_verification:
            await self._end_session(cookies)
            return self._unverified(body, response)
        try:
            verdict = await self._verdict(as_json or json_bytes(body), response, cookies)
            return verdict if verdict.is_scored() else self._validated(verdict.json)
        except Exception as error:
            where = VERIFY_REPEATEDLY if _is_asked_again(error) else VERIFY
            keep_partial(error, response, where if self._passes_rows_on() else None)
            if _keeps_session(error):
                await self._end_session(cookies)
            raise

    async def _verdict(self, row: bytes, response: NeMoGymResponse, cookies: Cookies) -> Verdict:
        """Ask for the verdict; again after a pause if the environment fails, whose session is still there then."""
        for failures in range(1, VERIFY_TRIES):
            try:
                return await self._verify(row, response, cookies)
            except ServerResponseError as error:
                if not _is_asked_again(error):
                    raise
                logger.info("/verify of %r failed and is asked again: %s", self.config.resources_server.name, error)
            await asyncio.sleep(self.verify_pauses.after(failures))
        return await self._verify(row, response, cookies)

    @classmethod
    def _passes_rows_on(cls) -> bool:
        """As long as a subclass leaves both ways to the environment as they are."""
        ways = ("run", "_rollout", "_scored_rollout", "_verify")
        return all(getattr(cls, way) is getattr(SimpleAgent, way) for way in ways)

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:
        """The metrics of the resources server, which knows what its fields mean."""
        if self.config.skip_verification:
            return await super().aggregate_metrics(body)
        answer = await self._post_to_environment("/aggregate_metrics", None, json=body)
        await raise_for_status(answer)
        return AggregateMetrics.model_validate_json(await answer.read())

    def aggregate_metrics_handler(self) -> Callable[..., Awaitable[Any]]:
        """Pass records and metrics on as they are, unless a subclass does something with them."""
        is_plain = type(self).aggregate_metrics is SimpleAgent.aggregate_metrics and not self.config.skip_verification
        return self._aggregate_metrics_route if is_plain else super().aggregate_metrics_handler()

    async def _aggregate_metrics_route(self, request: Request) -> Response:
        content = await request.body()
        answer = await self._post_to_environment("/aggregate_metrics", None, data=content, headers=JSON_HEADERS)
        await raise_for_status(answer)
        return json_answer(await answer.read())

    async def _run_steps(
        self,
        params: NeMoGymResponseCreateParamsNonStreaming,
        resources_cookies: Cookies,
        model_cookies: Cookies | None,
    ) -> Trajectory:
        """Hold the conversation that `params` begin, in the sessions the cookies name."""
        trajectory = Trajectory(params, resources_cookies, model_cookies)
        if self._is_observed:
            self._begin_account(trajectory)
        offered = offered_names(params)
        try:
            while (answer := await self._next_answer(trajectory)) is not None:
                calls = trajectory.add_turn(answer)
                if trajectory.ends_with_turn(calls, self.config.max_idle_turns):
                    break
                for call in calls:  # in order: tools of one session rely on it
                    if trajectory.account is not None:
                        trajectory.account.tool_is_called()
                    trajectory.add_tool_output(call, await self._call_tool(call, trajectory, offered))
        except Exception as error:
            if trajectory.steps:
                keep_partial(error, trajectory.response())
            raise
        return trajectory

    def _begin_account(self, trajectory: Trajectory) -> None:
        """Have the conversation told, if it is that of a rollout which wants it told."""
        kept = KEPT.get()
        if kept is not None:
            asked, model = trajectory.asked, self.config.model_server.name
            trajectory.account = kept.account = Account(asked, model, kept.rollout_id, kept.task_id)

    async def _next_answer(self, trajectory: Trajectory) -> NeMoGymResponse | None:
        """What the model says next; None when the conversation ends here."""
        if trajectory.steps >= (self.config.max_steps or MOST_STEPS):
            if trajectory.account is not None:
                trajectory.account.is_complete = False
            if self.config.max_steps is None:
                trajectory.stop(MAX_STEPS, f"the model had {MOST_STEPS} turns; set max_steps to allow another number")
            return None
        try:
            return await self._ask_model(trajectory)
        except (ServerResponseError, _ModelFailedError) as error:
            if _refuses_content(error) and trajectory.steps:  # a first request holds nothing that the model said
                trajectory.stop(CONTENT_REFUSED, f"the endpoint refuses the content of the conversation: {error}")
            elif _refuses_call(error) and trajectory.has_malformed_call:
                trajectory.stop(CALL_REFUSED, f"the endpoint refuses to read a call that the model made up: {error}")
            else:
                raise
            return None

    async def _ask_model(self, trajectory: Trajectory) -> NeMoGymResponse:
        name = self.config.model_server.name
        if trajectory.account is not None:
            trajectory.account.model_is_asked()
        answer = await self.server_client.post(
            server_name=name,
            url_path=self._path_of_rollout() if self._keeps_token_ids else _RESPONSES_PATH,
            json=trajectory.next_request(),
            cookies=trajectory.model_cookies,
        )
        if not answer.ok:
            await raise_for_status(answer)
        trajectory.model_cookies = merged(trajectory.model_cookies, answer.cookies)
        response = _parsed(await answer.read(), f"Received an invalid response from model server {name!r}")
        if response.error is not None:
            raise _ModelFailedError(
                f"The model behind {name!r} failed: {response.error.code}: {response.error.message}. "
                f"It answered {response.id!r} with an error instead of an output"
            )
        return response

    async def _call_tool(
        self, call: NeMoGymResponseFunctionToolCall, trajectory: Trajectory, offered: frozenset[str]
    ) -> str:
        """What the tool says, whatever its status: the model must be able to react to errors."""
        trajectory.tool_status = None
        try:
            arguments, path = parsed_arguments(call.arguments), tool_path(call.name, offered)
        except BadCallError as error:
            trajectory.has_malformed_call |= error.is_malformed
            return output_of(str(error))
        limit_s = self.config.tool_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._post_to_environment(path, trajectory.resources_cookies, json=arguments)
                text = (await answer.read()).decode(errors="replace")
        except TimeoutError:
            return output_of(f"The tool {call.name} did not answer within {limit_s:g} s")
        trajectory.tool_status = answer.status
        trajectory.resources_cookies = merged(trajectory.resources_cookies, answer.cookies)
        return text

    def _attempt(self, row: SimpleAgentRunRequest, cookies: Cookies) -> Awaitable[tuple[NeMoGymResponse, Cookies]]:
        """What is to be verified, and the cookies of the environment's session then."""
        return self._respond(row.responses_create_params, cookies)

    async def _respond(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: Cookies
    ) -> tuple[NeMoGymResponse, Cookies]:
        """Hold the conversation here, or through `/v1/responses` when a subclass defines what that does."""
        if type(self).responses is SimpleAgent.responses:
            trajectory = await self._run_steps(params, cookies, None)
            return trajectory.response(), trajectory.resources_cookies
        answer = await self.server_client.post(
            server_name=self.config.name,
            url_path=self._path_of_rollout(),
            json=params,
            cookies=cookies,
            headers=_OF_ITSELF,
        )
        await raise_for_status(answer)
        response = _parsed(await answer.read(), f"Received an invalid response from agent {self.config.name!r}")
        return response, merged(cookies, answer.cookies)

    @cached_property
    def _keeps_token_ids(self) -> bool:
        return self._token_id_capture_enabled()

    def _path_of_rollout(self) -> str:
        """The path by which a model, or this agent itself, is asked; where calls are captured, it names the rollout."""
        is_named = self._is_observed or self._keeps_token_ids
        return (self._prefix(current_rollout_id()) if is_named else "") + _RESPONSES_PATH

    async def _verify(self, row: bytes, response: NeMoGymResponse, cookies: Cookies) -> Verdict:
        asked = with_response(row, response)
        answer = await self._post_to_environment("/verify", cookies, data=asked, headers=_VERIFY_HEADERS)
        if not answer.ok:
            await raise_for_status(answer)
        verdict = await answer.read()
        if not (stop_reason := _stop_reason(response)):
            return Verdict(verdict)
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
                await (await self._post_to_environment("/end_session", cookies)).read()
        except Exception as error:  # noqa: BLE001 - tidying up must not hide what happened
            logger.info("/end_session of %r failed: %r", self.config.resources_server.name, error)

    def _post_to_environment(self, path: str, cookies: Cookies | None, **options: Any) -> Awaitable[ClientResponse]:
        return self.server_client.post(
            server_name=self.config.resources_server.name, url_path=path, cookies=cookies, **options
        )


def _keeps_session(error: Exception) -> bool:
    """Return whether the environment that failed in `/verify` still has the session."""
    return isinstance(error, ServerResponseError) and error.error_class not in _NOT_ASKED_AGAIN


def _is_asked_again(error: Exception) -> bool:
    """Return whether an environment that failed like this is asked for its verdict again."""
    return isinstance(error, ServerResponseError) and _keeps_session(error) and error.error_status >= _SERVER_FAILED


def _parsed(body: bytes, complaint: str) -> NeMoGymResponse:
    try:
        return validated_json(NeMoGymResponse, body)
    except ValidationError as error:
        raise RuntimeError(f"{complaint}: {error}") from error


def _with_tools(row: SimpleAgentRunRequest, tools: list[dict[str, Any]]) -> SimpleAgentRunRequest:
    """`row` with further tools for the model; what is verified and stored stays the row itself."""
    if not tools:
        return row
    params = row.responses_create_params
    offered = params.model_copy(update={"tools": [*params.tools, *tools]})
    return row.model_copy(update={"responses_create_params": offered})


def _refuses_content(error: ServerResponseError | _ModelFailedError) -> bool:
    """Return whether the words of an endpoint say that its filter refuses what it was sent."""
    if isinstance(error, ServerResponseError) and error.error_status not in _FILTER_STATUSES:
        return False
    said = error.excerpt(_FILTER_WORDS_LENGTH) if isinstance(error, ServerResponseError) else ""
    return _FILTERED.search(f"{error} {said}") is not None


def _refuses_call(error: ServerResponseError | _ModelFailedError) -> bool:
    return isinstance(error, ServerResponseError) and error.error_status in _REFUSALS


def _stop_reason(response: NeMoGymResponse) -> dict[str, str]:
    """The field that marks a result whose conversation an agent ended."""
    details = response.incomplete_details
    if details is None or details.reason not in STOP_REASONS:
        return {}
    return {"ng_stop_reason": details.reason}


if __name__ == "__main__":
    SimpleAgent.run_webserver()
