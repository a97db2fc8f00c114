"""Instructions over HTTP, and whole rollouts with scripted models."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.instruction_following.app import (
    InstructionFollowingResourcesServer,
    InstructionFollowingResourcesServerConfig,
)

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "instruction_following.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)
TWO = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [None, {"num_words": None}],
    "prompt": "Quote something without a comma.",
}


def make_server() -> InstructionFollowingResourcesServer:
    config = InstructionFollowingResourcesServerConfig(
        name="instruction_following", host="127.0.0.1", port=1, entrypoint="app.py"
    )
    return InstructionFollowingResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


def post(*said: str, **row: Any) -> Any:
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]} for text in said
    ]
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": output}
    body = {"responses_create_params": {"input": "?"}, "response": response, **row}
    return TestClient(make_server().complete_app()).post("/verify", json=body)


def test_only_following_every_instruction_counts() -> None:
    verdict = post('"To be or not to be"', id=7, verifier_metadata=TWO).json()
    half = post("To be or not to be", verifier_metadata=TWO).json()

    assert (verdict["reward"], verdict["follow_all_instructions"]) == (1.0, True)
    assert (verdict["id"], verdict["verifier_metadata"]) == (7, TWO)
    assert (half["reward"], half["follow_instruction_list"]) == (0.0, [True, False])


def test_a_row_may_ask_for_the_share_that_was_followed() -> None:
    verdict = post("To be or not to be", verifier_metadata={**TWO, "grading_mode": "fraction"}).json()

    assert (verdict["reward"], verdict["follow_all_instructions"]) == (0.5, False)


def test_rows_may_have_their_instructions_at_the_top_where_metadata_wins() -> None:
    top = post("To be, or not to be", **TWO).json()
    both = post(
        '"a, b"', **TWO, verifier_metadata={"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    ).json()

    assert (top["reward"], top["kwargs"]) == (0.0, TWO["kwargs"])
    assert (both["reward"], both["follow_instruction_list"]) == (1.0, [True])


def test_the_last_message_counts_and_an_empty_one_follows_nothing() -> None:
    assert post("a, b", '"a"', verifier_metadata=TWO).json()["reward"] == 1.0
    assert post('"a"', " ", verifier_metadata=TWO).json()["follow_instruction_list"] == [False, False]
    assert post(verifier_metadata=TWO).json()["follow_instruction_list"] == [False, False]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "instruction_id_list"),
        ({"verifier_metadata": {**TWO, "instruction_id_list": ["no:such", "startend:quotation"]}}, "no:such"),
        ({"verifier_metadata": {**TWO, "kwargs": [{}]}}, "2 entries and kwargs 1"),
        ({"verifier_metadata": {**TWO, "grading_mode": "strict"}}, "grading_mode"),
        ({"verifier_metadata": {"instruction_id_list": [], "kwargs": []}}, "at least 1 item"),
    ],
)
def test_a_row_that_cannot_be_checked_is_refused_and_not_scored_zero(row: dict[str, Any], words: str) -> None:
    answer = post("anything", **row)

    assert answer.status_code == 422
    assert words in answer.text


def test_metrics_count_prompts_and_instructions() -> None:
    server = make_server()
    tasks: list[list[dict[str, Any]]] = [
        [{"reward": float(second), "follow_instruction_list": [True, second]} for second in (True, False)]
    ]

    metrics = server.compute_metrics(tasks)
    key_metrics = server.get_key_metrics({"mean/reward": 0.5, "mean/x": 1, **metrics})

    assert key_metrics == {
        "mean/reward": 0.5,
        "pass@1[avg-of-2]/accuracy": 50.0,
        "pass@1[avg-of-2]/instruction_accuracy": 75.0,
        "pass@2/accuracy": 100.0,
        "pass@2/instruction_accuracy": 100.0,
    }


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    results = play(CONFIG, [{**row, "source": {"page": 7}} for row in ROWS], script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


def test_a_wrong_model_scores_zero() -> None:
    text = "- I, for one, like METAL:\n- one\n- two"
    results = play(CONFIG, ROWS, script={"rules": [{"reply": {"text": text}}]})

    assert [result["reward"] for result in results] == [0.0] * 5


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"
