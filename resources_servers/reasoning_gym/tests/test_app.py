"""Generated puzzles over HTTP, and whole rollouts with scripted models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.reasoning_gym.app import ReasoningGymResourcesServer, ReasoningGymResourcesServerConfig

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "reasoning_gym.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)


def make_server(**settings: Any) -> ReasoningGymResourcesServer:
    config = ReasoningGymResourcesServerConfig(
        name="reasoning_gym", host="127.0.0.1", port=1, entrypoint="app.py", **settings
    )
    return ReasoningGymResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    server = make_server(scoring_processes=1, scoring_cpu_limit_s=1)
    with TestClient(server.complete_app()) as client:
        yield client


def said(text: str, **row: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]}
    return {"responses_create_params": {"input": "?"}, "response": response, **row}


def countdown(**metadata: Any) -> dict[str, Any]:
    given = {"source_dataset": "countdown", "numbers": [9, 3], "target": 12, "expression": "9 + 3", **metadata}
    return {"question": "Make 12 of 9 and 3.", "answer": "9 + 3", "metadata": given}


def test_the_verdict_says_what_was_scored_and_keeps_the_row(client: TestClient) -> None:
    verdict = client.post("/verify", json=said("<answer>3 + 9</answer>", own_field=[1], **countdown())).json()

    assert (verdict["reward"], verdict["score"], verdict["task_name"]) == (1.0, 1.0, "countdown")
    assert (verdict["extracted_answer"], verdict["scoring_error"]) == ("3 + 9", None)
    assert (verdict["own_field"], verdict["metadata"]["target"]) == ([1], 12)


def test_no_answer_is_wrong(client: TestClient) -> None:
    verdict = client.post("/verify", json=said(" ", **countdown())).json()

    assert (verdict["reward"], verdict["extracted_answer"]) == (0.0, None)


def test_an_answer_that_takes_for_ever_is_stopped_and_wrong(client: TestClient) -> None:
    coin = {"question": "?", "answer": "0.5", "metadata": {"source_dataset": "coin_flip"}}

    verdict = client.post("/verify", json=said("<answer>1e999999999</answer>", **coin)).json()

    assert verdict["reward"] == 0.0
    assert verdict["scoring_error"].startswith(
        ("the scorer was stopped at its CPU limit", "the scorer was still running")
    )


def test_a_formula_that_is_too_large_is_not_computed(client: TestClient) -> None:
    verdict = client.post("/verify", json=said("<answer>9**9**9**9 + 3</answer>", **countdown())).json()

    assert verdict["reward"] == 0.01
    assert verdict["scoring_error"] == "FormulaError: an exponent is larger than 1000"


def test_a_formula_that_is_a_program_can_do_nothing(client: TestClient, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    program = f"lambdify(x, \"open({str(trace)!r}, 'w')\")(1)"

    verdict = client.post("/verify", json=said(f"<answer>{program}</answer>", **countdown())).json()

    assert (verdict["reward"], verdict["scoring_error"]) == (0.01, "FormulaError: a formula has no Call")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "metadata.source_dataset must name the reasoning-gym task, such as 'gcd', but is None"),
        ({"source_dataset": "count_down"}, "did you mean 'countdown'?"),
        ({"source_dataset": "prime_factorization"}, "rejects the row's own answer too"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused_and_not_scored_zero(
    client: TestClient, metadata: dict[str, Any], words: str
) -> None:
    answer = client.post("/verify", json=said("1", question="?", answer="2 x 3", metadata=metadata))

    assert answer.status_code == 422
    assert words in json.dumps(answer.json()).replace('\\"', '"')


def test_requests_of_other_event_loops_use_the_same_processes(client: TestClient) -> None:
    for _ in range(2):
        other = TestClient(client.app)  # every request of it has an event loop of its own
        assert other.post("/verify", json=said("<answer>9+3</answer>", **countdown())).json()["score"] == 1.0


def test_accuracy_counts_full_scores_and_tasks_are_told_apart() -> None:
    server = make_server()
    gcd = {"task_name": "gcd"}
    tasks: list[list[dict[str, Any]]] = [
        [{**gcd, "reward": 1.0, "extracted_answer": "1"}, {**gcd, "reward": 0.5, "extracted_answer": "12"}],
        [{"reward": 0.0, "extracted_answer": None, "task_name": "maze"}] * 2,
    ]

    metrics = server.compute_metrics(tasks)
    key_metrics = server.get_key_metrics({"mean/reward": 0.375, "mean/x": 1, **metrics})

    assert (metrics["gcd/pass@1/accuracy"], metrics["maze/pass@1/accuracy"]) == (50.0, 0.0)
    assert key_metrics == {
        "mean/reward": 0.375,
        "pass@1[avg-of-2]/accuracy": 25.0,
        "pass@1[avg-of-2]/no_answer": 50.0,
        "pass@1[avg-of-2]/score": 37.5,
        "pass@2/accuracy": 50.0,
        "pass@2/score": 50.0,
        "majority@2/accuracy": 25.0,
        "majority@2/score": 37.5,
    }


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    results = play(CONFIG, [{**row, "source": {"page": 7}} for row in ROWS], script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


def test_a_wrong_model_scores_zero_and_one_that_does_not_play_along_scores_zero_or_fails() -> None:
    habits = {"is wrong": {"rules": [{"reply": {"text": "<answer>?</answer>"}}]}, **MALFORMED}
    script: dict[str, list[Any]] = {"rules": [], "faults": []}
    rows = []
    for number, habit in enumerate(habits.values()):
        mark = f"(habit {number})"
        for kind, entries in habit.items():
            script[kind] += [
                {**entry, "match": {**entry.get("match", {}), "conversation_contains": mark}} for entry in entries
            ]
        rows.append({**ROWS[number % 5], "responses_create_params": {"input": f"Solve it. {mark}"}})

    results = play(CONFIG, rows, script=script)

    for name, result in zip(habits, results, strict=True):
        assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error", name
    assert results[0]["extracted_answer"] == "?"
