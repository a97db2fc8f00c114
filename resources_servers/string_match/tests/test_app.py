"""Text matching over HTTP, and whole rollouts with scripted models."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.string_match.app import StringMatchResourcesServer, StringMatchResourcesServerConfig

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "string_match.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)


def make_server() -> StringMatchResourcesServer:
    config = StringMatchResourcesServerConfig(name="string_match", host="127.0.0.1", port=1, entrypoint="app.py")
    return StringMatchResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


def post(said: str, expected: Any, **fields: Any) -> Any:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}
    row = {
        "responses_create_params": {"input": "Say something."},
        "response": {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]},
        "expected_answer": expected,
        **fields,
    }
    return TestClient(make_server().complete_app()).post("/verify", json=row)


@pytest.mark.parametrize(
    ("said", "expected", "fields", "reward"),
    [
        ("Au", "Au", {}, 1.0),
        (" Au\n", "Au", {}, 1.0),
        ("It is Au", "Au", {}, 0.0),
        ("au", "Au", {}, 0.0),
        ("au", "Au", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("42", 42, {}, 1.0),
        ("It is Au.", "Au", {"match": "contains"}, 1.0),
        ("Gold", "Au", {"match": "contains"}, 0.0),
        ("AUTUMN", "au", {"match": "contains", "ignore_case": True}, 1.0),
        ("the 29th", r"\b2[39]", {"match": "regex"}, 1.0),
        ("the 24th", r"\b2[39]", {"match": "regex"}, 0.0),
        ("GOLD", "^gold$", {"match": "regex", "ignore_case": True}, 1.0),
        ("GOLD", "^gold$", {"match": "regex"}, 0.0),
        ("a.b", "a.b", {"match": "contains"}, 1.0),
        ("axb", "a.b", {"match": "contains"}, 0.0),
        ("", "Au", {"match": "contains"}, 0.0),
    ],
)
def test_the_row_says_how_texts_are_compared(said: str, expected: Any, fields: dict[str, Any], reward: float) -> None:
    assert post(said, expected, **fields).json()["reward"] == reward


@pytest.mark.parametrize(
    "row",
    [{"expected": "(", "match": "regex"}, {"expected": ""}, {"expected": "x", "match": "fuzzy"}, {"expected": None}],
)
def test_a_row_that_cannot_be_matched_is_refused_and_not_scored(row: dict[str, Any]) -> None:
    assert post("anything", **row).status_code == 422


def test_metrics_have_passes_but_no_vote() -> None:
    server = make_server()

    metrics = server.compute_metrics([[{"reward": 1.0}, {"reward": 0.0}], [{"reward": 0.0}, {"reward": 0.0}]])

    assert not [key for key in metrics if key.startswith("majority")]
    assert server.get_key_metrics({"mean/reward": 0.25, **metrics}) == {
        "mean/reward": 0.25,
        "pass@1[avg-of-2]/accuracy": 25.0,
        "pass@2/accuracy": 50.0,
    }


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    rows = [{**row, "source": {"page": 7}} for row in ROWS]

    results = play(CONFIG, rows, script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


def test_a_wrong_model_scores_zero() -> None:
    script = {"rules": [{"reply": {"text": "Lead, the Rhine, 24 or the Atlantic"}}]}

    assert [result["reward"] for result in play(CONFIG, ROWS, script=script)] == [0.0] * 5


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"


def test_an_answer_on_which_a_pattern_takes_for_ever_is_wrong_and_holds_up_no_other() -> None:
    rows = [{**ROWS[0], "expected_answer": pattern, "match": "regex"} for pattern in ("(a+)+$", "b$")]
    hurried = {"string_match": {"resources_servers": {"string_match": {"pattern_timeout_s": 1.0}}}}

    endless, quick = play(CONFIG, rows, script={"rules": [{"reply": {"text": "a" * 60 + "b"}}]}, settings=hurried)

    assert (endless["reward"], quick["reward"]) == (0.0, 1.0)


def test_a_row_with_a_broken_pattern_fails_by_name() -> None:
    (result,) = play(CONFIG, [{**ROWS[0], "expected_answer": "(", "match": "regex"}], script=str(RIGHT))

    assert result["_ng_failure_class"] == "http_4xx"
    assert "not a regular expression" in result["_ng_failure_message"]
