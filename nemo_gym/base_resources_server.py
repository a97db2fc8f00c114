"""PUBLIC: what an environment is built from: tools, the session's start, and the verdict.

Authors subclass `SimpleResourcesServer`, implement `verify`, and add a route per tool.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastapi import Body, FastAPI, Request, Response
from pydantic import BaseModel

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, BaseRunServerInstanceConfig
from nemo_gym.judge import judge_failsafe
from nemo_gym.keys import REPLICABLE_PATH
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.rollout_correlation import ROLLOUT_PREFIX
from nemo_gym.schemas.run_requests import (
    ROW_CHECK_PATH,
    BaseMultiRewardVerifyResponse,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    CheckedRows,
    RowsToCheck,
)
from nemo_gym.server_utils import ServerClient
from nemo_gym.servers.base import BaseServer, SimpleServer
from nemo_gym.servers.json_route import Handler, JsonBody, answers_with_row, described_body, json_answer, row_faults
from nemo_gym.servers.sessions import SessionLifetimes, Sessions

if TYPE_CHECKING:
    from nemo_gym.mcp_auto_exposure import MCPTool

__all__ = [
    "RESERVED_TOOL_NAMES",
    "AggregateMetrics",
    "AggregateMetricsMixin",
    "AggregateMetricsRequest",
    "BaseMultiRewardVerifyResponse",
    "BaseResourcesServer",
    "BaseResourcesServerConfig",
    "BaseRunRequest",
    "BaseRunServerInstanceConfig",
    "BaseSeedSessionRequest",
    "BaseSeedSessionResponse",
    "BaseServer",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "Body",
    "FastAPI",
    "MCPServerMetadata",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "Request",
    "ReverifyMode",
    "ServerClient",
    "SimpleResourcesServer",
    "SimpleServer",
    "VerifierFixture",
    "normalize_tool_name",
]

NEMO_GYM_MCP_SESSION_TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
NEMO_GYM_MCP_METADATA_KEY = "mcp"
RESERVED_MCP_TOOL_NAMES = frozenset({"verify", "seed_session", "aggregate_metrics", "mcp"})
_MCP_START = "mcp__"


def normalize_tool_name(name: str, server_name: str | None = None) -> str:
    """A tool's own name: what harnesses call `mcp__<server>__<tool>`, of that server or of any; others as they are."""
    if not name.startswith(_MCP_START):
        return name
    if server_name is not None:
        return name.removeprefix(f"{_MCP_START}{server_name}__")
    _, separator, tool = name.removeprefix(_MCP_START).partition("__")
    return tool if separator else name


class MCPServerMetadata(BaseModel):
    """Where a session's tools are offered over MCP, as `/seed_session` may answer under the key `mcp`."""

    server_name: str
    url_path: str = "/mcp"
    transport: str = "http"
    headers: dict[str, str]


RESERVED_TOOL_NAMES = frozenset(
    {
        "aggregate_metrics",
        "end_session",
        "mcp",
        "ng_check_rows",
        "ng_replicable",
        "reverify_mode",
        "reverify_reason",
        "seed_session",
        "verify",
    }
)
"""Routes by which an environment is run: never a tool, even if a row offers one of that name."""


class ReverifyMode(StrEnum):
    """Whether stored responses can be scored again without the session they came from."""

    STATELESS = "stateless"
    """The row and the response are all that the verdict depends on."""
    SEEDED = "seeded"
    """The verdict needs a session, but only what `/seed_session` puts there."""
    UNSUPPORTED = "unsupported"
    """The verdict depends on what happened in the session: without it there is none."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class VerifierFixture:
    """What `gym env test NAME` tries a verifier with; a module has one as `VERIFIER_FIXTURE = VerifierFixture(...)`."""

    server_factory: Callable[[], Any]
    """Makes the server; it is not started."""
    request_model: type[BaseModel]
    """What a case's request is."""
    cases_path: str | Path
    """JSON lines `{name, kind, request, expected_reward or expected_error}`, beside the module if it is relative."""
    invoke: Callable[[Any, Any], Any] | None = None
    """Gets the server and the request and gives the verdict, also awaited; unless set, `server.verify` does."""
    reseed: Callable[..., Any] | None = None
    """Puts back what chance depends on, before either run of a case about determinism; it may take the server."""


class BaseResourcesServerConfig(BaseRunServerInstanceConfig):
    """Config of a resources server; authors add their own fields."""

    session_ttl_s: float | None = 24 * 60 * 60
    """A session nobody has used for so long is over; null: sessions end only when an agent says so."""
    echo_row_fields: bool = True
    """Answer with the fields of a row that the server's types do not declare, too."""
    expose_tools_over_mcp: bool = False
    """Offer the tools over MCP, too, at /mcp; /seed_session then answers where, and with which token."""

    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.UNKNOWN


class BaseResourcesServer(BaseServer):
    """A server that provides tools and verdicts."""

    config: BaseResourcesServerConfig


class SimpleResourcesServer(AggregateMetricsMixin, BaseResourcesServer, SimpleServer):
    """What authors of environments subclass."""

    CANCELLABLE_PATHS: ClassVar[frozenset[str]] = frozenset()  # a tool is carried out to the end
    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.UNKNOWN
    REVERIFY_REASON: ClassVar[str] = ""
    """Why stored responses cannot be scored again, in words for whoever tries."""

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """The app with the standard routes; authors call this and add their tools."""
        app = self.new_app()
        duties = self.duties_in(app)
        duties.rollout_prefix = ROLLOUT_PREFIX
        if type(self).end_session is not SimpleResourcesServer.end_session:
            is_shared = (self.config.num_workers or 1) > 1
            duties.lifetimes = SessionLifetimes(self.end_session, self.config.session_ttl_s, is_shared=is_shared)
        app.post("/seed_session")(self.seed_session)
        verify = answers_with_row(self.verify) if getattr(self.config, "echo_row_fields", True) else self.verify
        app.post("/verify")(judge_failsafe(verify))
        is_own = type(self).aggregate_metrics is not AggregateMetricsMixin.aggregate_metrics
        if is_own:
            app.post("/aggregate_metrics")(self.aggregate_metrics)
        else:
            described = described_body(AggregateMetricsRequest)
            app.post("/aggregate_metrics", response_model=AggregateMetrics, openapi_extra=described)(
                self._aggregate_metrics_route
            )
        app.post("/end_session")(self._end_session_route)
        app.get("/reverify_mode")(self.get_reverify_mode)
        app.get("/reverify_reason", include_in_schema=False)(self._reverify_reason_route)
        app.get(REPLICABLE_PATH, include_in_schema=False)(self._replicable_route)
        app.post(ROW_CHECK_PATH, include_in_schema=False)(self._check_rows_route)
        return app

    def new_sessions(self) -> Sessions:
        """Sessions that take turns where work waits for a processor."""
        return Sessions(self.get_session_middleware_key(), self._session_secret(), take_turns=True)

    def complete_app(self) -> FastAPI:
        """The app as it is served, with its tools over MCP if its config says so."""
        app = super().complete_app()
        if getattr(self.config, "expose_tools_over_mcp", False):
            from nemo_gym.mcp_auto_exposure import maybe_auto_expose

            maybe_auto_expose(self, app)
        return app

    def mcp_tools(self, harvested: "list[MCPTool]", catchall: Any | None) -> "list[MCPTool] | None":
        """Which tools are offered over MCP: `harvested` are those with a route of their own.

        `catchall.tool(name, input_schema, description)` makes one of a route with a parameter in its path.
        """
        return harvested

    def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> list[str] | None:
        """The tools that the session of this row may use over MCP; None: all that are offered."""
        return None

    async def seed_session(self, body: BaseSeedSessionRequest) -> BaseSeedSessionResponse:
        """Prepare the session of one rollout; receives the whole row."""
        return BaseSeedSessionResponse()

    if TYPE_CHECKING:  # authors declare a request of their own, and what else they want

        @abstractmethod
        async def verify(self, *args: Any, **kwargs: Any) -> BaseVerifyResponse:
            """Score one rollout."""
    else:

        @abstractmethod
        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            """Score one rollout. May also take a `request: Request`, in any position."""

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for a session: its episode is over, or nobody came back for it."""

    async def _aggregate_metrics_route(self, request: Request) -> Response:
        """Answer as `aggregate_metrics` does, of requests and with answers of a hundred megabytes."""
        from nemo_gym.metrics.aggregate import aggregated_json

        has_hook = type(self).compute_metrics is not AggregateMetricsMixin.compute_metrics
        hook = self.compute_metrics if has_hook else None
        read = JsonBody(AggregateMetricsRequest).read
        content = await request.body()
        return json_answer(await asyncio.to_thread(aggregated_json, content, read, hook, self.get_key_metrics))

    async def _end_session_route(self) -> dict[str, Any]:
        return {}

    async def _check_rows_route(self, body: RowsToCheck) -> CheckedRows:
        """What `/seed_session` and, if it will be asked, `/verify` would refuse in these rows."""
        handlers: list[Handler] = [self.seed_session, self.verify]
        return CheckedRows(faults=row_faults(body.rows, handlers if body.is_verified else handlers[:1]))

    async def get_reverify_mode(self) -> ReverifyMode:
        """Whether stored responses can be scored again; what the class says counts, then its config's class."""
        return self.config.REVERIFY_MODE if self.REVERIFY_MODE is ReverifyMode.UNKNOWN else self.REVERIFY_MODE

    async def _reverify_reason_route(self) -> str:
        return self.REVERIFY_REASON

    async def _replicable_route(self) -> bool:
        return self.is_replicable()

    def normalize_tool_name(self, name: str) -> str:
        """A tool's own name, of what a harness calls it on this server."""
        return normalize_tool_name(name, self.config.name or type(self).__name__)
