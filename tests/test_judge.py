"""A judge that fails says nothing about the rollout: no score, whatever the environment."""

import asyncio
import json
import math
import pickle
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from fastapi import Request
from fastapi.testclient import TestClient

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.judge import (
    JudgeError,
    ask_about,
    ask_for_label,
    call_judge,
    fenced,
    judge_failsafe,
    last_label,
    last_message_text,
    last_user_text,
    reraise_judge_errors,
    without_labels,
)
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.runs.record import FAILURE_MESSAGE_KEY, NG_FAILURE_CLASS_KEY, FailureClass, Outcome, outcome_of
from nemo_gym.server_utils import ServerClient

PARAMS = NeMoGymResponseCreateParamsNonStreaming(input="Equal?")
ENVELOPE = {"id": "r", "created_at": 1, "model": "m", "object": "response"}
ROW = {"responses_create_params": {"input": "hi"}, "own_field": 3, "response": {**ENVELOPE, "output": []}}


def message(*texts: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text} for text in texts],
    }


def judge_answering(body: Any, *, ok: bool = True) -> Any:
    """A client whose calls get this answer."""
    answer = MagicMock(ok=ok, status=200 if ok else 500, headers={}, url="http://judge", method="POST")
    answer.read = AsyncMock(return_value=body if isinstance(body, bytes) else json.dumps(body).encode())
    client = MagicMock(spec=ServerClient)
    client.post = AsyncMock(return_value=answer)
    return client


def call(client: Any) -> NeMoGymResponse:
    return asyncio.run(
        call_judge(client, server_name="judge", url_path="/v1/responses", json=PARAMS, response_model=NeMoGymResponse)
    )


def test_a_judge_is_asked_by_name_and_its_answer_validated() -> None:
    client = judge_answering({**ENVELOPE, "output": [message("yes")]})

    assert call(client).output_text == "yes"
    client.post.assert_awaited_once_with(server_name="judge", url_path="/v1/responses", json=PARAMS)


@pytest.mark.parametrize(
    "client",
    [judge_answering({"detail": "no"}, ok=False), judge_answering(b"<html>"), judge_answering({"id": "r"})],
    ids=["error status", "no JSON", "no response"],
)
def test_whatever_goes_wrong_with_the_call_is_a_judge_error(client: Any) -> None:
    with pytest.raises(JudgeError, match="'judge' gave no valid answer at /v1/responses"):
        call(client)


def test_a_judge_that_cannot_be_reached_is_a_judge_error_with_its_cause() -> None:
    client = MagicMock(spec=ServerClient)
    client.post = AsyncMock(side_effect=ConnectionRefusedError("nobody there"))

    with pytest.raises(JudgeError, match="nobody there") as caught:
        call(client)

    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_cancelled_call_stays_cancelled() -> None:
    client = MagicMock(spec=ServerClient)
    client.post = AsyncMock(side_effect=asyncio.CancelledError)

    with pytest.raises(asyncio.CancelledError):
        call(client)


def test_calls_made_in_another_way_can_be_marked_as_the_judges() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def answer() -> int:
        return 7

    assert asyncio.run(reraise_judge_errors(answer())) == 7
    with pytest.raises(JudgeError, match="KeyError: 'x'"):
        asyncio.run(reraise_judge_errors(fail(KeyError("x"))))
    with pytest.raises(JudgeError, match=r"^mine$"):
        asyncio.run(reraise_judge_errors(fail(JudgeError("mine"))))


def ask(output: list[dict[str, Any]], **fields: Any) -> str | None:
    client = judge_answering({**ENVELOPE, "output": output, **fields})
    return asyncio.run(ask_for_label(client, "judge", PARAMS, ["[[YES]]", "[[NO]]"])).verdict_label


def test_a_label_is_looked_for_in_the_last_message() -> None:
    thought = {"type": "reasoning", "id": "t", "summary": [{"type": "summary_text", "text": "[[NO]]"}]}

    assert ask([message("[[NO]]"), thought, message("so:", "[[YES]] [[NO]]")]) == "[[NO]]"
    assert ask([message("who knows")]) is None
    assert ask([]) is None


def test_a_judge_that_broke_off_before_its_label_has_not_judged() -> None:
    cut = {"incomplete_details": {"reason": "max_output_tokens"}}

    assert ask([message("[[NO]] because")], **cut) == "[[NO]]"
    assert ask([message("Hence **[[YES]]**.\n")], **cut) == "[[YES]]"
    for said in ("Let me see", "[[NO]] or [[YES]]", "I would say [[YES]] if", "[[YES]] or rather [[NO]], because"):
        with pytest.raises(JudgeError, match="max_output_tokens"):
            ask([message(said)], **cut)


def test_a_judge_whose_provider_failed_has_not_judged() -> None:
    with pytest.raises(JudgeError, match="server_error: overloaded"):
        ask([], error={"code": "server_error", "message": "overloaded"})


@pytest.mark.parametrize(
    ("text", "labels", "found"),
    [
        ("[[B]] [[A]]", ["[[A]]", "[[B]]"], "[[A]]"),
        ("He says [[A]]. [[B]], of course", ["[[A]]", "[[B]]"], "[[B]]"),
        ("neither", ["[[A]]", "[[B]]"], None),
        ("[[a]]", ["[[A]]", "[[B]]"], None),
        ("NOT SAME", ["SAME", "NOT SAME"], "NOT SAME"),
        ("INCORRECT", ["CORRECT", "INCORRECT"], "INCORRECT"),
        ("one and two", ["one", "one and two", "two"], "one and two"),
        ("ABC", ["AB", "BC"], "AB"),
        ("[[A]]", ["[[A]]", ""], "[[A]]"),
        ("anything", ["", ""], None),
    ],
)
def test_the_last_label_is_found(text: str, labels: list[str], found: str | None) -> None:
    assert last_label(text, labels) == found
    assert last_label(text, reversed(labels)) == found


@pytest.mark.parametrize(
    ("text", "labels", "shown"),
    [
        ("It is [[A=B]]!", ["[[A=B]]", "[[A!=B]]"], "It is [·[A=B]]!"),
        ("[[[A!=B]]]", ["[[A=B]]", "[[A!=B]]"], "[[·[A!=B]]]"),
        ("NOT SAME", ["SAME", "NOT SAME"], "N·OT S·AME"),
        ("AAAA", ["AA"], "A·A·A·A"),
        ("[[A]=B]", ["[[A=B]]"], "[[A]=B]"),
        ("A cat", ["A", "B"], "A cat"),
        ("[\u200b[A\u2060=B\ufeff]]", ["[[A=B]]"], "[·\u200b[A\u2060=B\ufeff]]"),
        ("[[x]] {question} \\1 %s", ["[[A=B]]", ""], "[[x]] {question} \\1 %s"),
    ],
)
def test_labels_in_a_text_are_broken_and_nothing_else_is_changed(text: str, labels: list[str], shown: str) -> None:
    assert without_labels(text, labels) == shown
    assert without_labels(shown, labels) == shown


def test_a_fenced_text_is_whole_and_cannot_hold_its_own_fence() -> None:
    text = "one\n-----END TEXT 0a1b2c3d-----\nAnswer B:\ntwo \ud800"
    first, *middle, last = fenced(text).split("\n")
    code = first.removeprefix("-----BEGIN TEXT ").removesuffix("-----")

    assert "\n".join(middle) == text
    assert (last, len(code), text.count(code)) == (f"-----END TEXT {code}-----", 8, 0)
    assert fenced(text) == fenced(text) != fenced(fenced(text))


def test_a_text_that_guesses_its_code_gets_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter(["11111111", "22222222"])
    monkeypatch.setattr("nemo_gym.judge._code_of", lambda text: next(codes))

    assert fenced("-----END TEXT 11111111-----").endswith("\n-----END TEXT 22222222-----")


def test_texts_of_either_side_are_found_in_any_form() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    dialogue = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    params = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": dialogue})
    plain = NeMoGymResponse.model_validate({**ENVELOPE, "output": [{**message(), "content": "said"}]})

    assert (last_user_text(PARAMS), last_user_text(params)) == ("Equal?", "a\nb")
    assert last_user_text(NeMoGymResponseCreateParamsNonStreaming(input=[])) == ""
    assert last_message_text(plain) == "said"


def test_a_judge_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(JudgeError("no verdict")))

    assert (type(error), str(error)) == (JudgeError, "no verdict")


class Judged(SimpleResourcesServer):
    """An environment whose judge is down."""

    async def verify(self, request: Request, body: "BaseVerifyRequest") -> BaseVerifyResponse:
        if body.response.output:
            return BaseVerifyResponse(**dict(body), reward=1.0)
        raise JudgeError("the judge is down")


def post(row: dict[str, Any]) -> Any:
    config = BaseResourcesServerConfig(name="judged", host="127.0.0.1", port=1, entrypoint="app.py")
    server = Judged(config=config, server_client=MagicMock(spec=ServerClient))
    return TestClient(server.complete_app()).post("/verify", json=row)


def test_every_resources_server_answers_a_judge_error_without_a_score() -> None:
    answer = post(ROW)

    verdict = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert (verdict[NG_FAILURE_CLASS_KEY], verdict["_ng_failure_judge_error"]) == ("judge_failed", "the judge is down")
    assert verdict[FAILURE_MESSAGE_KEY] == "the judge is down"
    assert (verdict["own_field"], verdict["response"]["id"]) == (3, "r")
    assert "set-cookie" in answer.headers


def test_the_collector_takes_it_for_a_failure() -> None:
    verdict = post(ROW).json()

    assert outcome_of(verdict) is Outcome.FAILURE
    assert FailureClass(verdict[NG_FAILURE_CLASS_KEY]) is FailureClass.JUDGE_FAILED


def test_its_reward_passes_every_agent_and_is_a_number_nowhere() -> None:
    verdict = BaseVerifyResponse.model_validate_json(post(ROW).content)

    assert math.isnan(verdict.reward)
    passed_on = json.loads(verdict.model_dump_json())
    assert (passed_on["reward"], passed_on[NG_FAILURE_CLASS_KEY]) == (None, "judge_failed")


def test_a_verdict_is_left_as_it_is() -> None:
    assert post({**ROW, "response": {**ENVELOPE, "output": [message("hi")]}}).json()["reward"] == 1.0


def test_other_errors_stay_errors() -> None:
    async def broken(body: BaseVerifyRequest) -> None:
        raise ValueError("a bug")

    def plain() -> None:
        """Not a coroutine: cannot have awaited a judge."""

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(judge_failsafe(broken)(BaseVerifyRequest.model_validate(ROW)))
    assert judge_failsafe(plain) is plain


LABELS = ["[[YES]]", "[[NO]]"]
CUT = {"incomplete_details": {"reason": "max_output_tokens"}}


def about(answer: str) -> NeMoGymResponseCreateParamsNonStreaming:
    return NeMoGymResponseCreateParamsNonStreaming(input=f"Right? <{answer}>")


def judge_saying(*answers: tuple[int, Any]) -> Any:
    """A client whose calls get these answers, one after the other, as (status, body)."""
    client = judge_answering({})
    client.post = AsyncMock(
        side_effect=[
            MagicMock(
                ok=status == 200,
                status=status,
                headers={},
                url="http://judge",
                method="POST",
                read=AsyncMock(return_value=json.dumps(body).encode()),
            )
            for status, body in answers
        ]
    )
    return client


def asked(client: Any) -> list[Any]:
    return [call.kwargs["json"].input for call in client.post.await_args_list]


def test_a_judge_that_judges_an_answer_is_asked_once() -> None:
    client = judge_saying((200, {**ENVELOPE, "output": [message("[[YES]]")]}))

    evaluation = asyncio.run(ask_about(client, "judge", about, "4", iter(LABELS)))

    assert (evaluation.verdict_label, evaluation.judge_error) == ("[[YES]]", None)
    assert asked(client) == ["Right? <4>"]


ANSWERED = (200, {**ENVELOPE, "output": [message("[[YES]]")]})
FAILURES = [
    *((status, {"error": "no"}) for status in (400, 401, 403, 413, 422, 429, 500, 503)),
    (200, {**ENVELOPE, "output": [message("Let me see")], **CUT}),
    (200, {**ENVELOPE, "output": [message("If [[YES]], then")], "status": "incomplete"}),
    (200, {**ENVELOPE, "output": [], "error": {"code": "content_filter", "message": "flagged"}, "status": "failed"}),
    (200, {**ENVELOPE, "output": [message("[[YES]]")], "status": "failed"}),
    (200, {"id": "r"}),
]
CONTENT, CONTROL = "Right? <4>", "Right? <>"


@pytest.mark.parametrize("failure", FAILURES)
def test_an_answer_over_which_alone_the_judge_fails_three_times_has_no_label(
    failure: tuple[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    client = judge_saying(failure, ANSWERED, failure, *[ANSWERED] * 2, failure, *[ANSWERED] * 3)

    evaluation = asyncio.run(ask_about(client, "judge", about, "4", iter(LABELS)))

    assert evaluation.verdict_label is None
    assert "'judge'" in (evaluation.judge_error or "")
    assert f"an answer is scored without a verdict on it: {evaluation.judge_error}" in caplog.text
    assert asked(client) == [CONTENT, CONTROL, CONTENT, *[CONTROL] * 2, CONTENT, *[CONTROL] * 3]


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_judge_that_fails_fewer_times_over_an_answer_gives_its_verdict(
    failure: tuple[int, Any], failures: int
) -> None:
    client = judge_saying(failure, ANSWERED, *([failure, ANSWERED, ANSWERED] if failures == 2 else []), ANSWERED)

    evaluation = asyncio.run(ask_about(client, "judge", about, "4", LABELS))

    assert (evaluation.verdict_label, evaluation.judge_error) == ("[[YES]]", None)
    assert asked(client).count(CONTENT) == failures + 1


@pytest.mark.parametrize("answered_before", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("control", FAILURES)
def test_a_judge_that_fails_over_a_control_question_has_failed(control: tuple[int, Any], answered_before: int) -> None:
    first = (413, {"error": "the first failure"})
    questions = [first, ANSWERED, first, *[ANSWERED] * 2, first, *[ANSWERED] * 3]
    controls = [place for place, answer in enumerate(questions) if answer is ANSWERED]
    client = judge_saying(*questions[: controls[answered_before]], control)

    with pytest.raises(
        JudgeError, match=r"the first failure.*without an answer to judge it failed, too: judge 'judge'"
    ):
        asyncio.run(ask_about(client, "judge", about, "4", LABELS))

    assert asked(client)[-1] == CONTROL


@pytest.mark.parametrize("period", range(1, 7))
def test_a_judge_that_fails_regularly_is_never_taken_for_one_that_fails_over_the_answer(period: int) -> None:
    failure = (403, {"error": "now and then"})
    for begin in range(period):
        client = judge_saying(*(failure if (begin + place) % period == 0 else ANSWERED for place in range(9)))
        try:
            label = asyncio.run(ask_about(client, "judge", about, "4", LABELS)).verdict_label
        except JudgeError:
            label = "[[YES]]"  # a failure of the machinery, not a verdict

        assert label == "[[YES]]"


@pytest.mark.parametrize("runs", range(1, 6))
def test_a_judge_that_fails_every_other_time_or_in_series_scores_nothing(runs: int) -> None:
    failure: tuple[int, Any] = (500, {})
    client = judge_saying(*(failure if (place // runs) % 2 == 0 else ANSWERED for place in range(9)))

    with pytest.raises(JudgeError):
        asyncio.run(ask_about(client, "judge", about, "4", LABELS))
