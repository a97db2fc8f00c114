"""Which names a run's servers are called by."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.config.hosts import allowed_hosts_problems, names_in_config
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser


def test_every_host_of_the_config_counts_wherever_it_stands() -> None:
    config = OmegaConf.create(
        {
            "default_host": "Node1.",
            "head_server": {"host": "${default_host}", "port": 1},
            "server": {"resources_servers": {"x.y": {"host": "node2", "list": [{"host": "node3"}]}}},
            "gone": {"host": "${oc.env:NO_SUCH_VARIABLE_HERE}"},
            "number": {"host": 7},
            "allowed_hosts": ["a.example", "B.example."],
        }
    )

    assert names_in_config(config) == {"node1", "node2", "node3", "a.example", "b.example"}


@pytest.mark.parametrize("given", ["a.example, b_c", ["a.example", "b_c"]])
def test_allowed_hosts_are_a_list_or_a_text_with_commas(given: Any) -> None:
    assert names_in_config(OmegaConf.create({"allowed_hosts": given})) == {"a.example", "b_c"}
    assert allowed_hosts_problems({"allowed_hosts": given}) == []


def test_no_allowed_hosts_are_fine() -> None:
    assert allowed_hosts_problems({}) == allowed_hosts_problems({"allowed_hosts": None}) == []
    assert names_in_config({}) == names_in_config(OmegaConf.create({"allowed_hosts": "${nowhere}"})) == frozenset()


@pytest.mark.parametrize(
    "wrong", ["http://a.example", "a.example:80", "*", "*.example", "a b", ["ok", ""], [7], {"a": 1}, True, "a" * 300]
)
def test_what_is_no_host_name_is_pointed_out(wrong: Any) -> None:
    [problem] = allowed_hosts_problems({"allowed_hosts": wrong})

    assert "allowed_hosts holds" in str(problem)
    assert "without scheme and port" in str(problem)


def test_a_wrong_list_stops_a_command() -> None:
    with pytest.raises(ConfigError, match="allowed_hosts holds 'a:1'"):
        GlobalConfigDictParser().parse_no_environment(OmegaConf.create({"allowed_hosts": ["a:1"]}))
