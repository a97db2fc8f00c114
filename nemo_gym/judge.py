"""PUBLIC: models that judge answers, and what becomes of a rollout whose judge could not be asked.

A judge that says "wrong" is a score. A judge that cannot be reached, breaks off or answers nonsense
says nothing about the rollout: that is a `JudgeError`, and `/verify` of every resources server turns
it into an answer with the failure class `judge_failed`, which the collector keeps apart from the
scored rollouts. Its `reward` is `NaN`, as text because JSON has no such number: it satisfies every
agent that expects a float, leaves the agent as `null`, and cannot be taken for a score on the way.
"""

import functools
import hashlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.responses import Response

from nemo_gym.errors import GymError
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseInputPart,
    NeMoGymResponseOutputMessage,
)
from nemo_gym.recording.files import is_missing_call
from nemo_gym.schemas.run_requests import undeclared_fields
from nemo_gym.server_utils import ServerClient, get_response_json, raise_for_status

__all__ = [
    "JudgeError",
    "JudgeEvaluation",
    "ask_about",
    "ask_for_label",
    "call_judge",
    "fenced",
    "judge_failsafe",
    "last_label",
    "last_message_text",
    "last_user_text",
    "reraise_judge_errors",
    "without_labels",
]

logger = logging.getLogger(__name__)

JUDGE_FAILED = "judge_failed"
_FAILURES_OF_ANSWER = 3
"""Failures over an answer, with control questions answered in between, after which the answer is the reason."""
_BREAK = "·"
_UNSEEN = "[\u00ad\u034f\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]*"
"""Any number of characters that are not shown."""
_MARKUP = " \t\r\n*_`'\".:"
"""Characters that may stand around a verdict without saying anything more."""

ResponseT = TypeVar("ResponseT", bound=BaseModel)
_Result = TypeVar("_Result")
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class JudgeError(GymError, RuntimeError):
    """The judge gave no judgement, so there is nothing to score with."""


class JudgeEvaluation(BaseModel):
    """One question to a judge, its answer, and the label found in it."""

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    response: NeMoGymResponse
    verdict_label: str | None = None
    """None: the judge answered, but with none of the labels, or not about this answer."""
    judge_error: str | None = None
    """Why there is no verdict on this answer, while there is one on an empty answer: that is what is shown then."""


async def call_judge(
    server_client: ServerClient, *, server_name: str, url_path: str, json: Any, response_model: type[ResponseT]
) -> ResponseT:
    """Ask a judge model server.

    Raises:
        JudgeError: there was no answer, an error status, or an answer that is no `response_model`.
        ServerResponseError: the judge answers from a recording that does not have the question.
    """
    try:
        answer = await server_client.post(server_name=server_name, url_path=url_path, json=json)
        await raise_for_status(answer)
        return response_model.model_validate(await get_response_json(answer))
    except Exception as error:
        if is_missing_call(error):
            raise
        raise JudgeError(
            f"judge {server_name!r} gave no valid answer at {url_path}: {type(error).__name__}: {error}"
        ) from error


async def reraise_judge_errors(work: Awaitable[_Result]) -> _Result:
    """Await a call to a judge that is made in another way than `call_judge`: whatever fails is a `JudgeError`."""
    try:
        return await work
    except JudgeError:
        raise
    except Exception as error:
        if is_missing_call(error):
            raise
        raise JudgeError(f"the judge could not be asked: {type(error).__name__}: {error}") from error


async def ask_for_label(
    server_client: ServerClient,
    server_name: str,
    params: NeMoGymResponseCreateParamsNonStreaming,
    labels: Iterable[str],
) -> JudgeEvaluation:
    """Ask a judge that ends its answer with one of `labels`.

    Raises:
        JudgeError: the judge failed, or broke off before its verdict.
    """
    response = await call_judge(
        server_client,
        server_name=server_name,
        url_path="/v1/responses",
        json=params,
        response_model=NeMoGymResponse,
    )
    if response.error is not None:
        raise JudgeError(f"judge {server_name!r} failed: {response.error.code}: {response.error.message}")
    if response.status in ("failed", "cancelled"):
        raise JudgeError(f"judge {server_name!r} gave no reason for an answer with the status {response.status!r}")
    labels = tuple(labels)
    text = last_message_text(response)
    cut = response.incomplete_details
    if (cut is not None or response.status == "incomplete") and not _is_clear(text, labels):
        raise JudgeError(
            f"judge {server_name!r} broke off before its verdict ({'no reason given' if cut is None else cut.reason}); "
            "if that happens with other answers, too, raise max_output_tokens in judge_responses_create_params"
        )
    return JudgeEvaluation(responses_create_params=params, response=response, verdict_label=last_label(text, labels))


async def ask_about(
    server_client: ServerClient,
    server_name: str,
    question_about: Callable[[str], NeMoGymResponseCreateParamsNonStreaming],
    answer: str,
    labels: Iterable[str],
) -> JudgeEvaluation:
    """Ask as `ask_for_label` does about an answer that may itself be the reason why the judge fails.

    It may be filtered, too long or confusing. After every failure the judge is asked the same about an empty answer,
    the control question: once after the first failure, twice after the second, three times after the third. A judge
    that fails now and then is not mistaken that way. If it fails three times over the answer and never over the control
    question, the evaluation has no label: a model cannot escape its score by what it says to the judge.

    Raises:
        JudgeError: the judge failed with the answer and without it.
    """
    labels = tuple(labels)
    for failures in range(1, _FAILURES_OF_ANSWER + 1):
        try:
            return await ask_for_label(server_client, server_name, question_about(answer), labels)
        except JudgeError as error:
            failure = error
        for _ in range(failures):
            try:
                control = await ask_for_label(server_client, server_name, question_about(""), labels)
            except JudgeError as error:
                raise JudgeError(f"{failure}; without an answer to judge it failed, too: {error}") from failure
    why = f"{failure}; that happened {_FAILURES_OF_ANSWER} times, and never without this answer"
    logger.warning("an answer is scored without a verdict on it: %s", why)
    return control.model_copy(update={"verdict_label": None, "judge_error": why})


def last_label(text: str, labels: Iterable[str]) -> str | None:
    """Return the last label in `text`; None when it has none.

    Labels are matched from left to right without overlap, the longest first where several begin.
    """
    return next(reversed(_labels_in(text, labels)), None)


def _labels_in(text: str, labels: Iterable[str]) -> list[str]:
    longest_first = sorted(filter(None, labels), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, longest_first)), text) if longest_first else []


def _is_clear(text: str, labels: Iterable[str]) -> bool:
    """Return whether an answer that was cut off names one label only, and names it first or last."""
    found = set(_labels_in(text, labels))
    bare = text.strip(_MARKUP)
    return len(found) == 1 and any(bare.startswith(label) or bare.endswith(label) for label in found)


def without_labels(text: str, labels: Iterable[str]) -> str:
    """Return `text` with a dot inside every label, for a prompt: `[·[A=B]]`.

    A judge that quotes the text then gives no verdict by doing so, not even if it leaves out characters that cannot be
    seen. Labels of one character are left as they are.
    """
    letters = [[re.escape(letter) for letter in label] for label in labels if len(label) > 1]
    beginnings = [f"{first}(?={_UNSEEN}{_UNSEEN.join(others)})" for first, *others in letters]
    return re.sub("|".join(beginnings), rf"\g<0>{_BREAK}", text) if beginnings else text


def fenced(text: str) -> str:
    """Return `text` between two lines that it cannot imitate, for a prompt.

    Both lines have a code that is made of the text and does not occur in it.
    """
    code = _code_of(text)
    while code in text:
        code = _code_of(code)
    return f"-----BEGIN TEXT {code}-----\n{text}\n-----END TEXT {code}-----"


def _code_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def last_message_text(response: NeMoGymResponse) -> str:
    """The text parts of the last message the model wrote, one per line; empty when it wrote none."""
    for item in reversed(response.output):
        if isinstance(item, NeMoGymResponseOutputMessage):
            return "\n".join(part.text for part in item.content if part.type == "output_text")
        if isinstance(item, NeMoGymEasyInputMessage) and item.role == "assistant":
            return item.content if isinstance(item.content, str) else "\n".join(_texts_in(item.content))
    return ""


def last_user_text(params: NeMoGymResponseCreateParamsNonStreaming) -> str:
    """What the user said last in a request, text parts one per line; empty when that is nothing."""
    if isinstance(params.input, str):
        return params.input
    for item in reversed(params.input):
        if isinstance(item, NeMoGymEasyInputMessage | NeMoGymMessage) and item.role == "user":
            content = item.content
            return content if isinstance(content, str) else "\n".join(_texts_in(content))
    return ""


def _texts_in(parts: Iterable[NeMoGymResponseInputPart]) -> list[str]:
    return [part["text"] for part in parts if part["type"] == "input_text"]


def judge_failsafe(verify: _Handler) -> _Handler:
    """`verify` for use as a route: a `JudgeError` becomes an answer without a score.

    Resources servers do this to their `/verify`. Called from Python, `verify` still raises.
    """
    if not inspect.iscoroutinefunction(verify):
        return verify

    @functools.wraps(verify)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return await verify(*args, **kwargs)
        except JudgeError as error:
            return _unscored([*args, *kwargs.values()], error)

    return guarded  # type: ignore[return-value]


def _unscored(arguments: list[Any], error: JudgeError) -> Response:
    row = next((argument for argument in arguments if isinstance(argument, BaseModel)), None)
    body = {
        **({} if row is None else {**undeclared_fields(row), **row.model_dump(mode="json", warnings=False)}),
        "reward": "NaN",
        "_ng_failure_class": JUDGE_FAILED,
        "_ng_failure_message": str(error),
        "_ng_failure_judge_error": str(error),
    }
    return Response(orjson.dumps(body), media_type="application/json")
