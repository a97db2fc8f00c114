"""Routes that read one JSON body and write one JSON answer.

An answer to a row holds the whole row, whatever the handler's types declare of it (`answers_with_row`). `row_faults`
says whether handlers would accept a row, without calling one.
"""

import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, get_args, get_origin

import orjson
from fastapi import Request, Response
from fastapi.dependencies.utils import get_typed_return_annotation, get_typed_signature
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.params import Body
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, PydanticUndefined
from starlette._utils import is_async_callable

from nemo_gym.http.model_answers import without_half_pairs
from nemo_gym.jsonl import cut_levels
from nemo_gym.schemas.run_requests import BaseRunRequest, BaseVerifyRequest, RowFault, faults_in, forget, with_row

_SOME_RESPONSE = {
    "id": "resp_0",
    "created_at": 0,
    "model": "none",
    "object": "response",
    "status": "completed",
    "output": [
        {
            "id": "msg_0",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
Handler = Callable[..., Any]
logger = logging.getLogger(__name__)

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class JsonRoute(APIRoute):
    """Route of an `async` endpoint that takes one JSON body, or none, besides the request.

    The body is parsed and validated in one step, whatever its content type says, and the result is written as it is.
    FastAPI describes these routes (OpenAPI) and serves every endpoint that asks for more: query parameters,
    dependencies, forms, several bodies, plain functions.
    """

    when_refused: Callable[[Request], Awaitable[Response | None]] | None = None
    """Asked about a body that does not fit the endpoint's type: its answer, or None if it is refused."""
    reads_json: bool
    """Whether the endpoint is one of these; FastAPI serves it otherwise."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request of this route."""
        self.reads_json = _takes_only_a_body(self)
        if not self.reads_json:
            return super().get_route_handler()
        needs = self.dependant
        endpoint: Callable[..., Awaitable[Any]] = self.endpoint
        body = _declared_body(self)
        status = int(self.status_code or HTTPStatus.OK)

        async def answer(request: Request) -> Response:
            arguments: dict[str, Any] = {}
            if needs.request_param_name:
                arguments[needs.request_param_name] = request
            if body is not None:
                try:
                    arguments[body.name] = body.read(await request.body())
                except RequestValidationError:
                    other = None if self.when_refused is None else await self.when_refused(request)
                    if other is None:
                        raise
                    return other
            given = Response()
            given.status_code = None  # type: ignore[assignment]  # as FastAPI hands it out: unset
            if needs.response_param_name:
                arguments[needs.response_param_name] = given
            result = await endpoint(**arguments)
            if isinstance(result, Response):
                return result
            answered = Response(to_json(result), given.status_code or status, media_type="application/json")
            answered.raw_headers += [header for header in given.raw_headers if header[0] != b"content-length"]
            return answered

        return answer


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


def _declared_body(route: APIRoute) -> "JsonBody | None":
    for field in route.dependant.body_params:
        default = field.field_info.get_default(call_default_factory=True)
        return JsonBody(field.field_info.annotation or Any, name=field.name, default=default)
    return None


class JsonBody:
    """The type of a request's body, and how it is read."""

    def __init__(self, annotation: Any, *, name: str = "body", default: Any = PydanticUndefined) -> None:
        self.name = name
        self._type: TypeAdapter[Any] = TypeAdapter(annotation)
        self._has_default = default is not PydanticUndefined and default is not ...
        self._default = default
        self._most_levels: int | None = getattr(annotation, "MOST_LEVELS", None)

    def read(self, body: bytes) -> Any:
        """Return the body as its type.

        Raises:
            RequestValidationError: it does not fit.
        """
        if not body and self._has_default:
            return self._default
        try:
            return self._type.validate_json(body)
        except ValidationError as error:
            if (shallow := self._cut(body, error)) is not None:
                return self.read(shallow)
            found = [{**item, "loc": ("body", *item["loc"])} for item in error.errors(include_url=False)]
        except Exception as error:  # noqa: BLE001 - a validator may raise anything; the request is what is wrong
            found = [{"type": "value_error", "loc": ("body",), "msg": f"{type(error).__name__}: {error}"}]
        raise RequestValidationError(found)

    def _cut(self, body: bytes, error: ValidationError) -> bytes | None:
        """Return the body without what is nested too deep for a parser, if that is the error; None otherwise."""
        if self._most_levels is None or "recursion limit" not in str(error.errors(include_input=False)):
            return None
        shallow = cut_levels(body, self._most_levels)
        if shallow == body:
            return None
        logger.warning("what is nested more than %d levels deep in a request is read as null", self._most_levels)
        return shallow


def described_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI says of an endpoint that reads a body of this type itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def json_answer(body: bytes, content: Any = None) -> Response:
    """Return the response of an endpoint that has its JSON already; `content` is not used."""
    return Response(body, media_type="application/json")


def to_json(result: Any) -> bytes:
    """Return a handler's result as JSON: models as they are, anything else as FastAPI would."""
    if isinstance(result, BaseModel):
        try:
            return result.model_dump_json(by_alias=True, warnings=False).encode()
        except PydanticSerializationError:  # of half a surrogate pair, which a model can escape in JSON of its own
            content = result.model_dump(mode="json", by_alias=True, warnings=False)
            return without_half_pairs(json.dumps(content, separators=(",", ":")).encode())
    try:
        return orjson.dumps(result, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # also for numbers of more than 64 bits
        return json.dumps(jsonable_encoder(result), separators=(",", ":")).encode()


def reads_only(endpoint: _Endpoint) -> _Endpoint:
    """Return `endpoint` as it is; programs mark endpoints with it that do not change their body."""
    return endpoint


def never_waits(endpoint: _Endpoint) -> _Endpoint:
    """Return `endpoint` as it is; programs mark endpoints with it that await nothing."""
    return endpoint


def takes_unread(endpoint: _Endpoint) -> _Endpoint:
    """Return `endpoint` as it is; programs mark endpoints with it that read their body themselves."""
    return endpoint


async def body_as_it_came(request: Request) -> bytes:
    """Return the body of a request."""
    return await request.body()


def answers_with_row(handler: _Handler) -> _Handler:
    """`handler` of `/run` or `/verify` for use as a route: its answer has the fields of the row that it lacks.

    A row that holds what the handler is to find out, because it is a rollout of an earlier run, comes without.
    """
    types = models_of(handler)
    name = next((name for name, model in types.items() if name != "return" and issubclass(model, BaseRunRequest)), None)
    if name is None:
        return handler
    found_out = _found_out(types[name], types.get("return"))

    if not inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        def answered(**arguments: Any) -> Any:
            row = arguments[name]
            if found_out:
                forget(row, found_out)
            return with_row(handler(**arguments), row)

        return answered  # type: ignore[return-value]

    @functools.wraps(handler)
    async def answered_later(**arguments: Any) -> Any:
        row = arguments[name]
        if found_out:
            forget(row, found_out)
        return with_row(await handler(**arguments), row)

    return answered_later  # type: ignore[return-value]


def models_of(handler: Callable[..., Any]) -> dict[str, type[BaseModel]]:
    """The models among the types of a handler's parameters, and of its `return`."""
    hints = {name: given.annotation for name, given in get_typed_signature(handler).parameters.items()}
    hints["return"] = get_typed_return_annotation(handler)
    plain = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}
    return {name: hint for name, hint in plain.items() if isinstance(hint, type) and issubclass(hint, BaseModel)}


def _found_out(request: type[BaseModel], answer: type[BaseModel] | None) -> set[str]:
    """The fields that the answer declares and the request only lets pass."""
    if answer is None or request.model_config.get("extra") != "allow":
        return set()
    return set(answer.model_fields) - set(request.model_fields)


def row_faults(rows: Iterable[Mapping[str, Any]], handlers: Iterable[Handler]) -> list[list[RowFault]]:
    """For each row what the types of these handlers refuse in it; the same place is named once."""
    models = [model for handler in handlers if (model := _body_type(handler)) is not None]
    return [list({fault.where: fault for model in models for fault in _faults(row, model)}.values()) for row in rows]


def _body_type(handler: Handler) -> type[BaseModel] | None:
    """The model that a handler reads; None when it takes something else, or more."""
    bodies = [model for name, model in models_of(handler).items() if name != "return"]
    return bodies[0] if len(bodies) == 1 else None


def _faults(row: Mapping[str, Any], model: type[BaseModel]) -> list[RowFault]:
    sent = {**row, "response": _SOME_RESPONSE} if issubclass(model, BaseVerifyRequest) else row
    try:
        model.model_validate_json(orjson.dumps(sent))
    except ValidationError as error:
        return faults_in(error, row, model.model_fields)
    except Exception:  # noqa: BLE001 - an author's validator may raise anything, and perhaps because of our response
        return []
    return []
