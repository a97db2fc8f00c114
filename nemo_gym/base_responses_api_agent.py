"""PUBLIC: what an agent is built from: `/v1/responses` answers, `/run` makes a whole rollout of it."""

import warnings
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Body, FastAPI

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, BaseRunServerInstanceConfig
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.schemas.run_requests import BaseRunRequest, BaseVerifyResponse
from nemo_gym.servers.base import BaseServer, SimpleServer

__all__ = [
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseResponsesAPIAgent",
    "BaseResponsesAPIAgentConfig",
    "Body",
    "SimpleResponsesAPIAgent",
]


class BaseResponsesAPIAgentConfig(BaseRunServerInstanceConfig):
    """Config of an agent; authors add their own fields."""

    skip_verification: bool = False
    """Collect without asking a resources server for a verdict."""
    skip_verification_reward: float = 0.0
    """The reward such rollouts carry; they are marked as not verified."""


class BaseResponsesAPIAgent(BaseServer):
    """A server that attempts tasks."""

    config: BaseResponsesAPIAgentConfig


class SimpleResponsesAPIAgent(AggregateMetricsMixin, BaseResponsesAPIAgent, SimpleServer):
    """What authors of agents subclass."""

    config: BaseResponsesAPIAgentConfig

    def setup_webserver(self) -> FastAPI:
        """The app with the standard routes."""
        app = self.new_app()
        app.post("/v1/responses")(self.responses)
        app.post("/run")(self.run_handler())
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        return app

    @abstractmethod
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer one request, calling the model and tools as often as it takes."""

    def run_handler(self) -> Callable[..., Awaitable[Any]]:
        """What serves `/run`: `run`, unless a class has a cheaper way to the same answer."""
        return self.run

    @abstractmethod
    async def run(self, body: BaseRunRequest = Body()) -> BaseVerifyResponse:
        """Make one rollout of a row: prepare the session, answer, verify."""

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:
        """Statistics over all of this agent's rollouts; none when they were not verified."""
        if self.config.skip_verification:
            warnings.warn(f"{self.config.name}: rollouts were not verified, so there are no metrics", RuntimeWarning, 2)
            return AggregateMetrics()
        return await super().aggregate_metrics(body)
