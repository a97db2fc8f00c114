"""What model endpoints answer: almost right answers made right, refusals in words that say which setting to change.

A model must not lose its rollout over how it said something. Two things that a model can cause survive its endpoint:
half of a surrogate pair in a text (a broken emoji), which is no character and cannot be sent on, and a tool call
without name, id or arguments. The former becomes U+FFFD, the latter a call that has all three, and that no tool
answers to.

A refusal is one line: what was asked, its status, the endpoint's own words, and last the setting to change.
"""

import json
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import orjson
from pydantic import BaseModel, ValidationError

from nemo_gym.config.secrets import mask_url_passwords
from nemo_gym.errors import GymError
from nemo_gym.http.errors import (
    MalformedResponseError,
    NotHttpError,
    ServerCallError,
    ServerResponseError,
    ServerUnreachableError,
    cause_of,
    own_words,
    readable,
)
from nemo_gym.http.request import json_bytes

_Answer = TypeVar("_Answer", bound=BaseModel)

_UNKNOWN_MODEL = re.compile(
    r"model_not_found|invalid_model|DeploymentNotFound|(?:unknown|invalid|unsupported|no such) model"
    r"|model\b.{0,200}?\b(?:not found|does not exist|is unknown|not available)",
    re.IGNORECASE | re.DOTALL,
)
_ESCAPE = re.compile(
    rb"\\(?:u(?:(?P<pair>[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(?P<half>[dD][89a-fA-F][0-9a-fA-F]{2}))?|.)",
    re.DOTALL,
)


class JsonObject(dict[str, Any]):
    """An answer of an endpoint, with the bytes it was read from for those who pass it on."""

    def __init__(self, content: Mapping[str, Any], raw: bytes) -> None:
        super().__init__(content)
        self.raw = raw


def read_json(body: bytes) -> tuple[Any, bytes]:
    """Return what `body` says, and the body to pass on.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
    """
    try:
        return orjson.loads(body), body
    except orjson.JSONDecodeError:
        whole = without_half_pairs(body)
        return orjson.loads(whole), whole


def without_half_pairs(body: bytes) -> bytes:
    """JSON with U+FFFD for every half of a surrogate pair, escaped or encoded, and for bytes that are no UTF-8."""
    whole = body.decode(errors="replace").encode()
    return _ESCAPE.sub(lambda escape: rb"\ufffd" if escape["half"] else escape[0], whole)


def validated_json(answer_type: type[_Answer], body: bytes) -> _Answer:
    """The answer in `body`, mended if need be.

    Raises:
        ValidationError: it is no `answer_type` even so.
    """
    try:
        return answer_type.model_validate_json(body)
    except ValidationError as error:
        try:
            content, _ = read_json(body)
        except ValueError:
            raise error from None
        return answer_type.model_validate(with_whole_calls(content))


def with_whole_calls(answer: Any) -> Any:
    """A response or a chat completion with tool calls that all have a name, an id and arguments."""
    if not isinstance(answer, dict):
        return answer
    mended = dict(answer)
    if isinstance(answer.get("output"), list):
        mended["output"] = [_whole_item(item) for item in answer["output"]]
    if isinstance(answer.get("choices"), list):
        mended["choices"] = [_whole_choice(choice) for choice in answer["choices"]]
    return mended


def _whole_item(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type") != "function_call":
        return item
    item_id = item.get("id")
    own_id = item_id if isinstance(item_id, str) else None
    return {**item, "id": own_id, "call_id": _whole_id(item.get("call_id")), **_whole_function(item)}


def _whole_choice(choice: Any) -> Any:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict) or not isinstance(message.get("tool_calls"), list):
        return choice
    return {**choice, "message": {**message, "tool_calls": [_whole_call(call) for call in message["tool_calls"]]}}


def _whole_call(call: Any) -> Any:
    if not isinstance(call, dict) or call.get("type") == "custom":
        return call
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    whole = {**function, **_whole_function(function)}
    return {**call, "id": _whole_id(call.get("id")), "type": "function", "function": whole}


def _whole_function(given: dict[str, Any]) -> dict[str, str]:
    name, arguments = given.get("name"), given.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments)
    return {"name": name if isinstance(name, str) else "", "arguments": arguments}


def _whole_id(given: Any) -> str:
    return given if isinstance(given, str) and given else f"call_{uuid4().hex}"


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
    """The endpoint refused a request, or failed.

    If the reason lies in the settings, `response_content` says so, else it is the endpoint's own.
    """

    explanation = ""
    """What happened and what to do about it, on one line."""

    def __str__(self) -> str:
        return self.explanation or super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        return (*super().__reduce__(), {"explanation": self.explanation})


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
    try:
        return answer_type.model_validate(answer)
    except ValidationError:
        mended = with_whole_calls(answer)
        validated = answer_type.model_validate(mended)
        if isinstance(answer, JsonObject):
            answer.raw = json_bytes(mended)
        return validated


def explained_error(error: GymError, settings: EndpointSettings) -> GymError | None:
    """`error` in words that name the setting to fix; None when no setting is to blame."""
    if isinstance(error, ServerResponseError):
        return _explained_answer(error, settings)
    if isinstance(error, ServerUnreachableError | NotHttpError):
        return _explained_absence(error, settings)
    if isinstance(error, MalformedResponseError):
        hint = f"{error.msg}. Correct {settings.base_url_key} if this is no model endpoint"
        return MalformedResponseError(hint, error.body, error.pos)
    return None


def _explained_answer(error: ServerResponseError, settings: EndpointSettings) -> ModelEndpointError:
    diagnosis = _diagnosis(error, settings)
    tries = f", {error.attempts} tries in {error.elapsed_s:.1f} s" if error.attempts > 1 else ""
    words = own_words(error.response_content).rstrip(".") or "the endpoint said nothing"
    explanation = (
        f"The model endpoint {error.url} {diagnosis.what} (status {error.status}{tries}): {words}; {diagnosis.remedy}"
    )
    explained = ModelEndpointError(
        error.url,
        error.status,
        explanation.encode() if diagnosis.is_setting else error.response_content,
        method=error.method,
        headers=() if error.headers is None else error.headers.items(),
        attempts=error.attempts,
        elapsed_s=error.elapsed_s,
    )
    explained.explanation = explanation
    return explained


def _explained_absence(error: ServerCallError, settings: EndpointSettings) -> ServerCallError:
    start_it = "start it, or " if isinstance(error, ServerUnreachableError) else ""
    cause = f"{cause_of(error.__cause__)}, " if error.__cause__ is not None else ""
    tries = f"{error.attempts} {'try' if error.attempts == 1 else 'tries'} in {error.elapsed_s:.1f} s"
    what = "No connection to the" if isinstance(error, ServerUnreachableError) else "What answers is no"
    return type(error)(
        f"{what} model endpoint {error.url} ({cause}{tries}); {start_it}correct {settings.base_url_key}, "
        f"now {settings.shown_base_url}",
        url=error.url,
        method=error.method,
        server_name=error.server_name,
        attempts=error.attempts,
        elapsed_s=error.elapsed_s,
    )


class _Diagnosis(NamedTuple):
    what: str
    remedy: str
    is_setting: bool = False
    """Whether a setting is at fault, so that any other request would fare the same."""


def _diagnosis(error: ServerResponseError, settings: EndpointSettings) -> _Diagnosis:
    status = error.status
    if status == 401:
        return _Diagnosis("refused the API key", f"correct {settings.api_key_key}", is_setting=True)
    if status == 403:
        remedy = f"if it does not refuse the content but the key, correct {settings.api_key_key}"
        return _Diagnosis("refused the request", remedy, is_setting=True)
    if status in (400, 404, 422) and _UNKNOWN_MODEL.search(readable(error.response_content)):
        what = f"does not offer the model {settings.model}"
        return _Diagnosis(what, f"correct {settings.model_key}", is_setting=True)
    if status == 404:
        other_api = ", or use inference_provider or vllm_model if it lacks the Responses API"
        remedy = f"correct {settings.base_url_key}, which usually ends in /v1"
        return _Diagnosis(
            "does not exist", remedy + (other_api if error.url.endswith("/responses") else ""), is_setting=True
        )
    if status == 429:
        return _Diagnosis(
            "is over its rate limit",
            "ask it less (+num_samples_in_parallel; requests_per_minute, tokens_per_minute, max_concurrent_requests of "
            f"{settings.server_name}), or wait longer (model_retry_max_elapsed_s)",
        )
    if status >= 500:
        return _Diagnosis("failed", "its own log should say why; resume the run when it is well again")
    return _Diagnosis("refused the request", "correct the row, or responses_create_params")
