"""The counter environment: sessions do not mix, and whole rollouts with scripted models."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "example_session_state_mgmt.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)


@pytest.fixture
def server() -> StatefulCounterResourcesServer:
    config = StatefulCounterResourcesServerConfig(name="counter", host="127.0.0.1", port=1, entrypoint="app.py")
    return StatefulCounterResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


def session(server: StatefulCounterResourcesServer) -> TestClient:
    """A client that keeps its cookie, and so its session."""
    return TestClient(server.complete_app())


def verify(client: TestClient, expected: int, **options: Any) -> float:
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": []}
    row = {"responses_create_params": {"input": "go"}, "expected_count": expected, "response": response}
    reward: float = client.post("/verify", json=row, **options).json()["reward"]
    return reward


def test_every_session_has_a_counter_of_its_own(server: StatefulCounterResourcesServer) -> None:
    one, other = session(server), session(server)
    one.post("/seed_session", json={"initial_count": 3})
    other.post("/seed_session", json={"initial_count": 50})

    assert one.post("/increment_counter", json={"count": 2}).json() == {"success": True}

    assert one.post("/get_counter_value").json() == {"count": 5}
    assert other.post("/get_counter_value").json() == {"count": 50}
    assert (verify(one, 5), verify(other, 5)) == (1.0, 0.0)


def test_it_says_why_it_cannot_score_again(server: StatefulCounterResourcesServer) -> None:
    client = session(server)

    assert client.get("/reverify_mode").json() == "unsupported"
    assert "session" in client.get("/reverify_reason").json()


def test_a_running_counter_is_not_seeded_again(server: StatefulCounterResourcesServer) -> None:
    client = session(server)
    client.post("/seed_session", json={"initial_count": 3})
    client.post("/seed_session", json={"initial_count": 99})

    assert client.post("/get_counter_value").json() == {"count": 3}


def test_an_unseeded_session_counts_from_zero_and_an_unknown_one_is_wrong(
    server: StatefulCounterResourcesServer,
) -> None:
    assert verify(session(server), 0) == 0.0
    client = session(server)
    client.post("/increment_counter", json={"count": 4})
    assert client.post("/get_counter_value").json() == {"count": 4}


def test_a_seed_without_a_start_is_refused(server: StatefulCounterResourcesServer) -> None:
    assert session(server).post("/seed_session", json={}).status_code == 422


def test_a_counter_is_forgotten_when_its_episode_is_over(server: StatefulCounterResourcesServer) -> None:
    client = session(server)
    client.post("/seed_session", json={"initial_count": 3})

    assert verify(client, 3, headers={"x-nemo-gym-end-session": "true"}) == 1.0

    assert server._counters == {}


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    rows = [{**row, "source": {"page": 7}} for row in ROWS]

    results = play(CONFIG, rows, script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)
    said = [result["response"]["output"][-1]["content"][0]["text"] for result in results]
    assert said == [f"The counter says {row['expected_count']}." for row in ROWS]


def test_a_model_that_forgets_the_second_number_scores_zero() -> None:
    script = yaml.safe_load(RIGHT.read_text())
    script["rules"][1]["reply"] = {"text": "That was one of them."}

    assert [result["reward"] for result in play(CONFIG, ROWS, script=script)] == [0.0] * 5


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"


def test_a_model_that_counts_with_words_scores_zero() -> None:
    rules = [
        {"match": {"turn": 1}, "reply": {"tool_call": {"name": "increment_counter", "arguments": {"count": "six"}}}},
        {"reply": {"text": "done"}},
    ]

    (result,) = play(CONFIG, ROWS[:1], script={"rules": rules})

    assert result["reward"] == 0.0
    assert "int_parsing" in result["response"]["output"][1]["output"]


def test_a_row_without_a_start_fails_by_name() -> None:
    row = {key: value for key, value in ROWS[0].items() if key != "initial_count"}

    (result,) = play(CONFIG, [row], script=str(RIGHT))

    assert result["_ng_failure_class"] == "http_4xx"
    assert "initial_count" in result["_ng_failure_message"]
