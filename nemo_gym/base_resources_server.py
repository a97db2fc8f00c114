"""PUBLIC: what an environment is built from: tools, the session's start, and the verdict.

Authors subclass `SimpleResourcesServer`, implement `verify`, and add a route per tool.
"""

from abc import abstractmethod
from enum import StrEnum
from typing import Any, ClassVar

from fastapi import FastAPI
from starlette.middleware import Middleware

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, BaseRunServerInstanceConfig
from nemo_gym.judge import judge_failsafe
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.schemas.run_requests import (
    BaseMultiRewardVerifyResponse,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
)
from nemo_gym.servers.base import BaseServer, SimpleServer
from nemo_gym.servers.session_lifetime import SessionLifetimeMiddleware, SessionLifetimes

__all__ = [
    "AggregateMetrics",
    "AggregateMetricsMixin",
    "AggregateMetricsRequest",
    "BaseMultiRewardVerifyResponse",
    "BaseResourcesServer",
    "BaseResourcesServerConfig",
    "BaseRunRequest",
    "BaseSeedSessionRequest",
    "BaseSeedSessionResponse",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "ReverifyMode",
    "SimpleResourcesServer",
]


class ReverifyMode(StrEnum):
    """Whether stored responses can be scored again without the session they came from."""

    STATELESS = "stateless"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


class BaseResourcesServerConfig(BaseRunServerInstanceConfig):
    """Config of a resources server; authors add their own fields."""

    session_ttl_s: float | None = 24 * 60 * 60
    """A session nobody has used for so long is over; null: sessions end only when an agent says so."""


class BaseResourcesServer(BaseServer):
    """A server that provides tools and verdicts."""

    config: BaseResourcesServerConfig


class SimpleResourcesServer(AggregateMetricsMixin, BaseResourcesServer, SimpleServer):
    """What authors of environments subclass."""

    CANCELLABLE_PATHS: ClassVar[frozenset[str]] = frozenset()  # a tool is carried out to the end
    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.UNKNOWN

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """The app with the standard routes; authors call this and add their tools."""
        app = self.new_app()
        if type(self).end_session is not SimpleResourcesServer.end_session:
            is_shared = (self.config.num_workers or 1) > 1
            lifetimes = SessionLifetimes(self.end_session, self.config.session_ttl_s, is_shared=is_shared)
            app.user_middleware.append(Middleware(SessionLifetimeMiddleware, lifetimes=lifetimes))
        app.post("/seed_session")(self.seed_session)
        app.post("/verify")(judge_failsafe(self.verify))
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        app.post("/end_session")(self._end_session_route)
        app.get("/reverify_mode")(self._reverify_mode_route)
        return app

    async def seed_session(self, body: BaseSeedSessionRequest) -> BaseSeedSessionResponse:
        """Prepare the session of one rollout; receives the whole row."""
        return BaseSeedSessionResponse()

    @abstractmethod
    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """Score one rollout. May also take a `request: Request`, in any position."""

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for a session: its episode is over, or nobody came back for it."""

    async def _end_session_route(self) -> dict[str, Any]:
        return {}

    async def _reverify_mode_route(self) -> str:
        return self.REVERIFY_MODE.value
