"""PUBLIC: the tools of an environment as an MCP server, for agents that speak MCP and know nothing of our routes.

`expose_tools_over_mcp: true` in a resources server's block is all it takes. Every tool route becomes an MCP tool at
`/mcp`; `/seed_session` then also answers where that is, with a signed token that says whose session a call is made in;
`/verify` knows tools by the names that harnesses give them (`mcp__<server>__<tool>`).

A call takes the way of every other request, through the app with its middleware, so sessions, their end, errors and the
rollout a call belongs to are as they are without MCP.
"""

import inspect
import json
import logging
import re
import types
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Union, get_origin

from fastapi import FastAPI, Request
from fastapi.dependencies.utils import get_typed_return_annotation, get_typed_signature
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from nemo_gym import __version__
from nemo_gym.base_resources_server import (
    NEMO_GYM_MCP_METADATA_KEY,
    NEMO_GYM_MCP_SESSION_TOKEN_HEADER,
    RESERVED_TOOL_NAMES,
    MCPServerMetadata,
)
from nemo_gym.errors import ConfigError, did_you_mean, listed
from nemo_gym.http.in_memory import ADMITTED
from nemo_gym.rollout_correlation import RolloutContextMiddleware
from nemo_gym.servers.gateway import Gateway
from nemo_gym.servers.mcp import McpEndpoint, Rewriting, SessionTokens, ToolError, asked
from nemo_gym.servers.sessions import SESSION_ID_KEY, SESSION_RETURNS_KEY

__all__ = [
    "MCP_URL_PATH",
    "PERMISSIVE_SCHEMA",
    "TOKEN_HEADER",
    "BindResult",
    "CatchAll",
    "DirectBinding",
    "DirectDispatchError",
    "ExposureError",
    "MCPTool",
    "Tool",
    "bind_route",
    "call_direct",
    "harvest_tools",
    "install_auto_exposure",
    "maybe_auto_expose",
]

logger = logging.getLogger(__name__)

TOKEN_HEADER = NEMO_GYM_MCP_SESSION_TOKEN_HEADER
MCP_URL_PATH = "/mcp"
PERMISSIVE_SCHEMA: dict[str, Any] = {"type": "object", "additionalProperties": True}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_KNOWN_LAYERS: tuple[Any, ...] = (Gateway, RolloutContextMiddleware)
_JSON_HEADER = (b"content-type", b"application/json")


class ExposureError(ConfigError, ValueError):
    """Tools that cannot be offered over MCP as they are."""


@dataclass(frozen=True)
class DirectBinding:
    """A tool route whose parameters can be made of one JSON object."""

    endpoint: Callable[..., Any]
    path: str
    request_params: tuple[str, ...] = ()
    body_param: str | None = None
    body_model: type[BaseModel] | None = None
    path_param: str | None = None
    return_model: type[BaseModel] | None = None
    body_is_dict: bool = False
    is_coroutine: bool = False


@dataclass(frozen=True)
class BindResult:
    """Whether a route can be called with one JSON object, or why not."""

    binding: DirectBinding | None
    reasons: list[str]
    body_model: type[BaseModel] | None


@dataclass(frozen=True)
class Tool:
    """A tool as the protocol describes it; objects of the official SDK's class of that name do as well."""

    name: str
    inputSchema: dict[str, Any] = field(default_factory=lambda: dict(PERMISSIVE_SCHEMA))  # noqa: N815 - the wire's
    description: str | None = None


@dataclass(frozen=True)
class MCPTool:
    """One tool that is offered."""

    name: str
    tool: Any
    """How it is described: a `Tool`."""
    binding: DirectBinding | None = None
    path_value: str | None = None
    """What stands for the parameter in a path with one."""
    path: str | None = None
    reasons: tuple[str, ...] = ()
    """Why it cannot be called; such a tool must not be offered."""


@dataclass
class CatchAll:
    """A route whose path has a parameter: it can be any number of tools, which `mcp_tools` names."""

    path: str
    result: BindResult
    is_used: bool = False

    def tool(self, name: str, input_schema: dict[str, Any] | None = None, description: str | None = None) -> MCPTool:
        """The tool that is this route with `name` in its path."""
        self.is_used = True
        schema = input_schema or _schema(self.result.body_model)
        return MCPTool(
            name, Tool(name, schema, description), self.result.binding, name, self.path, tuple(self.result.reasons)
        )


class DirectDispatchError(Exception):
    """A tool answered with an error status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail

    def __reduce__(self) -> tuple[type["DirectDispatchError"], tuple[int, str]]:
        return type(self), (self.status, self.detail)


def bind_route(route: APIRoute) -> BindResult:
    """How a tool route's parameters are made of one JSON object: a request, one body, the parameter of its path."""
    requests: list[str] = []
    bodies: dict[str, Any] = {}
    path_param, reasons = None, []
    for name, parameter in get_typed_signature(route.endpoint).parameters.items():
        kind = parameter.annotation
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            reasons.append(f"it takes *{name}, so nobody knows what it reads")
        elif inspect.isclass(kind) and issubclass(kind, Request):
            requests.append(name)
        elif name in route.param_convertors:
            path_param = name
            reasons += [] if kind in (str, inspect.Parameter.empty) else [f"{name} of its path is no text"]
        elif _is_body(kind) and (parameter.default is parameter.empty or _is_required_body(parameter.default)):
            bodies[name] = kind
        else:
            reasons.append(f"its parameter {name} is neither a request nor a required body")
    if len(bodies) > 1:
        reasons.append(f"it takes {len(bodies)} bodies ({', '.join(bodies)})")
    if len(route.param_convertors) > 1:
        reasons.append(f"its path has {len(route.param_convertors)} parameters ({', '.join(route.param_convertors)})")
    body_param, body = next(iter(bodies.items()), (None, None))
    body_model = body if inspect.isclass(body) and issubclass(body, BaseModel) else None
    returned = get_typed_return_annotation(route.endpoint)
    binding = DirectBinding(
        endpoint=route.endpoint,
        path=route.path,
        request_params=tuple(requests),
        body_param=body_param,
        body_model=body_model,
        path_param=path_param,
        return_model=returned if inspect.isclass(returned) and issubclass(returned, BaseModel) else None,
        body_is_dict=body is not None and body_model is None,
        is_coroutine=inspect.iscoroutinefunction(route.endpoint),
    )
    return BindResult(None if reasons else binding, reasons, body_model)


def _is_body(kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return False
    plain = get_origin(kind) or kind
    return inspect.isclass(plain) and issubclass(plain, BaseModel | dict)


def _is_required_body(default: Any) -> bool:
    """Whether a default is FastAPI's `Body()`, without a value of its own."""
    return bool(getattr(default, "is_required", lambda: False)())


def harvest_tools(app: FastAPI, server: Any) -> dict[str, MCPTool]:
    """The tools that are routes of their own, by name; routes by which an environment is run are none."""
    tools: dict[str, MCPTool] = {}
    for route in _tool_routes(app):
        if route.param_convertors:
            continue
        result, name = bind_route(route), route.path.lstrip("/")
        described = Tool(name, _schema(result.body_model), route.description or route.summary or None)
        tool = MCPTool(name, described, result.binding, None, route.path, tuple(result.reasons))
        tools.setdefault(name, tool)  # of two routes with one path, the first answers
    return tools


def _tool_routes(app: FastAPI) -> list[APIRoute]:
    posted = [route for route in app.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())]
    return [route for route in posted if route.path.lstrip("/") not in RESERVED_TOOL_NAMES]


def _catch_all(app: FastAPI, name: str) -> CatchAll | None:
    found = [route for route in _tool_routes(app) if route.param_convertors]
    if len(found) > 1:
        paths = listed(route.path for route in found)
        raise ExposureError(f"{name}: {len(found)} routes have a parameter in their path ({paths}); one can be tools")
    return CatchAll(found[0].path, bind_route(found[0])) if found else None


def _schema(model: type[BaseModel] | None) -> dict[str, Any]:
    return dict(PERMISSIVE_SCHEMA) if model is None else model.model_json_schema()


def maybe_auto_expose(server: Any, app: FastAPI) -> dict[str, MCPTool] | None:
    """Offer the tools of `server` if its config says so; the tools by name, None if it does not."""
    if not getattr(server.config, "expose_tools_over_mcp", False):
        return None
    return install_auto_exposure(server, app)


def install_auto_exposure(server: Any, app: FastAPI) -> dict[str, MCPTool]:
    """Offer the tools of `server` at `/mcp` of its app, and return them by name.

    Raises:
        ValueError: the app has layers that are not ours, a route at `/mcp`, or a tool that cannot be offered.
    """
    name = server.config.name or type(server).__name__
    if any(getattr(route, "path", None) == MCP_URL_PATH for route in app.routes):
        raise ExposureError(f"{name}: its app has a route {MCP_URL_PATH} of its own; take it out, or the flag")
    layers: list[Any] = [layer.cls for layer in app.user_middleware]
    foreign = [str(getattr(layer, "__name__", layer)) for layer in layers if layer not in _KNOWN_LAYERS]
    if foreign:
        raise ExposureError(f"{name}: its app has middleware that MCP calls are not made for: {listed(foreign)}")
    catchall = _catch_all(app, name)
    chosen = server.mcp_tools(list(harvest_tools(app, server).values()), catchall) or []
    tools = _checked(chosen, name)
    if catchall is not None and not any(tool.path == catchall.path for tool in tools.values()):
        logger.warning("%s: no tool is offered through %s; name some in mcp_tools", name, catchall.path)
    tokens = SessionTokens(server.get_session_middleware_key(), server._session_secret())
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.path == "/seed_session":
            route.app = _Seeding(route.app, server, tokens, name)
        elif isinstance(route, APIRoute) and route.path == "/verify":
            route.app = _Verifying(route.app, server.normalize_tool_name)
    endpoint = McpEndpoint(name, __version__, _Tools(app, tools, tokens))
    for path in (f"{MCP_URL_PATH}/{{rest:path}}", MCP_URL_PATH):
        app.router.routes.insert(0, Route(path, endpoint, include_in_schema=False))
    logger.info("%s offers %d tools over MCP: %s", name, len(tools), listed(tools))
    return tools


def _checked(chosen: list[MCPTool], server: str) -> dict[str, MCPTool]:
    tools: dict[str, MCPTool] = {}
    for tool in chosen:
        if not isinstance(tool, MCPTool):
            raise ExposureError(f"{server}: mcp_tools must return tools that it was given or `catchall` made: {tool!r}")
        if tool.binding is None:
            why = "; ".join(tool.reasons) or "it has no route"
            raise ExposureError(f"{server}: {tool.name!r} cannot be a tool over MCP: {why}")
        if not _NAME.fullmatch(tool.name) or tool.name in RESERVED_TOOL_NAMES:
            raise ExposureError(
                f"{server}: {tool.name!r} is no name for a tool: letters, digits, _ and -, none of ours"
            )
        if tool.name in tools:
            raise ExposureError(f"{server}: two tools are called {tool.name!r}")
        tools[tool.name] = tool
    return tools


class _Tools:
    """The tools of one environment, as `McpEndpoint` wants them."""

    def __init__(self, app: FastAPI, tools: Mapping[str, MCPTool], tokens: SessionTokens) -> None:
        self._app = app
        self._tools = tools
        self._tokens = tokens

    def list_tools(self, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """All of them, or those that the caller's token names."""
        said = self._tokens.read(headers.get(TOKEN_HEADER))
        allowed = None if said is None else said["tools"]
        return [_described(tool) for name, tool in self._tools.items() if allowed is None or name in allowed]

    async def call_tool(self, name: str, arguments: dict[str, Any], request: Request) -> Any:
        """Call the route behind a tool, in the session of the caller's token."""
        tool = self._tools.get(name)
        if tool is None or tool.binding is None:
            raise ToolError(
                f"there is no tool {name!r}{did_you_mean(name, self._tools)}; there are {listed(self._tools)}"
            )
        said = self._tokens.read(request.headers.get(TOKEN_HEADER))
        if said is None:
            raise ToolError(f"the header {TOKEN_HEADER} is missing, or is not one that /seed_session of this run gave")
        if said["tools"] is not None and name not in said["tools"]:
            raise ToolError(f"this session may not use {name!r}; it may use {listed(said['tools'])}")
        try:
            return await call_direct(self._app, tool.binding, said["sid"], arguments, tool.path_value)
        except DirectDispatchError as error:
            raise ToolError(f"HTTP {error.status} from POST /{name}: {error.detail}") from error


def _described(tool: MCPTool) -> dict[str, Any]:
    described = tool.tool
    schema = getattr(described, "inputSchema", None) or getattr(described, "input_schema", None) or PERMISSIVE_SCHEMA
    shown = {"name": tool.name, "inputSchema": schema}
    description = getattr(described, "description", None)
    return {**shown, "description": description} if description else shown


async def call_direct(
    app: FastAPI, binding: DirectBinding, session_id: str, arguments: dict[str, Any], path_value: str | None = None
) -> Any:
    """What a tool route answers to `arguments` in a session: its JSON.

    Raises:
        DirectDispatchError: it answers with an error status.
    """
    path = re.sub(r"\{[^{}]*\}", lambda _: path_value or "", binding.path)
    body = json.dumps(arguments).encode()
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), _JSON_HEADER, (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "session": {SESSION_ID_KEY: session_id},
        SESSION_RETURNS_KEY: True,
        ADMITTED: True,
    }
    status, content, _ = await asked(app, scope, body)
    if status >= HTTPStatus.BAD_REQUEST:
        raise DirectDispatchError(status, _detail(content))
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")


def _detail(content: bytes) -> str:
    try:
        said = json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
    detail = said.get("detail", said) if isinstance(said, dict) else said
    return detail if isinstance(detail, str) else json.dumps(detail, ensure_ascii=False)


class _Seeding(Rewriting):
    """`/seed_session`, which also answers where the session's tools are."""

    def __init__(self, app: ASGIApp, server: Any, tokens: SessionTokens, name: str) -> None:
        super().__init__(app)
        self._server = server
        self._tokens = tokens
        self._name = name

    def coming(self, body: bytes) -> tuple[bytes, Any]:
        return body, _loaded(body) or {}

    def going(self, content: bytes, note: Any, scope: Scope) -> bytes:
        said = _loaded(content)
        if said is None or NEMO_GYM_MCP_METADATA_KEY in said:
            return content
        allowed = _names(self._server.mcp_allowed_tools_for_session(deepcopy(note)))
        token = self._tokens.make(scope["session"][SESSION_ID_KEY], allowed)
        metadata = MCPServerMetadata(server_name=self._name, url_path=MCP_URL_PATH, headers={TOKEN_HEADER: token})
        return json.dumps({**said, NEMO_GYM_MCP_METADATA_KEY: metadata.model_dump()}).encode()


def _names(allowed: Any) -> list[str] | None:
    """What `mcp_allowed_tools_for_session` returned; a text is refused, as a tool would be looked for inside it."""
    if allowed is None:
        return None
    if not isinstance(allowed, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in allowed):
        raise TypeError(f"mcp_allowed_tools_for_session must return a list of names, or None for all: {allowed!r}")
    return sorted(allowed) if isinstance(allowed, set | frozenset) else list(allowed)


class _Verifying(Rewriting):
    """`/verify`, which is told the tools' own names, and answers with those that it was given."""

    def __init__(self, app: ASGIApp, normalize: Callable[[str], str]) -> None:
        super().__init__(app)
        self._normalize = normalize

    def coming(self, body: bytes) -> tuple[bytes, Any]:
        said = _loaded(body)
        given: dict[Any, str] = {}
        for call in _calls_in(said):
            own = self._normalize(call["name"])
            if own != call["name"]:
                given[call.get("call_id")] = call["name"]
                call["name"] = own
        return (json.dumps(said).encode(), given) if given else (body, given)

    def going(self, content: bytes, note: Any, scope: Scope) -> bytes:
        said = _loaded(content) if note else None
        for call in _calls_in(said):
            call["name"] = note.get(call.get("call_id"), call["name"])
        return content if said is None else json.dumps(said).encode()


def _calls_in(said: dict[str, Any] | None) -> list[dict[str, Any]]:
    response = (said or {}).get("response")
    output = response.get("output") if isinstance(response, dict) else None
    items = output if isinstance(output, list) else []
    return [
        item
        for item in items
        if isinstance(item, dict) and item.get("type") == "function_call" and isinstance(item.get("name"), str)
    ]


def _loaded(body: bytes) -> dict[str, Any] | None:
    """A body that is a JSON object; None for any other."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
