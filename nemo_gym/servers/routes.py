"""Routes that read one JSON body and answer with one model, without FastAPI's per-request machinery.

FastAPI still describes them (OpenAPI) and still serves every endpoint that asks for more:
query parameters, dependencies, forms, several bodies, plain functions. An answer to a row holds the whole row, whatever
the handler's types declare of it. Whether handlers would take a row can be asked without calling one (`row_faults`).
"""

import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

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
from starlette.types import Receive, Scope, Send

from nemo_gym.http.model_answers import without_half_pairs
from nemo_gym.http.transports.memory import Answer
from nemo_gym.jsonl import cut_levels
from nemo_gym.schemas.run_requests import BaseRunRequest, BaseVerifyRequest, RowFault, faults_in, forget, with_row
from nemo_gym.schemas.token_lists import can_be_filled_in, fill_in, json_of, texts_beside
from nemo_gym.schemas.wire import (
    ACCOUNT_BYTES,
    IN_PARTS,
    LONG_BYTES,
    LONG_PARTS,
    WRITTEN_BY_US,
    ListsBeside,
    RowWithResponse,
    long_parts_header,
)

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

_IN_PARTS = "nemo_gym_body_in_parts"
_IS_JSON = (b"content-type", b"application/json")
_OK = int(HTTPStatus.OK)
_WHOLE = (Answer, Response)
_as_answer = tuple.__new__
"""Makes an `Answer` of its fields, in a third of the time that its own constructor takes."""
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def reads_only(endpoint: _Endpoint) -> _Endpoint:
    """Mark an endpoint that changes nothing of its body: a caller in this process may hand over an object it keeps.

    For `/verify` that is the response; its answer may hold it, too.
    """
    endpoint.reads_only = True  # type: ignore[attr-defined]
    return endpoint


def never_waits(endpoint: _Endpoint) -> _Endpoint:
    """Mark an `async` endpoint whose code awaits nothing: a caller in this process gets its answer at once.

    Other endpoints run in a task of their own, so that they are carried out even if their caller vanishes. A marked one
    that waits after all is answered with an error that says so.
    """
    endpoint.never_waits = True  # type: ignore[attr-defined]
    return endpoint


class Unread(NamedTuple):
    """The body of a request that nobody has parsed."""

    content: bytes
    read: Callable[[bytes], Any]
    """What the endpoint's own type makes of it; raises what a caller is told otherwise."""


def takes_unread(endpoint: _Endpoint) -> _Endpoint:
    """Mark an endpoint that is given its body as `Unread`, for bodies that are too large to be there twice."""
    endpoint.takes_unread = True  # type: ignore[attr-defined]
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
        self.never_waits = bool(getattr(route.endpoint, "never_waits", False))
        self.otherwise: Callable[[Request], Awaitable[Response | Answer | None]] | None = None
        """Asked about a body that does not fit the endpoint's type: its answer, or None if it is refused."""
        self._request_name = needs.request_param_name
        self._response_name = needs.response_param_name
        self._status = int(route.status_code or _OK)
        self._takes_unread = bool(getattr(route.endpoint, "takes_unread", False))
        self._taken_over: tuple[Any, ...] = ()
        self._body_name: str | None = None
        self._most_levels: int | None = None
        if needs.body_params:
            field = needs.body_params[0]
            self._body_name = field.name
            self._body_type: TypeAdapter[Any] = TypeAdapter(field.field_info.annotation or Any)
            self._most_levels = getattr(field.field_info.annotation, "MOST_LEVELS", None)
            self._body_default = field.field_info.get_default(call_default_factory=True)
            reads_only = getattr(self._endpoint, "reads_only", False) and not self._request_name
            if can_be_filled_in(field.field_info.annotation):
                self._taken_over = (ListsBeside, RowWithResponse) if reads_only else (ListsBeside,)
            if reads_only:
                self._taken_over += (field.field_info.annotation,)

    def takes(self, content: Any) -> bool:
        """Whether the endpoint takes this very object: it has the right type, so it was validated when it was made."""
        return type(content) in self._taken_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        result = await self.answer(scope, await Request(scope, receive).body(), receive)
        if isinstance(result, Answer):
            result = _as_response(result)
        await result(scope, receive, send)

    async def answer(self, scope: Scope, body: bytes, receive: Receive, content: Any = None) -> Answer | Response:
        """What the endpoint says to `body`, or to `content`; a response of its own making is returned as it is."""
        arguments: dict[str, Any] = {}
        may_be_long = type(content) is ListsBeside or len(body) >= LONG_BYTES
        if type(content) in IN_PARTS:
            body = content.whole() if self._request_name else b""
        elif may_be_long and content is None and ListsBeside in self._taken_over:
            content = texts_beside(body)
        if self._request_name:
            arguments[self._request_name] = _request_with(body, scope, receive, content)
        if self._body_name:
            if self._takes_unread:
                content = Unread(body, self._validated)
            try:
                arguments[self._body_name] = self._validated(body) if content is None else self._taken(content)
            except RequestValidationError:
                whole = content.whole() if type(content) in IN_PARTS else body
                other = None if self.otherwise is None else await self.otherwise(_request_with(whole, scope, receive))
                if other is None:
                    raise
                return other
        if not self._response_name:
            return self._answer(await self._endpoint(**arguments), None, may_be_long)
        response = arguments[self._response_name] = Response()
        return self._answer(await self._endpoint(**arguments), response, may_be_long)

    def _validated(self, body: bytes) -> Any:
        if not body and self._body_default is not PydanticUndefined and self._body_default is not ...:
            return self._body_default
        try:
            return self._body_type.validator.validate_json(body)  # a step less than the adapter's own method
        except ValidationError as error:
            if (shallow := self._cut(body, error)) is not None:
                return self._validated(shallow)
            found = [{**item, "loc": ("body", *item["loc"])} for item in error.errors(include_url=False)]
        except Exception as error:  # noqa: BLE001 - a validator may raise anything; the request is what is wrong
            found = [{"type": "value_error", "loc": ("body",), "msg": f"{type(error).__name__}: {error}"}]
        raise RequestValidationError(found)

    def _taken(self, content: Any) -> Any:
        return self._filled_in(content) if type(content) in IN_PARTS else content

    def _filled_in(self, content: ListsBeside | RowWithResponse) -> Any:
        try:
            read = self._body_type.validator.validate_json(content.envelope)
        except Exception:  # noqa: BLE001 - a validator may raise anything
            return self._validated(content.whole())  # which words it
        if isinstance(content, RowWithResponse):
            read.__dict__["response"] = content.response
            return read
        return read if fill_in(read, content.lists) else self._validated(content.whole())

    def _cut(self, body: bytes, error: ValidationError) -> bytes | None:
        """The body without what is too deep for a parser, if that is the `error` and the body's type wants it so."""
        if self._most_levels is None or "recursion limit" not in str(error.errors(include_input=False)):
            return None
        shallow = cut_levels(body, self._most_levels)
        if shallow == body:
            return None
        name = getattr(self._endpoint, "__name__", "")
        logger.warning("%s: what is nested more than %d levels deep is read as null", name, self._most_levels)
        return shallow

    def _answer(self, result: Any, response: Response | None, may_be_long: bool) -> Answer | Response:
        if isinstance(result, _WHOLE):
            return result
        body, long = written(result, may_be_long)
        length = len(body)
        headers = [(b"content-length", b"%d" % length), _IS_JSON]
        if length >= LONG_BYTES and isinstance(result, BaseModel):
            headers += (WRITTEN_BY_US, *long_parts_header(long))
        if response is None:
            return _as_answer(Answer, (self._status, headers, body, result))
        headers.extend(item for item in response.raw_headers if item[0] != b"content-length")
        return Answer(response.status_code or self._status, headers, body, result)


async def body_as_it_came(request: Request) -> bytes | ListsBeside:
    """The body of a request, to be passed on: with long texts beside it if it was read so."""
    beside: ListsBeside | None = getattr(request, _IN_PARTS, None)
    return await request.body() if beside is None else beside


def _request_with(body: bytes, scope: Scope, receive: Receive, content: Any = None) -> Request:
    request = Request(scope, receive)
    request._body = body  # what `await request.body()` keeps, had it read the stream itself
    if type(content) is ListsBeside:
        setattr(request, _IN_PARTS, content)
    return request


def _as_response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = answer.headers
    return response


def json_answer(body: bytes, content: Any = None, *, passed_on: Any = None, account_bytes: int = 0) -> Answer:
    """The answer of an endpoint that has its JSON already; for endpoints that take no more than a body.

    `content` is what the JSON says, for callers in this process; `passed_on` the answer of another server, if it is
    that one's JSON as it came; `account_bytes` the length of the `ng_trajectory` it ends with, if orjson wrote that.
    """
    length = len(body)
    headers = [(b"content-length", b"%d" % length), _IS_JSON]
    if length >= LONG_BYTES and passed_on is not None:
        headers += [header for header in passed_on.raw_headers if header == WRITTEN_BY_US or header[0] == LONG_PARTS]
    if account_bytes:
        headers.append((ACCOUNT_BYTES, b"%d" % account_bytes))
    return _as_answer(Answer, (_OK, headers, body, content))


def to_json(result: Any) -> bytes:
    """A handler's result as JSON: models as they are, anything else as FastAPI would."""
    return written(result)[0]


def written(result: Any, may_be_long: bool = True) -> tuple[bytes, list[tuple[int, int]]]:
    """The same, and from where to where what is long is in it, if anything may be."""
    if isinstance(result, BaseModel):
        try:
            found = json_of(result, by_alias=True, warnings=False) if may_be_long else None
            return found or (result.__pydantic_serializer__.to_json(result, by_alias=True, warnings=False), [])
        except PydanticSerializationError:  # of half a surrogate pair, which a model can escape in JSON of its own
            content = result.model_dump(mode="json", by_alias=True, warnings=False)
            return without_half_pairs(json.dumps(content, separators=(",", ":")).encode()), []
    try:
        return orjson.dumps(result, option=orjson.OPT_NON_STR_KEYS), []
    except TypeError:  # also for numbers of more than 64 bits
        return json.dumps(jsonable_encoder(result), separators=(",", ":")).encode(), []


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
