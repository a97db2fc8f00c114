"""State per rollout: a counter that every session has for itself.

The environment to copy when tools change something that the verdict depends on, and the one that
shows whether an agent keeps its session from the first call to the last.
"""

from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, PrivateAttr

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY


class StatefulCounterResourcesServerConfig(BaseResourcesServerConfig):
    """Nothing to configure."""


class IncrementCounterRequest(BaseModel):
    """How much to add."""

    count: int


class IncrementCounterResponse(BaseModel):
    """It was added."""

    success: bool


class GetCounterValueResponse(BaseModel):
    """Where the counter stands."""

    count: int


class StatefulCounterSeedSessionRequest(BaseSeedSessionRequest):
    """A row, of which the start of the counter is needed."""

    initial_count: int


class StatefulCounterVerifyRequest(BaseVerifyRequest):
    """A row, of which the end of the counter is needed."""

    expected_count: int


class StatefulCounterVerifyResponse(StatefulCounterVerifyRequest, BaseVerifyResponse):
    """The verdict."""


class StatefulCounterResourcesServer(SimpleResourcesServer):
    """Counts, for every session separately."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.UNSUPPORTED
    REVERIFY_REASON = "it compares the counter of the rollout's own session, which is gone, with what the row expects"

    config: StatefulCounterResourcesServerConfig
    _counters: dict[str, int] = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        """The standard routes and the two tools."""
        app = super().setup_webserver()
        app.post("/increment_counter")(self.increment_counter)
        app.post("/get_counter_value")(self.get_counter_value)
        return app

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: StatefulCounterSeedSessionRequest
    ) -> BaseSeedSessionResponse:
        """Start the session's counter, unless it is running already."""
        self._counters.setdefault(_session(request), body.initial_count)
        return BaseSeedSessionResponse()

    async def increment_counter(self, request: Request, body: IncrementCounterRequest) -> IncrementCounterResponse:
        """Add to the session's counter."""
        session = _session(request)
        self._counters[session] = self._counters.get(session, 0) + body.count
        return IncrementCounterResponse(success=True)

    async def get_counter_value(self, request: Request) -> GetCounterValueResponse:
        """Read the session's counter."""
        return GetCounterValueResponse(count=self._counters.setdefault(_session(request), 0))

    async def verify(self, request: Request, body: StatefulCounterVerifyRequest) -> StatefulCounterVerifyResponse:
        """Right when the counter of this very session stands where it should."""
        counted = self._counters.get(_session(request))
        return StatefulCounterVerifyResponse(**dict(body), reward=float(counted == body.expected_count))

    async def end_session(self, session_id: str) -> None:
        """Forget the counter: the episode is over."""
        self._counters.pop(session_id, None)


def _session(request: Request) -> Any:
    return request.session[SESSION_ID_KEY]


if __name__ == "__main__":
    StatefulCounterResourcesServer.run_webserver()
