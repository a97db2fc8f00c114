"""PUBLIC: what an agent is built from: `/v1/responses` answers, `/run` makes a whole rollout of it."""

import asyncio
import functools
import logging
import warnings
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from http import HTTPStatus
from typing import Any

from fastapi import Body, FastAPI, Request
from pydantic import BaseModel

from nemo_gym.config_types import (
    AggregateMetrics,
    AggregateMetricsRequest,
    BaseRunServerInstanceConfig,
    ResourcesServerRef,
)
from nemo_gym.global_config import get_first_server_config_dict
from nemo_gym.http.run_answers import IN_FLIGHT_PATH, rollouts_in_flight
from nemo_gym.keys import (
    OBSERVABILITY_ENABLED_KEY_NAME,
    ROLLOUT_PATH_PREFIX,
    TOKEN_CAPTURE_PATH_SEGMENT,
    TOKEN_ID_CAPTURE_BLOCK,
)
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.rollout_correlation import (
    ROLLOUT_ID_PATTERN,
    apply_rollout_prefix,
    are_calls_recorded,
    are_rollouts_named,
    begin_rollout,
    leave_rollout,
    maybe_rollout_id_from_run_body,
    rollout_path_prefix,
)
from nemo_gym.schemas.run_requests import (
    ROW_CHECK_PATH,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    CheckedRows,
    RowFault,
    RowsToCheck,
    merged_faults,
)
from nemo_gym.server_utils import ServerClient
from nemo_gym.servers.base import BaseServer, SimpleServer
from nemo_gym.servers.json_route import answers_with_row, described_body, models_of, row_faults

__all__ = [
    "AggregateMetrics",
    "AggregateMetricsMixin",
    "AggregateMetricsRequest",
    "BaseResponsesAPIAgent",
    "BaseResponsesAPIAgentConfig",
    "BaseRunRequest",
    "BaseRunServerInstanceConfig",
    "BaseServer",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "Body",
    "FastAPI",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "Request",
    "ServerClient",
    "SimpleResponsesAPIAgent",
    "SimpleServer",
]

logger = logging.getLogger(__name__)

_ROW_CHECK_TIMEOUT_S = 10.0
_ROLLOUT_PATH = f"/{ROLLOUT_PATH_PREFIX}/{{rollout_id}}"


async def _rollouts_in_flight_route() -> dict[str, Any]:
    """What the rollouts of this process are doing, for whoever collects them."""
    return rollouts_in_flight()


class BaseResponsesAPIAgentConfig(BaseRunServerInstanceConfig):
    """Config of an agent; authors add their own fields."""

    skip_verification: bool = False
    """Collect without asking a resources server for a verdict."""
    skip_verification_reward: float = 0.0
    """The reward such rollouts carry; they are marked as not verified."""
    echo_row_fields: bool = True
    """Answer with the fields of a row that the agent's types do not declare, too."""
    token_id_capture: bool = False
    """Mark this agent's model calls as those whose token ids are to be kept, where `token_id_capture` is enabled."""


class BaseResponsesAPIAgent(BaseServer):
    """A server that attempts tasks."""

    config: BaseResponsesAPIAgentConfig


class SimpleResponsesAPIAgent(AggregateMetricsMixin, BaseResponsesAPIAgent, SimpleServer):
    """What authors of agents subclass."""

    config: BaseResponsesAPIAgentConfig

    def setup_webserver(self) -> FastAPI:
        """The app with the standard routes."""
        app = self.new_app()
        self.duties_in(app).logs_calls = True
        app.post("/v1/responses")(self.responses)
        for prefix in (_ROLLOUT_PATH, f"{_ROLLOUT_PATH}/{TOKEN_CAPTURE_PATH_SEGMENT}"):
            app.post(f"{prefix}/v1/responses", include_in_schema=False)(self.responses)
        run = self.run_handler()
        app.post("/run")(self._in_rollout_context(run) if are_rollouts_named(self._run_config()) else run)
        aggregate = self.aggregate_metrics_handler()
        described: dict[str, Any] = {}
        if not models_of(aggregate).keys() - {"return"}:  # it passes the body on unread
            described = {"response_model": AggregateMetrics, "openapi_extra": described_body(AggregateMetricsRequest)}
        app.post("/aggregate_metrics", **described)(aggregate)
        app.get(IN_FLIGHT_PATH, include_in_schema=False)(_rollouts_in_flight_route)
        app.post(ROW_CHECK_PATH, include_in_schema=False)(self._check_rows_route)
        return app

    @abstractmethod
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer one request, calling the model and tools as often as it takes."""

    def run_handler(self) -> Callable[..., Awaitable[Any]]:
        """What serves `/run`: `run`, unless a class has a cheaper way to the same answer."""
        return answers_with_row(self.run) if getattr(self.config, "echo_row_fields", True) else self.run

    @abstractmethod
    async def run(self, body: BaseRunRequest = Body()) -> BaseVerifyResponse:
        """Make one rollout of a row: prepare the session, answer, verify."""

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:
        """Statistics over all of this agent's rollouts; none when they were not verified."""
        if self.config.skip_verification:
            warnings.warn(f"{self.config.name}: rollouts were not verified, so there are no metrics", RuntimeWarning, 2)
            return AggregateMetrics()
        return await super().aggregate_metrics(body)

    def aggregate_metrics_handler(self) -> Callable[..., Awaitable[Any]]:
        """What serves `/aggregate_metrics`: that, unless a class has a cheaper way to the same answer."""
        return self.aggregate_metrics

    @classmethod
    def _passes_rows_on(cls) -> bool:
        """Whether `/run` sends every row as it is to the environment: then what that refuses cannot be rolled out."""
        return False

    async def _check_rows_route(self, body: RowsToCheck) -> CheckedRows:
        """What `/run` would refuse in these rows, and the environment that is to judge them."""
        own = row_faults(body.rows, [self.run])
        theirs = await self._ask_environment(body)
        both = zip(own, theirs or [[] for _ in own], strict=True)
        return CheckedRows(faults=[merged_faults(*faults, is_certain=self._passes_rows_on()) for faults in both])

    async def _ask_environment(self, body: RowsToCheck) -> list[list[RowFault]] | None:
        """What it says; None when there is none, or it does not say."""
        environment = getattr(self.config, "resources_server", None)
        if not isinstance(environment, ResourcesServerRef):
            return None
        asked = RowsToCheck(rows=body.rows, is_verified=not self.config.skip_verification)
        try:
            async with asyncio.timeout(_ROW_CHECK_TIMEOUT_S):
                answer = await self.server_client.post(
                    server_name=environment.name, url_path=ROW_CHECK_PATH, json=asked.model_dump()
                )
                content = await answer.read()
            checked = CheckedRows.model_validate_json(content) if answer.status == HTTPStatus.OK else None
        except Exception as error:  # noqa: BLE001 - one can do without it
            logger.info("rows are not checked by %r: %r", environment.name, error)
            return None
        return checked.faults if checked is not None and len(checked.faults) == len(body.rows) else None

    def rollout_id_from_run(self, body: Any) -> str | None:
        """The id of the rollout that `/run` was asked for; None while nothing is recorded by it."""
        if self._capture_correlation_enabled():
            return maybe_rollout_id_from_run_body(body)
        rollout_id = maybe_rollout_id_from_run_body(body) if self._is_replayable else None
        return rollout_id if rollout_id is not None and ROLLOUT_ID_PATTERN.fullmatch(rollout_id) else None

    def url_path_for_run(self, url_path: str, body: Any) -> str:
        """The path by which `/run` calls this agent itself, or a model, for its rollout."""
        return self._prefix(self.rollout_id_from_run(body)) + url_path

    def base_url_for_run(self, base_url: str, body: Any) -> str:
        """The address of a server, without `/v1`, for calls that belong to the rollout of `/run`."""
        rollout_id = self.rollout_id_from_run(body)
        return apply_rollout_prefix(base_url, rollout_id, token_capture=self._token_id_capture_enabled())

    def url_path_for_request(self, url_path: str, request: Request | None) -> str:
        """The path by which `/v1/responses` calls a model for the rollout that `request` belongs to."""
        rollout_id = getattr(request, "path_params", None)
        rollout_id = rollout_id.get("rollout_id") if isinstance(rollout_id, Mapping) else None
        if request is None or not isinstance(rollout_id, str):
            return url_path
        path = getattr(getattr(request, "url", None), "path", None)  # stand-ins of tests may have none
        is_captured = isinstance(path, str) and f"/{TOKEN_CAPTURE_PATH_SEGMENT}/" in path
        return rollout_path_prefix(rollout_id, token_capture=is_captured) + url_path

    def resolve_model_base_url(self, model_server_name: str, rollout_id: str | None = None) -> str:
        """The `.../v1` address of a model server, to be handed to a program that knows nothing of nemo-gym."""
        block = get_first_server_config_dict(self.server_client.global_config_dict, model_server_name)
        root = self.server_client._build_server_base_url(block)
        return f"{root.rstrip('/')}{self._prefix(rollout_id)}/v1"

    def _prefix(self, rollout_id: str | None) -> str:
        return rollout_path_prefix(rollout_id, token_capture=self._token_id_capture_enabled())

    @cached_property
    def _is_replayable(self) -> bool:
        return are_calls_recorded(self._run_config())

    def _model_call_capture_enabled(self) -> bool:
        return bool(self._run_config().get(OBSERVABILITY_ENABLED_KEY_NAME))

    def _token_id_capture_enabled(self) -> bool:
        settings = self._run_config().get(TOKEN_ID_CAPTURE_BLOCK)
        if not isinstance(settings, Mapping) or not settings.get("enabled"):
            return False
        return bool(settings.get("all_agents")) or self.config.token_id_capture

    def _capture_correlation_enabled(self) -> bool:
        return self._model_call_capture_enabled() or self._token_id_capture_enabled()

    def _in_rollout_context(self, run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """`run`, its work marked as that of its rollout; authors name the row as they like."""

        @functools.wraps(run)
        async def marked(*args: Any, **kwargs: Any) -> Any:
            row = kwargs.get("body") or _first_model(args) or _first_model(kwargs.values())
            tokens = begin_rollout(maybe_rollout_id_from_run_body(row))
            try:
                return await run(*args, **kwargs)
            finally:
                leave_rollout(tokens)

        return marked


def _first_model(given: Iterable[Any]) -> BaseModel | None:
    return next((each for each in given if isinstance(each, BaseModel)), None)
