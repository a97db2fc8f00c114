"""Values that are missing and options nobody knows."""

from typing import Any

import pytest

from nemo_gym.config.checks import missing_values, unknown_options
from nemo_gym.config.overrides import parse_overrides
from nemo_gym.errors import ConfigMissingValuesError, UnknownOptionError


def complaints(*arguments: str, tree: dict[str, Any] | None = None, known: set[str] | None = None) -> list[str]:
    problems = unknown_options(parse_overrides(arguments), tree or {}, known or set())
    assert all(isinstance(problem, UnknownOptionError) for problem in problems)
    return [str(problem) for problem in problems]


def test_every_missing_value_is_listed_with_up_to_three_examples() -> None:
    tree = {"a": {"b": "???"}, "c": [1, {"d": "???"}], "e": "fine", "f": "???", "g": "???"}

    (problem,) = missing_values(tree)

    message = str(problem)
    assert isinstance(problem, ConfigMissingValuesError)
    assert message.startswith("4 required config value(s) are unset:\n  a.b\n  c[1].d\n  f\n  g\n")
    assert message.endswith("++a.b=<value> ++c[1].d=<value> ++f=<value>")


def test_nothing_missing_is_no_problem() -> None:
    assert missing_values({"a": {"b": None, "c": ""}}) == []


def test_a_misspelled_option_is_answered_with_the_nearest_known_one() -> None:
    (complaint,) = complaints("+num_repeat=4", known={"num_repeats", "limit"})

    assert complaint.startswith("unknown option 'num_repeat'; did you mean 'num_repeats'?")
    assert "+allow_unknown_keys=true" in complaint


def test_an_option_like_nothing_known_is_still_named() -> None:
    (complaint,) = complaints("+xyzzy.deep=4")

    assert complaint.startswith("unknown option 'xyzzy' (")


def test_options_reserved_keys_and_well_known_keys_are_known() -> None:
    assert complaints("+limit=1", "+dry_run=true", "+policy_api_key=k", "+wandb_project=p", known={"limit"}) == []


def test_names_that_interpolations_use_are_known() -> None:
    assert complaints("+mine=1", "+yours=2", tree={"a": {"b": "x ${mine}", "c": "${oc.select:yours}"}}) == []


def test_a_server_may_be_defined_on_the_command_line() -> None:
    tree = {"my_model": {"responses_api_models": {"m": {"entrypoint": "app.py"}}}}

    assert complaints("+my_model.responses_api_models.m.entrypoint=app.py", tree=tree) == []


def test_deleting_needs_no_option() -> None:
    assert complaints("~whatever") == []


def test_each_unknown_option_is_named_once() -> None:
    assert len(complaints("+foo=1", "+foo.bar=2", "+baz=3")) == 2


@pytest.mark.parametrize(
    "argument", ["+responses_create_params.temprature=1", "+responses_create_params={temprature: 1, top_p: 1}"]
)
def test_nested_options_are_checked_where_a_type_allows_no_others(argument: str) -> None:
    (complaint,) = complaints(argument, known={"responses_create_params"})

    assert complaint.startswith("unknown option 'responses_create_params.temprature'; did you mean 'temperature'?")


def test_the_parameters_of_the_responses_api_are_known() -> None:
    arguments = ["+responses_create_params.temperature=0.0", "+responses_create_params.metadata.anything=x"]

    assert complaints(*arguments, known={"responses_create_params"}) == []


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("+temperature=0.3", "+responses_create_params.temperature=0.3"),
        ("++temperatur=0.3", "+responses_create_params.temperature=0.3"),
        ("+reasoning={effort: low}", "'+responses_create_params.reasoning={effort: low}'"),
    ],
)
def test_a_parameter_of_the_model_is_answered_with_where_it_belongs(argument: str, remedy: str) -> None:
    (complaint,) = complaints(argument, known={"limit"})

    assert complaint.endswith(f"what every request asks of the model is set by {remedy}")


def test_the_model_and_the_input_are_no_parameters_to_be_set_for_every_row() -> None:
    (complaint,) = complaints("+model=gpt")

    assert "did you mean 'policy_model_name'?" in complaint


AGENT: dict[str, Any] = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py"}}}


def test_a_setting_of_a_server_that_there_is_not_is_refused_with_the_server_that_was_meant() -> None:
    settings = {"responses_api_agents": {"simple_agent": {"max_steps": 3}}}
    argument = "+my_agnet.responses_api_agents.simple_agent.max_steps=3"

    (complaint,) = complaints(argument, tree={"my_agent": AGENT, "my_agnet": settings}, known={"my_agent"})

    assert complaint.startswith("no server is called 'my_agnet'; did you mean 'my_agent'?")
    assert complaint.endswith("the servers are my_agent")


def test_a_server_may_be_copied_on_the_command_line_and_settings_without_servers_are_left_alone() -> None:
    copied = {"responses_api_agents": {"_inherit_from": "my_agent.responses_api_agents"}}
    argument = "+other.responses_api_agents._inherit_from=my_agent.responses_api_agents"

    assert complaints(argument, tree={"my_agent": AGENT, "other": copied}, known={"my_agent"}) == []
    assert complaints(argument, tree={"other": copied}) == []
    assert complaints("+x.responses_api_agents.a.b=1", tree={"x": {"responses_api_agents": {"a": {"b": 1}}}}) == []
