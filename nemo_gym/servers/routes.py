"""Routes that read one JSON body and answer with one model, without FastAPI's per-request machinery.

FastAPI still describes them (OpenAPI) and still serves every endpoint that asks for more:
query parameters, dependencies, forms, several bodies, plain functions.
"""

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.params import Body
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined
from starlette._utils import is_async_callable
from starlette.types import Receive, Scope, Send

from nemo_gym.coroutines import never_waits
from nemo_gym.http.local import Answer

_IS_JSON = (b"content-type", b"application/json")
_OK = int(HTTPStatus.OK)

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def reads_only(endpoint: _Endpoint) -> _Endpoint:
    """Mark an endpoint that changes nothing of its body: a caller in this process may hand over an object it keeps."""
    endpoint.reads_only = True  # type: ignore[attr-defined]
    return endpoint


class DirectRoute(APIRoute):
    """An `APIRoute` that takes the short way when the endpoint allows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _takes_only_a_body(self):
            self.app = DirectCall(self)


def _takes_only_a_body(route: APIRoute) -> bool:
    needs = route.dependant
    others = [
        *needs.path_params,
        *needs.query_params,
        *needs.header_params,
        *needs.cookie_params,
        *needs.dependencies,
        needs.websocket_param_name,
        needs.http_connection_param_name,
        needs.background_tasks_param_name,
        needs.security_scopes_param_name,
    ]
    if any(others) or len(needs.body_params) > 1 or not is_async_callable(route.endpoint):
        return False
    return all(type(field.field_info) is Body and not field.field_info.embed for field in needs.body_params)


class DirectCall:
    """One such endpoint: called with a body, or as the ASGI app of its route."""

    def __init__(self, route: APIRoute) -> None:
        needs = route.dependant
        self._endpoint: Callable[..., Awaitable[Any]] = route.endpoint
        self.never_waits = never_waits(route.endpoint)
        self._request_name = needs.request_param_name
        self._response_name = needs.response_param_name
        self._status = int(route.status_code or _OK)
        self._taken_over: Any = None
        self._body_name: str | None = None
        if needs.body_params:
            field = needs.body_params[0]
            self._body_name = field.name
            self._body_type: TypeAdapter[Any] = TypeAdapter(field.field_info.annotation or Any)
            self._body_default = field.field_info.get_default(call_default_factory=True)
            if getattr(self._endpoint, "reads_only", False) and not self._request_name:
                self._taken_over = field.field_info.annotation

    def takes(self, content: Any) -> bool:
        """Whether the endpoint takes this very object: it has the right type, so it was validated when it was made."""
        return content is not None and type(content) is self._taken_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        result = await self.answer(scope, await Request(scope, receive).body(), receive)
        if isinstance(result, Answer):
            result = _as_response(result)
        await result(scope, receive, send)

    async def answer(self, scope: Scope, body: bytes, receive: Receive, content: Any = None) -> Answer | Response:
        """What the endpoint says to `body`, or to `content`; a response of its own making is returned as it is."""
        arguments: dict[str, Any] = {}
        if self._request_name:
            request = Request(scope, receive)
            request._body = body  # what `await request.body()` keeps, had it read the stream itself
            arguments[self._request_name] = request
        if self._body_name:
            arguments[self._body_name] = self._validated(body) if content is None else content
        if not self._response_name:
            return self._answer(await self._endpoint(**arguments), None)
        response = arguments[self._response_name] = Response()
        return self._answer(await self._endpoint(**arguments), response)

    def _validated(self, body: bytes) -> Any:
        if not body and self._body_default is not PydanticUndefined and self._body_default is not ...:
            return self._body_default
        try:
            return self._body_type.validate_json(body)
        except ValidationError as error:
            found = [{**item, "loc": ("body", *item["loc"])} for item in error.errors(include_url=False)]
        except Exception as error:  # noqa: BLE001 - a validator may raise anything; the request is what is wrong
            found = [{"type": "value_error", "loc": ("body",), "msg": f"{type(error).__name__}: {error}"}]
        raise RequestValidationError(found)

    def _answer(self, result: Any, response: Response | None) -> Answer | Response:
        if isinstance(result, Response | Answer):
            return result
        body = to_json(result)
        headers = [(b"content-length", b"%d" % len(body)), _IS_JSON]
        if response is None:
            return Answer(self._status, headers, body, result)
        headers.extend(item for item in response.raw_headers if item[0] != b"content-length")
        return Answer(response.status_code or self._status, headers, body, result)


def _as_response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = answer.headers
    return response


def json_answer(body: bytes, content: Any = None) -> Answer:
    """The answer of an endpoint that has its JSON already; for endpoints that take no more than a body.

    `content` is what the JSON says, for callers in this process.
    """
    return Answer(_OK, [(b"content-length", b"%d" % len(body)), _IS_JSON], body, content)


def to_json(result: Any) -> bytes:
    """A handler's result as JSON: models as they are, anything else as FastAPI would."""
    if isinstance(result, BaseModel):
        return result.__pydantic_serializer__.to_json(result, by_alias=True, warnings=False)
    try:
        return orjson.dumps(result, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # also for numbers of more than 64 bits
        return json.dumps(jsonable_encoder(result), separators=(",", ":")).encode()
