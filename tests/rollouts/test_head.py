"""Which agents a run has, and what is noted about its models."""

import pytest
from omegaconf import OmegaConf

from nemo_gym.collect.run_servers import announce_head, facts_about, replicas_of, require_agents
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.http.client import ServerClient

CONFIG = {
    "policy_model_name": "a-model",
    "policy_model": {"responses_api_models": {"openai_model": {"openai_model": "${policy_model_name}"}}},
    "judge": {"responses_api_models": {"vllm_model": {"model": "a-judge"}}},
    "scripted": {"responses_api_models": {"scripted_model": {"script": None}}},
    "broken": {"responses_api_models": {"openai_model": {"openai_model": "${nowhere}"}}},
    "my_agent": {"responses_api_agents": {"simple_agent": {"host": "127.0.0.1", "port": 1}}},
    "responses_api_agents": "no block",
}


def client() -> ServerClient:
    head = BaseServerConfig(host="127.0.0.1", port=1)
    return ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(CONFIG))


def test_missing_agents_are_named_with_those_that_are_there() -> None:
    require_agents(client(), ["my_agent"])  # no objections to that one
    with pytest.raises(ConfigError) as raised:
        require_agents(client(), ["my_agnt", "other"])

    assert "at 127.0.0.1:1 has no agent called 'my_agnt', 'other'; did you mean 'my_agent'?" in str(raised.value)
    assert "Its agents: my_agent." in str(raised.value)


def test_the_models_are_those_that_the_servers_ask_for_else_the_kind_of_server() -> None:
    facts = facts_about(client(), ["ng_collect_rollouts", "+limit=1"])

    assert facts.models == ["a-judge", "a-model", "openai_model", "scripted_model"]
    assert facts.command == ["ng_collect_rollouts", "+limit=1"]
    assert facts.config == CONFIG


def test_a_head_server_that_answers_no_more_is_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    announce_head(client())

    assert caplog.text == ""
    assert replicas_of(client()) == {}
