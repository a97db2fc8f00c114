"""The multi-step environment: its tools, its verdict, and whole rollouts with scripted models."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.example_multi_step.app import (
    ExampleMultiStepResourcesServer,
    ExampleMultiStepResourcesServerConfig,
)

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "example_multi_step.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)


@pytest.fixture
def client() -> TestClient:
    config = ExampleMultiStepResourcesServerConfig(name="multi_step", host="127.0.0.1", port=1, entrypoint="app.py")
    server = ExampleMultiStepResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    return TestClient(server.complete_app())


def call(arguments: Any, name: str = "extract_synonym_values") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": text}


def verify(client: TestClient, *output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    row = {
        "id": 1,
        "responses_create_params": {"input": "go"},
        "expected_synonym_values": [10, 20],
        "expected_synonyms": ["a", "b"],
        "minefield_label": "c",
        "minefield_label_value": 30,
        "response": {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": list(output)},
        **fields,
    }
    answer = client.post("/verify", json=row)
    assert answer.status_code == 200, answer.text
    verdict: dict[str, Any] = answer.json()
    return verdict


def test_the_value_of_a_word_is_the_sum_of_its_character_codes(client: TestClient) -> None:
    assert client.post("/get_synonym_value", json={"synonym": "ab"}).json() == {"synonym_value": 97 + 98}


def test_values_can_be_handed_in_and_anything_else_is_refused(client: TestClient) -> None:
    assert client.post("/extract_synonym_values", json={"synonym_values": [1]}).json() == {"success": True}
    assert client.post("/extract_synonym_values", json={"synonym_values": ["x"]}).status_code == 422


def test_the_last_values_handed_in_count(client: TestClient) -> None:
    wrong, right = call({"synonym_values": [1]}), call({"synonym_values": [10, 20]})

    assert verify(client, wrong, right)["reward"] == 1.0
    assert verify(client, right, wrong)["reward"] == 0.0


def test_a_verdict_says_in_which_respect_values_are_wrong(client: TestClient) -> None:
    swapped = verify(client, call({"synonym_values": [20, 10]}))
    half = verify(client, call({"synonym_values": [10, 30]}))

    assert (swapped["set_overlap"], swapped["order_instruction_following_failure"]) == (1.0, True)
    assert (half["set_overlap"], half["original_term_minefield_hit"]) == (0.5, True)
    assert (half["accuracy"], half["order_instruction_following_failure"]) == (False, False)


@pytest.mark.parametrize(
    "arguments", ["{", "[]", '{"synonym_values": "many"}', '{"synonym_values": ["ten"]}', "[" * 9999]
)
def test_malformed_arguments_count_as_nothing_handed_in(client: TestClient, arguments: str) -> None:
    verdict = verify(client, call(arguments))

    assert (verdict["reward"], verdict["parsed_synonym_values"]) == (0.0, [])


def test_a_rollout_can_be_verified_again(client: TestClient) -> None:
    first = verify(client, call({"synonym_values": [10, 20]}), own_field="kept")

    again = client.post("/verify", json={**first, "accuracy": False, "reward": 0.3}).json()

    assert (again["reward"], again["accuracy"], again["own_field"]) == (1.0, True, "kept")


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    rows = [{**row, "source": {"page": 7}} for row in ROWS]

    results = play(CONFIG, rows, script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


def test_a_model_that_hands_in_the_wrong_order_scores_zero() -> None:
    script = yaml.safe_load(RIGHT.read_text())
    for rule in script["rules"]:
        handed_in = rule["reply"].get("tool_call")
        if handed_in:
            handed_in["arguments"]["synonym_values"].reverse()

    results = play(CONFIG, ROWS, script=script)

    assert [result["reward"] for result in results] == [0.0] * 5
    assert all(result["order_instruction_following_failure"] for result in results)


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"


def test_a_model_whose_arguments_are_no_json_scores_zero() -> None:
    rules = [
        {"match": {"turn": 1}, "reply": {"tool_call": {"name": "extract_synonym_values", "arguments": "{"}}},
        {"reply": {"text": "done"}},
    ]

    (result,) = play(CONFIG, ROWS[:1], script={"rules": rules})

    assert result["reward"] == 0.0
    assert "Invalid tool call arguments" in result["response"]["output"][1]["output"]
