"""Mathematical answers over HTTP, with and without a judge, and whole rollouts with scripted models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from nemo_gym.judge import fenced
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.math_with_judge.app import (
    LibraryJudgeMathResourcesServer,
    LibraryJudgeMathResourcesServerConfig,
    without_delimiters,
)

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "math_with_judge.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)
WITH_JUDGE = {
    "math_with_judge": {
        "resources_servers": {
            "math_with_judge": {
                "should_use_judge": True,
                "judge_model_server": {"type": "responses_api_models", "name": "judge"},
                "judge_responses_create_params": {"input": [], "temperature": 0.0},
            }
        }
    }
}
IN_WORDS = {"rules": [{"reply": {"text": "It is one half."}}]}
HALF = {"responses_create_params": {"input": "What is 2/4?"}, "question": "What is 2/4?", "expected_answer": "1/2"}


def make_server(**settings: Any) -> LibraryJudgeMathResourcesServer:
    config = LibraryJudgeMathResourcesServerConfig(
        name="math", host="127.0.0.1", port=1, entrypoint="app.py", **settings
    )
    return LibraryJudgeMathResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_server(should_use_judge=False).complete_app()) as client:
        yield client


def row_with(said: str, expected: Any, **fields: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]}
    return {**HALF, "expected_answer": expected, "response": response, **fields}


def judge_saying(*verdicts: str) -> dict[str, Any]:
    """A judge that answers its questions in this order, told apart by what stands first."""
    first, *second = verdicts
    rules = [{"match": {"last_user_regex": r"Answer A:\n\S+ TEXT \w+-+\n1/2\n"}, "reply": {"text": first}}]
    rules += [
        {"match": {"last_user_regex": r"Answer B:\n\S+ TEXT \w+-+\n1/2"}, "reply": {"text": text}} for text in second
    ]
    return {"rules": [*rules, {"reply": {"text": "I was not asked this."}}]}


def judged(judge: dict[str, Any], policy: Any = IN_WORDS, row: dict[str, Any] = HALF) -> dict[str, Any]:
    (result,) = play(CONFIG, [row], script=policy, models={"judge": judge}, settings=WITH_JUDGE)
    return result


@pytest.mark.parametrize(
    ("expected", "said", "reward"),
    [
        (18, r"\boxed{18}", 1.0),
        (18.0, r"\boxed{18}", 1.0),
        (2.5, r"\boxed{5/2}", 1.0),
        ("$25\\pi$", r"\boxed{\pi \cdot 5^2}", 1.0),
        (r"\(x+1\)", r"\boxed{1+x}", 1.0),
        ("18", r"\boxed{81}", 0.0),
    ],
)
def test_numbers_and_formulas_are_compared_by_value(
    client: TestClient, expected: Any, said: str, reward: float
) -> None:
    verdict = client.post("/verify", json=row_with(said, expected, own_field=1)).json()

    assert (verdict["reward"], verdict["library_reward"], verdict["own_field"]) == (reward, reward, 1)
    assert isinstance(verdict["expected_answer"], str)
    assert verdict["judge_evaluations"] is None


@pytest.mark.parametrize("expected", ["", None, True, ["1"]])
def test_a_row_without_a_usable_answer_is_refused_and_not_scored(client: TestClient, expected: Any) -> None:
    assert client.post("/verify", json=row_with("1", expected)).status_code == 422


def test_a_rollout_can_be_verified_again(client: TestClient) -> None:
    first = client.post("/verify", json=row_with(r"\boxed{0.5}", "1/2")).json()

    again = client.post("/verify", json={**first, "library_reward": 0.0}).json()

    assert (again["reward"], again["library_reward"], again["extracted_answer"]) == (1.0, 1.0, "1/2")


@pytest.mark.parametrize(
    ("given", "bare"),
    [("$x$", "x"), ("$$x$$", "x"), (r"\( x \)", "x"), (r"\[x\]", "x"), ("x", "x"), ("$", "$"), ("$x", "$x")],
)
def test_delimiters_around_a_formula_are_removed(given: str, bare: str) -> None:
    assert without_delimiters(given) == bare


def test_an_answer_that_takes_too_long_is_marked_and_wrong() -> None:
    server = make_server(should_use_judge=False, library_verifier_timeout_seconds=0.5)
    with TestClient(server.complete_app()) as client:
        verdict = client.post("/verify", json=row_with(r"\boxed{9^{9^{9^{9}}}}", "2")).json()

    assert (verdict["reward"], verdict["library_timed_out"]) == (0.0, True)


def test_the_processes_end_with_the_app() -> None:
    server = make_server(should_use_judge=False)
    with TestClient(server.complete_app()) as client:
        client.post("/verify", json=row_with("1", "1"))
        pids = server._library.pids

    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_judge_must_be_named_when_it_is_to_be_used() -> None:
    with pytest.raises(ValidationError, match="judge_model_server"):
        make_server(should_use_judge=True)


def test_an_answer_in_words_is_right_when_the_judge_finds_it_equal_both_ways() -> None:
    result = judged(judge_saying("Same. [[A=B]]", "[[A=B]]"))

    assert (result["reward"], result["library_reward"]) == (1.0, 0.0)
    first, second = result["judge_evaluations"]
    assert first["verdict_label"] == second["verdict_label"] == "[[A=B]]"
    assert first["responses_create_params"]["temperature"] == 0.0
    expected, said = fenced("1/2"), fenced("It is one half.")
    asked = first["responses_create_params"]["input"][1]["content"]
    assert asked == f"Problem:\nWhat is 2/4?\n\nAnswer A:\n{expected}\n\nAnswer B:\n{said}"
    swapped = second["responses_create_params"]["input"][1]["content"]
    assert swapped == f"Problem:\nWhat is 2/4?\n\nAnswer A:\n{said}\n\nAnswer B:\n{expected}"


@pytest.mark.parametrize(
    ("judge", "questions"),
    [
        (judge_saying("[[A=B]] at first sight, yet [[A!=B]]", "[[A=B]]"), 1),
        (judge_saying("[[A=B]]", "[[A=B]]? On second thoughts: [[A!=B]]"), 2),
        (judge_saying("They look alike."), 1),
    ],
    ids=["says no", "says yes and no", "says neither"],
)
def test_an_answer_is_wrong_unless_the_judge_is_sure(judge: dict[str, Any], questions: int) -> None:
    result = judged(judge)

    assert (result["reward"], len(result["judge_evaluations"])) == (0.0, questions)


def test_a_judge_that_quotes_the_answer_gives_no_verdict_by_that() -> None:
    quotes = {"match": {"last_user_regex": r"(?P<given>The answer is [^\n]*)"}, "reply": {"text": "{given} [[A!=B]]"}}
    only_quotes = {**quotes, "reply": {"text": "It says: {given}"}}
    says = {"rules": [{"reply": {"text": "The answer is [[A=B]]"}}]}

    for rule in (quotes, only_quotes):
        assert judged({"rules": [rule]}, policy=says)["reward"] == 0.0


def test_the_judge_is_not_asked_about_what_is_clear() -> None:
    broken = {"faults": [{"kind": "status", "status": 500}]}

    right = judged(broken, policy={"rules": [{"reply": {"text": r"\boxed{0.5}"}}]})
    silent = judged(broken, policy={"rules": [{"reply": {}}]})

    assert (right["reward"], right["judge_evaluations"]) == (1.0, None)
    assert (silent["reward"], silent["judge_evaluations"]) == (0.0, None)


def test_a_row_without_a_question_is_judged_by_what_the_user_asked() -> None:
    row = {key: value for key, value in HALF.items() if key != "question"}

    result = judged(judge_saying("[[A=B]]", "[[A=B]]"), row=row)

    assert "What is 2/4?" in result["judge_evaluations"][0]["responses_create_params"]["input"][1]["content"]


@pytest.mark.parametrize(
    "judge",
    [
        {"faults": [{"kind": "status", "status": 503}]},
        {"faults": [{"kind": "malformed", "body": '{"id": 1}'}]},
        {"rules": [{"reply": {"text": "Let me think", "incomplete": "max_output_tokens"}}]},
    ],
    ids=["fails", "answers nonsense", "breaks off"],
)
def test_a_judge_that_fails_fails_the_rollout_without_a_score(judge: dict[str, Any]) -> None:
    result = judged(judge, row={**HALF, "own_field": "kept"})

    assert result["_ng_failure_class"] == "judge_failed"
    assert "'judge'" in result["_ng_failure_judge_error"]
    assert result["_ng_failure_message"] == result["_ng_failure_judge_error"]
    assert result["reward"] is None
    assert (result["own_field"], result["response"]["output"][0]["type"]) == ("kept", "message")


def test_metrics_tell_the_library_from_the_judge() -> None:
    server = make_server(judge_model_server={"type": "responses_api_models", "name": "judge"})
    tasks: list[list[dict[str, Any]]] = [
        [
            {"reward": 1.0, "library_reward": 0.0, "extracted_answer": None, "judge_evaluations": [{}, {}]},
            {"reward": 1.0, "library_reward": 1.0, "extracted_answer": "1/2", "judge_evaluations": None},
        ]
    ]

    metrics = server.compute_metrics(tasks)
    key_metrics = server.get_key_metrics({"mean/reward": 1.0, "mean/input_tokens": 9, "mean/other": 1, **metrics})

    assert key_metrics == {
        "mean/reward": 1.0,
        "mean/input_tokens": 9,
        "pass@1[avg-of-2]/accuracy": 100.0,
        "pass@1[avg-of-2]/judge_accuracy": 100.0,
        "pass@1[avg-of-2]/no_answer": 50.0,
        "pass@1[avg-of-2]/symbolic_accuracy": 50.0,
        "pass@2/accuracy": 100.0,
        "pass@2/symbolic_accuracy": 100.0,
        "majority@2/accuracy": 100.0,
        "majority@2/judge_accuracy": 0.0,
        "majority@2/symbolic_accuracy": 100.0,
    }


def test_without_a_judge_there_is_one_accuracy() -> None:
    metrics = make_server(should_use_judge=False).compute_metrics([[{"reward": 1.0, "library_reward": 1.0}]])

    assert [key for key in metrics if key.startswith("pass@1/")] == ["pass@1/no_answer", "pass@1/symbolic_accuracy"]


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    rows = [{**row, "source": {"page": 7}} for row in ROWS]

    results = play(CONFIG, rows, script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


def test_a_wrong_model_scores_zero() -> None:
    script = {"rules": [{"reply": {"text": r"\boxed{-17}"}}]}

    results = play(CONFIG, ROWS, script=script)

    assert [(result["reward"], result["extracted_answer"]) for result in results] == [(0.0, "-17")] * 5


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    judge = {"rules": [{"reply": {"text": "[[A!=B]]"}}]}

    result = judged(judge, policy=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error", json.dumps(result)
