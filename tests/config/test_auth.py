"""The token of a run: which values are one, and who could come without it."""

import pytest
from omegaconf import OmegaConf

from nemo_gym.config.secrets import auth_token, auth_token_problems, beyond_loopback, make_auth_token
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser


@pytest.mark.parametrize("value", [None, "", "auto", "****", "${nowhere}", ["a"], True])
def test_what_is_no_token_admits_nobody_and_is_never_sent(value: object) -> None:
    assert auth_token(OmegaConf.create({"auth_token": value})) is None


def test_a_token_may_be_a_number_or_a_reference() -> None:
    assert auth_token(OmegaConf.create({"auth_token": 12345})) == "12345"
    assert auth_token(OmegaConf.create({"auth_token": "${mine}", "mine": "t0ken"})) == "t0ken"


@pytest.mark.parametrize("value", ["two words", "line\nbreak", "tökén", "****", True, ["a"], {"a": 1}])
def test_a_token_that_cannot_travel_in_a_header_is_refused_without_showing_it(value: object) -> None:
    [problem] = auth_token_problems({"auth_token": value})

    assert "auth_token cannot be used" in str(problem)
    assert "two words" not in str(problem)


def test_a_config_with_an_unusable_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="auth_token cannot be used"):
        GlobalConfigDictParser().parse_no_environment(OmegaConf.create({"auth_token": "a b"}))


def test_auto_becomes_a_new_token_each_time_and_any_other_stays() -> None:
    first, second = OmegaConf.create({"auth_token": "auto"}), OmegaConf.create({"auth_token": "auto"})

    made = make_auth_token(first)

    assert made is not None
    assert len(made) >= 32
    assert not auth_token_problems({"auth_token": made})
    assert auth_token(first) == made != make_auth_token(second)
    assert make_auth_token(first) is None


def test_hosts_that_other_machines_may_reach() -> None:
    inside = ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST"]

    assert beyond_loopback([*inside, "0.0.0.0", "10.1.2.3", "::", "example.test", "0.0.0.0"]) == [
        "0.0.0.0",
        "10.1.2.3",
        "::",
        "example.test",
    ]
