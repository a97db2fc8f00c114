"""Tools over the Model Context Protocol: JSON-RPC in the body of a POST, answered in the answer's body.

This is the part of the protocol's streamable HTTP transport that tools need: the handshake, `ping`, `tools/list` and
`tools/call`. Nothing is kept between requests, so every worker and replica can answer each of them, and no stream is
ever opened, so a GET is refused, as the protocol allows. Whose tools these are, and who may call them, is said by the
`ToolBox`. Below is what it takes to fit this into an app that has sessions: tokens that name one, and routes whose JSON
is looked at on the way.
"""

import asyncio
import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from hashlib import blake2b
from http import HTTPStatus
from secrets import token_hex
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.servers.gateway import read_body

PROTOCOL_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Those that begin with a handshake, oldest first; between them nothing differs that is used here."""
_PARSE_ERROR, _INVALID_REQUEST, _UNKNOWN_METHOD, _INVALID_PARAMS = -32700, -32600, -32601, -32602


class ToolBox(Protocol):
    """What is offered."""

    def list_tools(self, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """The tools that a caller with these headers may use, as the protocol describes tools."""

    async def call_tool(self, name: str, arguments: dict[str, Any], request: Request) -> Any:
        """What a tool answers: text, or anything that is JSON.

        Raises:
            ToolError: it cannot be called, or failed; the model is told.
        """


class ToolError(Exception):
    """A tool call that failed; the text is for the model that made it."""


class _RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class McpEndpoint:
    """An ASGI app that offers a toolbox."""

    def __init__(self, name: str, version: str, tools: ToolBox) -> None:
        self._info = {"name": name, "version": version}
        self._tools = tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        request = Request(scope, receive)
        response = await self._answer(request)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.method != "POST":
            return Response(status_code=HTTPStatus.METHOD_NOT_ALLOWED, headers={"allow": "POST"})
        try:
            messages = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            return _json(_error(None, _PARSE_ERROR, f"the body is not JSON: {error}"), HTTPStatus.BAD_REQUEST)
        if not isinstance(messages, list):
            answer = await self._reply(messages, request)
            return Response(status_code=HTTPStatus.ACCEPTED) if answer is None else _json(answer)
        answers = [await self._reply(message, request) for message in messages]
        kept = [answer for answer in answers if answer is not None]
        return _json(kept) if kept else Response(status_code=HTTPStatus.ACCEPTED)

    async def _reply(self, message: Any, request: Request) -> dict[str, Any] | None:
        """The answer to one message; None to one that wants none."""
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return _error(None, _INVALID_REQUEST, "a message is an object with jsonrpc 2.0")
        if not isinstance(message.get("method"), str):  # an answer to a question that was never asked
            return None
        identifier = message.get("id")
        if identifier is None:
            return None
        params = message.get("params") or {}
        try:
            if not isinstance(params, dict):
                raise _RpcError(_INVALID_PARAMS, "params must be an object")
            result = await self._result(message["method"], params, request)
        except _RpcError as error:
            return _error(identifier, error.code, str(error))
        return {"jsonrpc": "2.0", "id": identifier, "result": result}

    async def _result(self, method: str, params: dict[str, Any], request: Request) -> dict[str, Any]:
        if method == "initialize":
            asked = params.get("protocolVersion")
            version = asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[-1]
            capabilities = {"tools": {"listChanged": False}}
            return {"protocolVersion": version, "capabilities": capabilities, "serverInfo": self._info}
        if method == "ping":
            return {}
        if method == "tools/list":
            return {"tools": self._tools.list_tools(request.headers)}
        if method == "tools/call":
            return await self._call(params, request)
        raise _RpcError(_UNKNOWN_METHOD, f"there is no method {method!r}: this server offers tools")

    async def _call(self, params: dict[str, Any], request: Request) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _RpcError(_INVALID_PARAMS, "tools/call wants a name and an object of arguments")
        try:
            return _tool_result(await self._tools.call_tool(name, arguments, request))
        except ToolError as error:
            return {"content": [{"type": "text", "text": str(error)}], "isError": True}


def _tool_result(value: Any) -> dict[str, Any]:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    result = {"content": [{"type": "text", "text": text}], "isError": False}
    return {**result, "structuredContent": value} if isinstance(value, dict) else result


def _error(identifier: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identifier, "error": {"code": code, "message": message}}


def _json(content: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


class SessionTokens:
    """Makes and reads the tokens that say whose session a call is made in, and which tools it may use.

    They are signed with the run's secret, which every worker, replica and restarted server has and no agent knows.
    """

    def __init__(self, cookie_name: str, secret: str | None) -> None:
        text = f"mcp\0{cookie_name}\0{secret or token_hex(32)}"
        self._key = blake2b(text.encode(), digest_size=blake2b.MAX_KEY_SIZE).digest()

    def make(self, session_id: str, tools: list[str] | None) -> str:
        """The token of a session that may use `tools`; None: all of them."""
        payload = urlsafe_b64encode(json.dumps({"sid": session_id, "tools": tools}).encode())
        return (payload + b"." + self._signature(payload)).decode()

    def read(self, token: str | None) -> dict[str, Any] | None:
        """What a token says; None for one that is not ours."""
        payload, _, signature = (token or "").encode("latin-1", "replace").partition(b".")
        if not hmac.compare_digest(signature, self._signature(payload)):
            return None
        try:
            said: dict[str, Any] = json.loads(urlsafe_b64decode(payload))
        except ValueError:
            return None
        return said

    def _signature(self, payload: bytes) -> bytes:
        return blake2b(payload, key=self._key, digest_size=24).hexdigest().encode()


async def asked(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """Status, body and headers of what an app answers to one request."""
    start: Message = {}
    chunks: list[bytes] = []
    bodies = [body]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()  # nobody goes away: whoever waits for that is cancelled with its answer
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return start["status"], b"".join(chunks), list(start.get("headers", ()))


class Rewriting:
    """A route whose JSON is looked at on its way in and out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        body, is_complete = await read_body(receive)
        if not is_complete:
            return
        inner, note = self.coming(body)
        status, content, headers = await asked(self._app, scope, inner)
        if status < HTTPStatus.BAD_REQUEST:
            content = self.going(content, note, scope)
        kept = [header for header in headers if header[0].lower() != b"content-length"]
        kept.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": status, "headers": kept})
        await send({"type": "http.response.body", "body": content})

    def coming(self, body: bytes) -> tuple[bytes, Any]:
        """The body that the route gets, and what to remember until it has answered."""
        raise NotImplementedError

    def going(self, content: bytes, note: Any, scope: Scope) -> bytes:
        """What is answered in place of `content`, if the route answers well."""
        raise NotImplementedError
