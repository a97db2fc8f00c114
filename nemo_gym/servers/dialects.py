"""How a model server answers in every dialect, streamed or not, from the handlers that its author wrote.

An author writes `responses`, `chat_completions` or both. The routes of these two take the short way to them; a body
that does not fit, because it asks for a stream, comes here. `/v1/messages` always does. Whatever is asked, and however,
one of two handlers answers (`handler_of`): what is done around a model call is done there. A stream is the whole answer
told in events.
"""

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
from fastapi import Body, FastAPI, HTTPException, Request
from fastapi.dependencies.utils import get_typed_signature
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette._utils import is_async_callable
from starlette.concurrency import run_in_threadpool

from nemo_gym.dialects.anthropic import AnthropicDialect, error_body
from nemo_gym.dialects.base import UnusableRequestError, set_fields
from nemo_gym.dialects.chat import ChatDialect, chunks_of, sanitize_streaming_chat_body
from nemo_gym.dialects.responses import (
    invalid,
    sanitize_streaming_responses_body,
    synthesize_responses_failure_sse,
    synthesize_responses_sse,
    validate_streaming_responses_params,
)
from nemo_gym.http.errors import readable
from nemo_gym.keys import MODEL_PATHS
from nemo_gym.schemas.openai_chat import NeMoGymChatCompletion, NeMoGymChatCompletionCreateParamsNonStreaming
from nemo_gym.schemas.openai_responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.servers.json_route import JsonRoute, models_of, to_json

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.sink import ServerTokenCapture

logger = logging.getLogger(__name__)

_EVENT_STREAM = "text/event-stream"
_HANDLERS = ("responses", "chat_completions")


class SpeaksDialects:
    """The part of a model server that understands all dialects.

    A class that defines only one of the two handlers gets the other: the same model, asked in the other API.
    """

    _converter_of_dialects: ClassVar[ChatDialect] = ChatDialect()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Complete a class that answers in one API only."""
        super().__init_subclass__(**kwargs)
        written = [name for name in _HANDLERS if not getattr(getattr(cls, name), "__isabstractmethod__", False)]
        if written == ["responses"]:
            cls.chat_completions = _chat_from_responses  # type: ignore[attr-defined]
        elif written == ["chat_completions"]:
            cls.responses = _responses_from_chat  # type: ignore[attr-defined]

    def handler_of(self, dialect: str) -> Callable[..., Any]:
        """What answers `responses` or `chat` requests; every model call, however it was asked for, passes it."""
        raise NotImplementedError

    async def _invoke_responses(self, params: NeMoGymResponseCreateParamsNonStreaming, request: Request) -> Any:
        return await _called(self.handler_of("responses"), params, request)

    async def _invoke_chat_completions(
        self, params: NeMoGymChatCompletionCreateParamsNonStreaming, request: Request
    ) -> Any:
        return await _called(self.handler_of("chat"), params, request)

    def add_dialect_routes(self, app: FastAPI) -> None:
        """Let `app` answer in every dialect."""
        dispatchers = {"responses": self.responses_dispatch, "chat": self.chat_completions_dispatch}
        for path, dialect in MODEL_PATHS.items():
            if dialect == "messages":
                app.post(path)(self.messages)
                continue
            handler, dispatch = self.handler_of(dialect), dispatchers[dialect]
            if _goes_by_names(handler):
                app.post(path)(dispatch)
                continue
            app.post(path)(handler)
            route = app.router.routes[-1]
            if isinstance(route, JsonRoute) and route.reads_json:
                route.when_refused = functools.partial(_streamed, dispatch)
            elif _takes_only_body_and_request(handler):
                app.router.routes.pop()
                app.post(path)(dispatch)

    async def responses_dispatch(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        """Answer a Responses request, as a stream if it says so."""
        if not body.get("stream"):
            params = _validated(NeMoGymResponseCreateParamsNonStreaming, body)
            return await self._invoke_responses(params, request)
        clean, names = sanitize_streaming_responses_body(body)
        asked = validate_streaming_responses_params(clean)
        try:
            answer = _as_object(await self._invoke_responses(asked, request))
        except Exception as error:  # noqa: BLE001 - clients that stream are told of failures in the stream
            logger.warning("/v1/responses: a streamed answer failed: %r", error)
            return _events(synthesize_responses_failure_sse(_words(error)))
        if isinstance(answer, Response):
            return answer
        return _events(synthesize_responses_sse(answer, names))

    async def chat_completions_dispatch(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        """Answer a Chat Completions request, as a stream if it says so."""
        if body.get("stream") is not True:
            params = _validated(NeMoGymChatCompletionCreateParamsNonStreaming, body)
            return await self._invoke_chat_completions(params, request)
        clean, include_usage = sanitize_streaming_chat_body(body)
        asked = _validated(NeMoGymChatCompletionCreateParamsNonStreaming, clean)
        answer = _as_object(await self._invoke_chat_completions(asked, request))
        return answer if isinstance(answer, Response) else _events(chunks_of(answer, include_usage=include_usage))

    async def messages(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        """Answer a request of the Anthropic Messages API, as a stream if it says so."""
        dialect = AnthropicDialect()
        try:
            params = dialect.request_from(body)
            answer = _as_object(await self._invoke_responses(params, request))
        except UnusableRequestError as error:
            return _json(error_body(str(error)), HTTPStatus.BAD_REQUEST)
        if isinstance(answer, Response):
            return answer
        if (failure := _failure_of(answer)) is not None:
            return _json(error_body(failure, "api_error"), HTTPStatus.BAD_GATEWAY)
        message = dialect.response_to(answer, body.get("model"))
        return _events(dialect.events_of(message)) if body.get("stream") else _json(message)


async def _responses_from_chat(
    self: Any, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
) -> NeMoGymResponse:
    """Answer a Responses request by asking for the same as a chat; what its author refuses is refused."""
    dialect = self._converter_of_dialects
    params = NeMoGymChatCompletionCreateParamsNonStreaming.model_construct(**dialect.request_to(body))
    completion = await _called(self.chat_completions, params, request)
    if not isinstance(completion, NeMoGymChatCompletion):
        completion = _as_object(completion)
        if isinstance(completion, Response):
            return completion  # type: ignore[return-value]
        completion = NeMoGymChatCompletion.model_validate(completion)
    answer: NeMoGymResponse = dialect.response_from(body, completion)
    return answer


async def _chat_from_responses(
    self: Any, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
) -> NeMoGymChatCompletion:
    """Answer a Chat Completions request by asking for the same as a response; what its author refuses is refused."""
    dialect = self._converter_of_dialects
    params = dialect.request_from(body.model_dump(exclude_unset=True))
    fields = _as_object(await _called(self.responses, params, request))
    if isinstance(fields, Response):
        return fields  # type: ignore[return-value]
    if (failure := _failure_of(fields)) is not None:
        raise HTTPException(HTTPStatus.BAD_GATEWAY, failure)
    return NeMoGymChatCompletion.model_validate(dialect.response_to(fields))


def _failure_of(response: Mapping[str, Any]) -> str | None:
    """Why a response is no answer, for APIs that say so by status: as an empty answer it would be scored."""
    error = response.get("error")
    if error is None and response.get("status") != "failed":
        return None
    told = error if isinstance(error, Mapping) else {}
    return f"the model failed: {told.get('code') or 'error'}: {told.get('message') or 'it does not say why'}"


async def _called(handler: Callable[..., Any], params: BaseModel, request: Request) -> Any:
    """What a handler says, which may take the request, too, and may be no coroutine."""
    taken, models = _taken(handler), models_of(handler)
    body_name = next((name for name in models if name != "return"), "body")
    arguments: dict[str, Any] = {body_name: _as_its_author_wants(params, taken.get(body_name), models.get(body_name))}
    for name, given in taken.items():
        if given.annotation is Request or (name == "request" and name != body_name):
            arguments[name] = request
    if is_async_callable(handler):
        return await handler(**arguments)
    return await run_in_threadpool(handler, **arguments)


def _taken(handler: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return get_typed_signature(handler).parameters


def _as_its_author_wants(
    params: BaseModel, taken: inspect.Parameter | None, kind: type[BaseModel] | None
) -> BaseModel | dict[str, Any]:
    """`params` as the parameter of a handler declares them: a type of its own, or a dictionary."""
    if kind is not None:
        return params if isinstance(params, kind) else kind.model_validate(set_fields(params))
    is_dict = taken is not None and taken.annotation in (dict, dict[str, Any])
    return params.model_dump(mode="json", exclude_unset=True) if is_dict else params


def keeping_tokens(capture: "ServerTokenCapture", handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`, as a route or not, the token ids of whose answers are kept while `capture` answers a call."""
    from nemo_gym.token_id_capture.sink import capture_tokens, register_call_intent

    is_async = is_async_callable(handler)

    @functools.wraps(handler)
    async def kept(**arguments: Any) -> Any:
        if capture.is_answering:
            await register_call_intent()
        result = await (handler(**arguments) if is_async else run_in_threadpool(handler, **arguments))
        if capture.is_answering:
            await capture_tokens(_with_tokens(result))
        return result

    return kept


def _with_tokens(result: Any) -> Any:
    """What token ids are looked for in; a result that is no JSON as it is."""
    if isinstance(result, BaseModel):
        return result
    try:
        return _as_object(result)
    except ValueError:
        return result


def _goes_by_names(handler: Callable[..., Any]) -> bool:
    """Whether only the name of a parameter says that it is the body or the request: FastAPI has to be told by type."""
    taken = _taken(handler)
    bare = inspect.Parameter.empty
    kinds = [taken[name].annotation for name in ("body", "request") if name in taken]
    is_maybe_request = "request" in taken and not isinstance(taken["request"].annotation, type)
    return bare in kinds or is_maybe_request


def _takes_only_body_and_request(handler: Callable[..., Any]) -> bool:
    bodies = models_of(handler).keys()
    return all(name in bodies or given.annotation is Request for name, given in _taken(handler).items())


async def _streamed(dispatch: Callable[[Request, dict[str, Any]], Awaitable[Any]], request: Request) -> Response | None:
    """The stream that a request asks for; None if it asks for none."""
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError:
        return None
    if not isinstance(body, dict) or not body.get("stream"):
        return None
    answer: Response = await dispatch(request, body)
    return answer


def _validated(model: type[BaseModel], body: dict[str, Any]) -> Any:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid(error) from error


def _as_object(result: Any) -> Any:
    """A handler's result as JSON has it; a response of its own that is no JSON object as it is."""
    if isinstance(result, dict):
        return result
    if isinstance(result, Response):
        body = getattr(result, "body", None)
        if result.status_code != HTTPStatus.OK or not isinstance(body, bytes):
            return result
        return orjson.loads(body)
    return orjson.loads(to_json(result))


def _words(error: Exception) -> str:
    content = getattr(error, "response_content", None)
    return readable(content) if isinstance(content, bytes) and content else str(error) or type(error).__name__


def _json(content: dict[str, Any], status: int = HTTPStatus.OK) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def _events(lines: Iterable[str]) -> StreamingResponse:
    async def sent() -> AsyncIterator[str]:
        for line in lines:
            yield line

    return StreamingResponse(sent(), media_type=_EVENT_STREAM, headers={"Cache-Control": "no-cache"})
