"""Every agent can collect without a verdict: marked as such, with the reward it was told, and without metrics."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import play
from responses_api_agents.function_agent.app import FunctionAgent
from responses_api_agents.non_executing_simple_agent.app import NonExecutingSimpleAgent
from responses_api_agents.remote_agent.app import RemoteAgent
from responses_api_agents.simple_agent.app import SimpleAgent

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "resources_servers" / "string_match" / "configs" / "string_match.yaml"
ROW = {"responses_create_params": {"input": "6 * 7?"}, "expected_answer": "42", "own_field": [7], "reward": 9}

AGENTS: dict[str, tuple[type[SimpleResponsesAPIAgent], dict[str, Any]]] = {
    "function_agent": (FunctionAgent, {}),
    "non_executing_simple_agent": (NonExecutingSimpleAgent, {}),
    "remote_agent": (RemoteAgent, {"url": "http://127.0.0.1:1"}),
    "simple_agent": (SimpleAgent, {}),
}
LOCAL = sorted(set(AGENTS) - {"remote_agent"})
"""Those that need no server elsewhere; the tests of `remote_agent` have one, and show the same."""


def test_no_agent_is_left_out() -> None:
    folders = {path.parent.name for path in (ROOT / "responses_api_agents").glob("*/app.py")}

    assert folders == set(AGENTS)


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize(("settings", "reward"), [({}, 0.0), ({"skip_verification_reward": 0.25}, 0.25)])
def test_a_rollout_is_not_verified_and_says_so(name: str, settings: dict[str, Any], reward: float) -> None:
    result = rollout(name, {"skip_verification": True, **settings})

    assert (result["reward"], result["verification_skipped"], result["own_field"]) == (reward, True, [7])
    assert result["response"]["output"][-1]["content"][0]["text"] == "42"


@pytest.mark.parametrize("name", LOCAL)
def test_otherwise_it_is_verified(name: str) -> None:
    result = rollout(name, {})

    assert result["reward"] == 1.0
    assert "verification_skipped" not in result


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_there_are_no_metrics_of_what_was_not_verified(name: str) -> None:
    agent_class, settings = AGENTS[name]
    config_class: Any = agent_class.model_fields["config"].annotation
    config = config_class.model_validate(
        {
            "name": name, "host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "skip_verification": True,
            "resources_server": {"type": "resources_servers", "name": "string_match"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
            "function": "responses_api_agents.function_agent.examples.ask_twice:run",
            **settings,
        }
    )  # fmt: skip
    agent = agent_class(config=config, server_client=MagicMock(spec=ServerClient))

    with pytest.warns(RuntimeWarning, match="not verified"):
        answer = TestClient(agent.complete_app()).post("/aggregate_metrics", json={"verify_responses": [{"reward": 1}]})

    assert answer.json() == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}


def rollout(name: str, agent_settings: dict[str, Any]) -> dict[str, Any]:
    block = {"resources_server": {"name": "string_match"}, **agent_settings}
    config = ROOT / "responses_api_agents" / name / "configs" / f"{name}.yaml"
    settings = {name: {"responses_api_agents": {name: block}}}
    script = {"rules": [{"reply": {"text": "42"}}]}
    (result,) = play([ENVIRONMENT, config], [ROW], script=script, settings=settings, agent=name)
    return result
