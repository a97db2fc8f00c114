"""Multiple choice over HTTP, its metrics, and whole rollouts with scripted models."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.mcqa.app import MCQAResourcesServer, MCQAResourcesServerConfig

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "mcqa.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)
OPTIONS = [{"a": "Paris"}, {"B": "Rome"}, {"C": None}, {"note": "not an option"}]


def make_server(**settings: Any) -> MCQAResourcesServer:
    config = MCQAResourcesServerConfig(name="mcqa", host="127.0.0.1", port=1, entrypoint="app.py", **settings)
    return MCQAResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


def post(said: str, server: MCQAResourcesServer | None = None, **fields: Any) -> Any:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}
    row = {
        "responses_create_params": {"input": "Which city?"},
        "response": {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]},
        "options": OPTIONS,
        "expected_answer": "b",
        **fields,
    }
    return TestClient((server or make_server()).complete_app()).post("/verify", json=row)


def test_letters_are_compared_in_upper_case() -> None:
    verdict = post(r"\boxed{B}").json()

    assert (verdict["reward"], verdict["expected_answer"], verdict["extracted_answer"]) == (1.0, "B", "B")


@pytest.mark.parametrize("letter", ["C", "note", "N"])
def test_what_is_no_option_cannot_be_chosen(letter: str) -> None:
    verdict = post(rf"\boxed{{{letter}}}", expected_answer=letter).json()

    assert (verdict["reward"], verdict["extracted_answer"]) == (0.0, None)


def test_an_empty_answer_is_wrong_even_when_nothing_is_expected() -> None:
    assert post(" ", expected_answer="").json()["reward"] == 0.0


def test_the_row_chooses_how_it_is_graded_and_the_server_overrules_it() -> None:
    assert post("Answer: Rome", grading_mode="lenient_answer_colon").json()["reward"] == 1.0
    assert post("Answer: Rome").json()["reward"] == 0.0
    server = make_server(grading_mode="lenient_answer_colon_md")
    assert post("**Answer:** B.", server, grading_mode="lenient_answer_colon").json()["reward"] == 1.0


def test_a_mode_that_only_the_server_may_choose_is_refused_in_a_row() -> None:
    assert post("Answer: B", grading_mode="lenient_answer_colon_md").status_code == 422


def test_a_pattern_of_the_row_replaces_the_mode_unless_it_is_broken() -> None:
    assert post(r"I say B. \boxed{A}", template_metadata={"output_regex": r"say (\w)"}).json()["reward"] == 1.0
    assert post(r"\boxed{B}", template_metadata={"output_regex": r"say (\w)"}).json()["reward"] == 0.0
    assert post(r"\boxed{B}", template_metadata={"output_regex": "("}).json()["reward"] == 1.0


def test_a_rollout_can_be_verified_again() -> None:
    first = post(r"\boxed{B}", own_field=[1]).json()

    again = TestClient(make_server().complete_app()).post("/verify", json={**first, "extracted_answer": "A"}).json()

    assert (again["reward"], again["extracted_answer"], again["own_field"]) == (1.0, "B", [1])


def test_metrics_count_passes_votes_and_missing_answers() -> None:
    server = make_server()
    tasks: list[list[dict[str, Any]]] = [
        [{"reward": 1.0, "extracted_answer": "B"}, {"reward": 0.0, "extracted_answer": None}],
        [{"reward": 0.0, "extracted_answer": "A"}, {"reward": 0.0, "extracted_answer": "A"}],
    ]

    metrics = server.compute_metrics(tasks)
    key_metrics = server.get_key_metrics({"mean/reward": 0.25, "mean/other": 3, **metrics})

    assert (metrics["pass@2/accuracy"], metrics["majority@2/accuracy"]) == (50.0, 50.0)
    assert key_metrics == {
        "mean/reward": 0.25,
        "pass@1/accuracy": 25.0,
        "pass@1[avg-of-2]/accuracy": 25.0,
        "pass@1[avg-of-2]/no_answer": 25.0,
        "pass@2/accuracy": 50.0,
        "pass@2/no_answer": 50.0,
        "majority@2/accuracy": 50.0,
    }


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    rows = [{**row, "source": {"page": 7}} for row in ROWS]

    results = play(CONFIG, rows, script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


def test_a_wrong_model_scores_zero() -> None:
    wrong = {"A": "B", "B": "C", "C": "D", "D": "A"}
    for row in ROWS:
        script = {"rules": [{"reply": {"text": rf"\boxed{{{wrong[row['expected_answer']]}}}"}}]}
        (result,) = play(CONFIG, [row], script=script)
        assert (result["reward"], result["extracted_answer"]) == (0.0, wrong[row["expected_answer"]])


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"


def test_a_pattern_that_takes_for_ever_finds_nothing() -> None:
    row = {**ROWS[0], "template_metadata": {"output_regex": ["(nothing)", "(a+)+$"]}}
    hurried = {"mcqa": {"resources_servers": {"mcqa": {"pattern_timeout_s": 1.0}}}}

    (result,) = play(CONFIG, [row], script={"rules": [{"reply": {"text": "a" * 60 + "b"}}]}, settings=hurried)

    assert (result["reward"], result["extracted_answer"]) == (0.0, None)
