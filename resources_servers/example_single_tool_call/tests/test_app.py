"""The example environment, asked over HTTP, and whole rollouts with scripted models."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient
from omegaconf import OmegaConf

from nemo_gym.base_resources_server import BaseRunRequest
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, play
from resources_servers.example_single_tool_call.app import (
    SimpleWeatherResourcesServer,
    SimpleWeatherResourcesServerConfig,
)

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "example_single_tool_call.yaml"
ROWS = [json.loads(line) for line in (FOLDER / "data" / "example.jsonl").read_text().splitlines()]


@pytest.fixture
def client() -> TestClient:
    config = SimpleWeatherResourcesServerConfig(
        name="example_single_tool_call", host="127.0.0.1", port=1, entrypoint="app.py"
    )
    server = SimpleWeatherResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    return TestClient(server.complete_app())


def test_it_is_cold_in_every_city(client: TestClient) -> None:
    assert client.post("/get_weather", json={"city": "Quito"}).json() == {
        "city": "Quito",
        "weather_description": "The weather in Quito is cold.",
    }


def test_a_call_without_a_city_is_refused(client: TestClient) -> None:
    assert client.post("/get_weather", json={"town": "Quito"}).status_code == 422


def test_every_rollout_is_rewarded_and_comes_back_whole(client: TestClient) -> None:
    row = {
        **ROWS[0],
        "own_field": 3,
        "response": {"id": "resp_1", "created_at": 1, "model": "m", "object": "response", "output": []},
    }

    verdict = client.post("/verify", json=row).json()

    assert (verdict["reward"], verdict["own_field"], verdict["response"]["id"]) == (1.0, 3, "resp_1")
    assert verdict["responses_create_params"]["tools"] == row["responses_create_params"]["tools"]


def test_there_are_five_example_rows_that_offer_the_tool() -> None:
    assert len(ROWS) == 5
    for row in ROWS:
        params = BaseRunRequest.model_validate(row).responses_create_params
        assert [tool["name"] for tool in params.tools] == ["get_weather"]
        assert [item.role for item in params.input] == ["developer", "user"]  # type: ignore[union-attr]


def test_the_config_defines_the_environment_and_its_agent() -> None:
    root = FOLDER.parents[1]
    config = OmegaConf.merge(
        OmegaConf.load(FOLDER / "configs" / "example_single_tool_call.yaml"),
        OmegaConf.load(root / "responses_api_models" / "scripted_model" / "configs" / "scripted_model.yaml"),
    )

    parser = GlobalConfigDictParser()
    instances = parser.filter_for_server_instance_configs(parser.parse_no_environment(config))  # type: ignore[arg-type]

    assert {instance.name for instance in instances} == {
        "example_single_tool_call",
        "example_single_tool_call_simple_agent",
        "policy_model",
    }
    agent = next(instance for instance in instances if instance.name.endswith("simple_agent"))
    (dataset,) = agent.datasets or []
    assert (root / dataset.jsonl_fpath).is_file()


def test_whatever_a_model_says_is_rewarded_and_further_fields_stay() -> None:
    rows = [{**row, "source": {"page": 7}} for row in ROWS]

    results = play(CONFIG, rows, script={"rules": [{"reply": {"text": "I will not look it up."}}]})

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_is_rewarded_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 1.0 or result["_ng_failure_class"] == "agent_error"
