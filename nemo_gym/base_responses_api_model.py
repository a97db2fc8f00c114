"""PUBLIC: what a model server is built from: the Responses, the Chat Completions and the Messages API.

Whatever a server answers through these can be recorded, and answered from the recording (`recording` in its block).
"""

import asyncio
import functools
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar

from fastapi import Body, FastAPI, Request
from fastapi.dependencies.utils import get_typed_signature
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, BeforeValidator, Field
from starlette._utils import is_async_callable
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.errors import ConfigError
from nemo_gym.http.generation_gate import PAUSE_PATH, RESUME_PATH, GenerationGate, GenerationInterrupted
from nemo_gym.http.model_answers import (
    EndpointSettings,
    errors_explained,
    explained_error,
    validated_answer,
)
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from nemo_gym.http.pace_books import Books
from nemo_gym.http.pacing import SESSION, Pace, Pacer
from nemo_gym.keys import MODEL_ENDPOINTS_PATH, OBSERVABILITY_ENABLED_KEY_NAME, TOKEN_ID_CAPTURE_BLOCK
from nemo_gym.observability.calls import (
    ModelCallRecord,
    aggregate_model_call_metrics,
    aggregate_model_call_records,
    build_model_call_record,
    extract_token_stats,
    read_available_model_call_records,
    read_model_call_records,
)
from nemo_gym.observability.store import (
    CaptureStore,
    ModelCallCaptureConfig,
    clear_model_call_captures_for_rollouts,
    make_capture_store,
    model_call_capture_dirs_from_config,
)
from nemo_gym.observability.trajectories import merge_model_call_capture_into_record
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.process_inputs import config_file
from nemo_gym.recording.recorder import Recorder, shaping_settings
from nemo_gym.rollout_correlation import MODEL_CALL_PREFIX
from nemo_gym.schemas.server_config import RecordingConfig, RecordingMode
from nemo_gym.server_utils import ServerClient, num_serving_processes
from nemo_gym.servers.base import BaseServer, SimpleServer, while_serving
from nemo_gym.servers.capture import (
    ModelCallCapture,
    ModelCallCaptureMiddleware,
    TokenPaths,
    install_model_call_capture,
)
from nemo_gym.servers.dialects import SpeaksDialects, keeping_tokens
from nemo_gym.servers.json_route import json_answer, models_of, to_json
from nemo_gym.servers.sessions import SESSION_ID_KEY, Sessions
from nemo_gym.servers.usage import telling_usage

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.sink import ServerTokenCapture

__all__ = [
    "PAUSE_PATH",
    "RESUME_PATH",
    "BaseResponsesAPIModel",
    "BaseResponsesAPIModelConfig",
    "BaseRunServerInstanceConfig",
    "BaseServer",
    "Body",
    "CaptureStore",
    "Endpoint",
    "EndpointSettings",
    "FastAPI",
    "GenerationGate",
    "GenerationInterrupted",
    "ModelCallCaptureConfig",
    "ModelCallRecord",
    "NeMoGymChatCompletion",
    "NeMoGymChatCompletionCreateParamsNonStreaming",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "Pace",
    "PacedModelConfig",
    "PausableModel",
    "PausableModelConfig",
    "Request",
    "ServerClient",
    "SimpleResponsesAPIModel",
    "SimpleServer",
    "aggregate_model_call_metrics",
    "aggregate_model_call_records",
    "build_model_call_record",
    "clear_model_call_captures_for_rollouts",
    "errors_explained",
    "explained_error",
    "extract_token_stats",
    "install_model_call_capture",
    "make_capture_store",
    "merge_model_call_capture_into_record",
    "model_call_capture_dirs_from_config",
    "observability_enabled_from_config",
    "read_available_model_call_records",
    "read_model_call_records",
    "validated_answer",
]

logger = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])
_CaptureMiddleware = ModelCallCaptureMiddleware
"""The name that programs of the original import."""


def observability_enabled_from_config(global_config_dict: Any) -> bool:
    """Return whether the config of a run asks for captured model calls."""
    return isinstance(global_config_dict, Mapping) and bool(global_config_dict.get(OBSERVABILITY_ENABLED_KEY_NAME))


class BaseResponsesAPIModelConfig(BaseRunServerInstanceConfig):
    """Config of a model server; authors add their own fields."""

    UNRELATED_TO_ANSWERS: ClassVar[frozenset[str]] = frozenset()
    """Settings that a recording need not have in common with whoever replays it; addresses, keys, headers never do."""

    recording: RecordingConfig = Field(default_factory=RecordingConfig)
    """Keep this server's calls in a folder, or answer from there: {folder: ..., mode: off | record | replay | auto}."""


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number; leave the key out where there is no limit")
    return value


_PerMinute = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_truth)]


class PacedModelConfig(BaseResponsesAPIModelConfig):
    """Config of a model server that can be told how fast to ask its endpoint, over all its processes.

    Limits hold for all replicas together, and are divided among the shards of a run that start servers of their own.
    """

    requests_per_minute: _PerMinute | None = None
    """Requests to the endpoint in a minute, tries that failed included; they go out evenly. Unlimited when unset."""
    tokens_per_minute: _PerMinute | None = None
    """Tokens in a minute, those read and those written; a request's are estimated from earlier ones until its answer
    tells. Unlimited when unset."""
    max_concurrent_requests: Annotated[int, Field(ge=1), BeforeValidator(_no_truth)] | None = None
    """Requests to the endpoint at the same time, over all processes of this server; unlimited when unset."""

    @property
    def pace(self) -> Pace:
        """The limits on requests, tokens and calls at once, as one value."""
        return Pace(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent_requests)


class PausableModelConfig(PacedModelConfig):
    """Config of a model server that a trainer can pause while it changes the weights."""

    abort_path: str | None = None
    """`POST`ed to every endpoint, beside `/v1`, when a trainer pauses this server: has it end what it generates with
    the tokens so far and the finish reason `abort`. Unset: the trainer does that, or answers are generated anew."""
    resume_path: str | None = None
    """The same when it goes on."""


class BaseResponsesAPIModel(BaseServer):
    """A server that answers for a model."""

    config: BaseResponsesAPIModelConfig


class Endpoint(NamedTuple):
    """A place where a model is served."""

    client: NeMoGymAsyncOpenAI
    settings: EndpointSettings


def _one_is_enough(method: _Method) -> _Method:
    """`abstractmethod` for each of two, of which a class need define only one: type checkers do not know that."""
    return abstractmethod(method)


class _SessionsInTurn(Sessions):
    def open(self, scope: Scope) -> dict[str, Any]:
        session = super().open(scope)
        SESSION.set(session[SESSION_ID_KEY])
        return session


class SimpleResponsesAPIModel(SpeaksDialects, BaseResponsesAPIModel, SimpleServer):
    """What authors of model servers subclass: they write `responses`, `chat_completions` or both."""

    config: BaseResponsesAPIModelConfig

    @cached_property
    def pacer(self) -> Pacer | None:
        """Who says when the endpoint may be asked; None for a server whose config sets no limit."""
        pace = self.pace()
        if not pace.is_set:
            return None
        limits = ", ".join(f"{key}: {limit:g}" for key, limit in vars(pace).items() if limit is not None)
        logger.info("%s: asks its endpoint at a pace (%s)", self.config.name, limits)
        return Pacer(pace, Books(config_file(), self.config.name), num_serving_processes())

    def pace(self) -> Pace:
        """How fast the endpoint may be asked."""
        return self.config.pace if isinstance(self.config, PacedModelConfig) else Pace()

    def paced(self, client: NeMoGymAsyncOpenAI) -> NeMoGymAsyncOpenAI:
        """The same client, which from now on keeps to the pace of this server; all clients of a server share it."""
        client.pacer = self.pacer
        return client

    def new_sessions(self) -> Sessions:
        """Sessions that say whose turn it is, where calls have to wait for it."""
        if self.pacer is None:
            return super().new_sessions()
        return _SessionsInTurn(self.get_session_middleware_key(), self._session_secret())

    def setup_webserver(self) -> FastAPI:
        """The app with the standard routes."""
        app = self.new_app()
        duties = self.duties_in(app)
        duties.rollout_prefix = MODEL_CALL_PREFIX
        duties.tells_usage = True
        tokens = self._token_capture
        if tokens is not None:
            duties.token_paths = TokenPaths(tokens)
            while_serving(app, end=tokens.close)
        store = make_capture_store(ModelCallCaptureConfig.of(self._run_config()))
        if store is not None:
            duties.capture = ModelCallCapture(store, self.config.name)
        self.add_dialect_routes(app)
        return app if self._recorder is None else while_serving(app, end=self._recorder.close)

    def handler_of(self, dialect: str) -> Callable[..., Any]:
        """What answers `responses` or `chat` requests; every model call, however it was asked for, passes it.

        Raises:
            ValueError: no handler is written for that dialect.
        """
        handler = self._handlers.get(dialect)
        if handler is None:
            if dialect not in ("responses", "chat"):
                raise ValueError(f"no handler of a model server answers the dialect {dialect!r}")
            written = self.responses_handler() if dialect == "responses" else self.chat_completions
            handler = self._recorded(dialect, written)
            if self._token_capture is not None:
                handler = keeping_tokens(self._token_capture, handler)
            self._handlers[dialect] = handler = telling_usage(handler)
        return handler

    @cached_property
    def _token_capture(self) -> "ServerTokenCapture | None":
        """What keeps the token ids of calls; None unless the run wants that.

        Raises:
            ConfigError: there is no place for them.
        """
        config = self._run_config()
        block = config.get(TOKEN_ID_CAPTURE_BLOCK)
        if not isinstance(block, Mapping) or not block.get("enabled"):
            return None
        from nemo_gym.token_id_capture.sink import ServerTokenCapture  # other runs need none of it

        return ServerTokenCapture.from_config(config)

    @cached_property
    def _handlers(self) -> dict[str, Callable[..., Any]]:
        return {}

    def responses_handler(self) -> Callable[..., Awaitable[Any]]:
        """What serves `/v1/responses`: `responses`, unless a class has a cheaper way to the same answer."""
        return self.responses

    def setup_liveness(self, app: FastAPI) -> None:
        """Also say how the endpoints are: a run that waits for one that is not there should know."""
        super().setup_liveness(app)
        app.get(MODEL_ENDPOINTS_PATH, include_in_schema=False)(self._endpoint_states)

    def asked_endpoints(self) -> Sequence[Endpoint]:
        """The endpoints that this server gets its answers from, for classes that use our client."""
        return ()

    @cached_property
    def _recorder(self) -> Recorder | None:
        """What keeps the calls of this server, or answers them; None while nothing does.

        Raises:
            ConfigError: there is no such recording, or it cannot be kept.
        """
        recording = getattr(self.config, "recording", None)
        if not isinstance(recording, RecordingConfig) or recording.mode is RecordingMode.OFF:
            return None
        if (self.config.num_workers or 1) > 1:
            raise ConfigError(
                f"{self.config.name}: recording and num_workers={self.config.num_workers} do not go together, because "
                "the calls of a rollout must be counted by one process; leave num_workers out, or use num_replicas"
            )
        unrelated: frozenset[str] = getattr(self.config, "UNRELATED_TO_ANSWERS", frozenset())
        unrelated |= {limit.name for limit in fields(Pace)} | {"abort_path", "resume_path"}
        return Recorder(recording, self.config.name, shaping_settings(self.config, unrelated))

    def _recorded(self, dialect: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        """`handler` for use as a route: its answers are recorded, or replaced by recorded ones, as configured."""
        recorder = self._recorder
        if recorder is None:
            return handler
        is_async = is_async_callable(handler)
        is_plain = is_async and _takes_only_a_body(handler)
        body_name = next((name for name in models_of(handler) if name != "return"), "body")

        @functools.wraps(handler)
        async def answered(**arguments: Any) -> Any:
            with recorder.together:
                body = arguments[body_name]
                call = recorder.call(dialect, body)
                known = recorder.find(call)
                if known is not None:
                    return Response(known, media_type="application/json")
                result = await (handler(**arguments) if is_async else run_in_threadpool(handler, **arguments))
                if isinstance(result, Response):
                    if result.status_code == HTTPStatus.OK and isinstance(getattr(result, "body", None), bytes):
                        await recorder.kept(call, bytes(result.body))
                    return result
                answer = to_json(result)
                await recorder.kept(call, answer, result)
                return json_answer(answer) if is_plain else result

        return answered

    async def _endpoint_states(self) -> list[dict[str, Any]]:
        if self._recorder is not None and self._recorder.mode is RecordingMode.REPLAY:
            return []
        asked = self.asked_endpoints()
        states = await asyncio.gather(*(endpoint.client.contact.state() for endpoint in asked))
        return [
            {**state, "set_with": endpoint.settings.base_url_key} for state, endpoint in zip(states, asked, strict=True)
        ]

    @_one_is_enough
    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer a Chat Completions request."""
        raise NotImplementedError

    @_one_is_enough
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer a Responses request."""
        raise NotImplementedError


class PausableModel(SimpleResponsesAPIModel):
    """A model server that a trainer can pause: its generations pass `gate`, as in `await self.gate.run(ask)`."""

    config: PausableModelConfig

    @cached_property
    def gate(self) -> GenerationGate:
        """Open, or shut by a pause; it also knows the version of the weights, once a trainer has told."""
        return GenerationGate()

    @property
    def is_pausable(self) -> bool:
        """Whether it answers for a policy that is trained."""
        return True

    def setup_webserver(self) -> FastAPI:
        """The app with the standard routes, and those of the trainer."""
        app = super().setup_webserver()
        if self.is_pausable:
            app.post(PAUSE_PATH, include_in_schema=False)(self.pause)
            app.post(RESUME_PATH, include_in_schema=False)(self.resume)
        return app

    async def pause(self, body: dict[str, Any] = Body()) -> Any:
        """Ask for nothing until `resume`, and answer when nothing is being generated: the weights may change then."""
        if (self.config.num_workers or 1) > 1:
            words = (
                f"{self.config.name} cannot be paused: of its num_workers={self.config.num_workers} only one would "
                "hear of it; leave num_workers out, or use num_replicas"
            )
            return PlainTextResponse(words, HTTPStatus.CONFLICT)
        if body.get("is_shut_only"):
            self.gate.shut()
        elif self.config.abort_path is None and not body.get("is_aborted"):
            await self.gate.pause()
        else:
            await self.gate.pause(lambda: self._tell_endpoints(self.config.abort_path), body.get("grace_s", 0.0))
        return {"interrupted": self.gate.interrupted}

    async def resume(self, body: dict[str, Any] = Body()) -> dict[str, Any]:
        """Go on, with weights of the version that the trainer tells."""
        if self.gate.is_shut:
            await self._tell_endpoints(self.config.resume_path)
        self.gate.resume(body.get("weight_version"))
        return {"weight_version": self.gate.version}

    async def _tell_endpoints(self, path: str | None) -> None:
        if path is not None:
            await asyncio.gather(*(endpoint.client.post_beside(path) for endpoint in self.asked_endpoints()))


def _takes_only_a_body(handler: Callable[..., Any]) -> bool:
    kinds = [parameter.annotation for parameter in get_typed_signature(handler).parameters.values()]
    return all(isinstance(kind, type) and issubclass(kind, BaseModel | Request) for kind in kinds)
