"""Refusals of a model endpoint in words that say which setting to change.

The words travel inside the error texts of every server on the way and end up in a log or a
failure record, so they avoid whatever such nesting would escape: quotes, backslashes, non-ASCII.
"""

import re
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from nemo_gym.config.secrets import mask_url_passwords
from nemo_gym.errors import GymError
from nemo_gym.http.errors import MalformedResponseError, ServerResponseError, ServerUnreachableError
from nemo_gym.http.openai_client import JsonObject

_Answer = TypeVar("_Answer", bound=BaseModel)

_EXCERPT_LENGTH = 300
_UNKNOWN_MODEL = re.compile(
    r"model_not_found|invalid_model|DeploymentNotFound|(?:unknown|invalid|unsupported|no such) model"
    r"|model\b.{0,200}?\b(?:not found|does not exist|is unknown|not available)",
    re.IGNORECASE | re.DOTALL,
)


class EndpointSettings(NamedTuple):
    """What a user can change about an endpoint, and what it is set to."""

    server_name: str
    base_url: str
    model: str
    base_url_field: str = "openai_base_url"
    api_key_field: str = "openai_api_key"
    model_field: str = "openai_model"

    @property
    def shown_base_url(self) -> str:
        """The address without a password it may hold."""
        return mask_url_passwords(self.base_url)

    @property
    def base_url_key(self) -> str:
        """How to name the address."""
        return self._key("policy_base_url", self.base_url_field)

    @property
    def api_key_key(self) -> str:
        """How to name the key."""
        return self._key("policy_api_key", self.api_key_field)

    @property
    def model_key(self) -> str:
        """How to name the model."""
        return self._key("policy_model_name", self.model_field)

    def _key(self, well_known: str, own: str) -> str:
        return f"{well_known} ({own} of {self.server_name})"


class ModelEndpointError(ServerResponseError):
    """The endpoint refused a request for a reason that lies in the settings; `response_content` says which."""


class errors_explained:  # noqa: N801 - reads as the function it would be, at a fifth of the cost
    """Let errors of the endpoint leave the block in words that name the setting to fix, where one is to blame."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        explained = explained_error(error, self._settings) if isinstance(error, GymError) else None
        if explained is not None:
            raise explained from error


def validated_answer(answer_type: type[_Answer], answer: Any, settings: EndpointSettings) -> _Answer:
    """What the endpoint answered, as `answer_type`.

    Raises:
        RuntimeError: it is something else.
    """
    try:
        return _validated(answer_type, answer)
    except ValidationError as error:
        raise RuntimeError(
            f"The model endpoint {settings.shown_base_url} answered with something that is no "
            f"{answer_type.__name__}; check {settings.base_url_key}. What is wrong with it: {error}"
        ) from error


def _validated(answer_type: type[_Answer], answer: Any) -> _Answer:
    if isinstance(answer, JsonObject):
        try:
            return answer_type.model_validate_json(answer.raw)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":  # lone surrogates, which our own reader lets pass
                raise
    return answer_type.model_validate(answer)


def explained_error(error: GymError, settings: EndpointSettings) -> GymError | None:
    """`error` in words that name the setting to fix; None when no setting is to blame."""
    if isinstance(error, ServerResponseError):
        return _explained_answer(error, settings)
    if isinstance(error, ServerUnreachableError):
        return _explained_absence(error, settings)
    if isinstance(error, MalformedResponseError):
        hint = f"{error.msg}. Correct {settings.base_url_key} if this is no model endpoint"
        return MalformedResponseError(hint, error.body, error.pos)
    return None


def _explained_answer(error: ServerResponseError, settings: EndpointSettings) -> ModelEndpointError | None:
    diagnosis = _diagnosis(error, settings)
    if diagnosis is None:
        return None
    words = re.sub(r"[\"'\\]", "", error.excerpt(_EXCERPT_LENGTH).encode("ascii", "replace").decode())
    return ModelEndpointError(
        error.url,
        error.status,
        f"{diagnosis} The endpoint said: {words or 'nothing'}".encode(),
        method=error.method,
        headers=() if error.headers is None else error.headers.items(),
        attempts=error.attempts,
        elapsed_s=error.elapsed_s,
    )


def _explained_absence(error: ServerUnreachableError, settings: EndpointSettings) -> ServerUnreachableError:
    return ServerUnreachableError(
        f"{error.message}. This is the model endpoint of {settings.server_name}: start it, "
        f"or correct {settings.base_url_key}, now {settings.shown_base_url}",
        url=error.url,
        method=error.method,
        server_name=error.server_name,
        attempts=error.attempts,
        elapsed_s=error.elapsed_s,
    )


def _diagnosis(error: ServerResponseError, settings: EndpointSettings) -> str | None:
    where = f"The model endpoint {error.url}"
    if error.status in (401, 403):
        return f"{where} refused the API key (status {error.status}): correct {settings.api_key_key}."
    body = error.response_content.decode(errors="replace")
    if error.status in (400, 404, 422) and _UNKNOWN_MODEL.search(body):
        return (
            f"{where} does not offer the model {settings.model} (status {error.status}): correct {settings.model_key}."
        )
    if error.status == 404:
        missing_api = (
            " An endpoint may also lack the Responses API: such a one needs another model server, "
            "inference_provider or vllm_model."
        )
        return (
            f"{where} does not exist (status 404): correct {settings.base_url_key}, which usually ends in /v1."
            f"{missing_api if error.url.endswith('/responses') else ''}"
        )
    return None
