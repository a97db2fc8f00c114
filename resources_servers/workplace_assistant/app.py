"""An assistant in a company: mail, calendar, website, projects and customers, by 27 tools.

What counts is what the company has become, not the way there: the calls of the rollout and those of the row's solution
are made in two fresh companies, and both must come out the same.
"""

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, PrivateAttr

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY
from resources_servers.workplace_assistant.company import TOOLS, Company, ToolError, after
from resources_servers.workplace_assistant.world import Tables, load, made_up


class WorkplaceAssistantResourcesServerConfig(BaseResourcesServerConfig):
    """Which company it is."""

    world: str | None = None
    """A folder with the company's tables as CSV files, looked up like any relative path; by default one is made up."""
    world_seed: int = 0
    """Which one is made up."""


class Call(BaseModel):
    """One call of the solution."""

    name: str
    arguments: str | dict[str, Any]
    """As an object, or as its JSON."""


class WorkplaceAssistantRunRequest(BaseRunRequest):
    """A row."""

    ground_truth: list[Call]
    """Calls that solve the task; none if nothing is to be changed."""
    category: str | None = None


class WorkplaceAssistantVerifyRequest(WorkplaceAssistantRunRequest, BaseVerifyRequest):
    """A row and its trajectory."""


class WorkplaceAssistantVerifyResponse(WorkplaceAssistantVerifyRequest, BaseVerifyResponse):
    """The verdict."""

    wrong_tables: list[str]
    """What has come out otherwise than it should."""


class ToolResponse(BaseModel):
    """What a tool says."""

    output: Any


class WorkplaceAssistantResourcesServer(SimpleResourcesServer):
    """Has a company for every session."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: WorkplaceAssistantResourcesServerConfig
    _world: Tables = PrivateAttr()
    _companies: dict[str, Company] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Read or make up the company, so that mistakes show when the server starts."""
        super().model_post_init(context)
        self._world = made_up(self.config.world_seed) if self.config.world is None else load(self.config.world)

    def setup_webserver(self) -> FastAPI:
        """The standard routes, and one for every tool."""
        app = super().setup_webserver()
        app.post("/{tool}")(self.use_tool)
        return app

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: BaseSeedSessionRequest
    ) -> BaseSeedSessionResponse:
        """Give the session a company of its own."""
        self._companies[request.session[SESSION_ID_KEY]] = Company(self._world)
        return BaseSeedSessionResponse()

    async def use_tool(self, tool: str, request: Request, body: dict[str, Any]) -> ToolResponse:
        """Use a tool in the session's company; what is wrong with a call is said to the model."""
        if tool not in TOOLS:
            raise HTTPException(404, f"there is no tool {tool!r}")
        company = self._companies.setdefault(request.session[SESSION_ID_KEY], Company(self._world))
        try:
            return ToolResponse(output=company.call(tool, body))
        except ToolError as error:
            return ToolResponse(output=f"Error: {error}")

    async def verify(self, body: WorkplaceAssistantVerifyRequest) -> WorkplaceAssistantVerifyResponse:
        """Right when the company has become what the solution makes of it."""
        made = [(item.name, item.arguments) for item in body.response.output if item.type == "function_call"]
        found = after(self._world, made)
        wanted = after(self._world, [(call.name, call.arguments) for call in body.ground_truth])
        wrong = sorted(table for table in {*found, *wanted} if found.get(table) != wanted.get(table))
        return WorkplaceAssistantVerifyResponse(**dict(body), reward=float(not wrong), wrong_tables=wrong)

    async def end_session(self, session_id: str) -> None:
        """Forget the company: the episode is over."""
        self._companies.pop(session_id, None)


if __name__ == "__main__":
    WorkplaceAssistantResourcesServer.run_webserver()
