"""Which blocks are servers, what is said of those that almost are, and whom they refer to."""

from typing import Any, Literal

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

from nemo_gym.config.instances import (
    almost_server_problems,
    copy_aliases,
    dangling_refs,
    find_instances,
    merge_dummy_model,
    readable_errors,
)
from nemo_gym.config.references import apply_directives
from nemo_gym.errors import AlmostServerError, ServerRefNotFoundError


def model(name: str = "m", **settings: Any) -> dict[str, Any]:
    return {"responses_api_models": {name: {"entrypoint": "app.py", **settings}}}


def resources(name: str = "r", **settings: Any) -> dict[str, Any]:
    return {"resources_servers": {name: {"entrypoint": "app.py", "domain": "math", **settings}}}


def agent(name: str = "a", **settings: Any) -> dict[str, Any]:
    return {"responses_api_agents": {name: {"entrypoint": "app.py", **settings}}}


def ref(server_type: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": server_type, "name": name, **more}


def dangling(tree: dict[str, Any]) -> list[str]:
    problems = dangling_refs(find_instances(OmegaConf.create(tree))[0], tree)
    assert all(isinstance(problem, ServerRefNotFoundError) for problem in problems)
    return [str(problem) for problem in problems]


def report(tree: dict[str, Any]) -> str:
    (problem,) = almost_server_problems(find_instances(OmegaConf.create(tree))[1], tree)
    assert isinstance(problem, AlmostServerError)
    return str(problem)


def test_instances_are_found_in_config_order_among_free_form_data() -> None:
    tree = {
        "b": agent(),
        "numbers": [1, 2],
        "free": {"a": {"b": {"entrypoint": "app.py"}}},
        "a": resources(),
        "policy_model": {"note": "extra keys are fine", **model()},
        "head_server": model(),
        "text": "words",
    }

    instances, almost = find_instances(OmegaConf.create(tree))

    assert [(each.name, each.SERVER_TYPE, each.implementation) for each in instances] == [
        ("b", "responses_api_agents", "a"),
        ("a", "resources_servers", "r"),
        ("policy_model", "responses_api_models", "m"),
    ]
    assert almost == {}


def test_the_block_of_an_instance_is_the_live_one() -> None:
    config = OmegaConf.create({"x": model(port="${some.port}"), "some": {"port": 5}})

    (instance,) = find_instances(config)[0]
    instance.get_inner_run_server_config_dict()["host"] = "h"

    assert instance.get_inner_run_server_config().port == 5
    assert config.x.responses_api_models.m.host == "h"


def test_a_variable_that_only_another_server_needs_does_not_hide_this_one() -> None:
    config = OmegaConf.create({"mine": model(), "theirs": model(key="${oc.env:SURELY_NOT_SET}")})

    assert [each.name for each in find_instances(config)[0]] == ["mine", "theirs"]


def test_a_block_that_names_a_server_type_without_entrypoint_is_named_in_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = {"x": {"resources_servers": {"r": {"domain": "math"}}}, "y": {"responses_api_models": None}}

    assert find_instances(OmegaConf.create(tree), warn=True) == ([], {})
    assert ["'x' names a server type but has no `entrypoint`" in record.getMessage() for record in caplog.records] == [
        True,
        False,
    ]


def test_a_second_server_type_in_one_block_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    (instance,) = find_instances(OmegaConf.create({"x": {**resources(), **model()}}), warn=True)[0]

    assert instance.SERVER_TYPE == "resources_servers"
    assert "what it says under responses_api_models is not started" in caplog.text


def test_the_report_on_almost_servers_names_each_with_every_reason() -> None:
    tree = {
        "env": resources(domain="maths"),
        "fine": model(),
        "agent": agent(port="abc", datasets=[{"name": "t", "type": "train", "jsonl_fpath": "x"}]),
        "nothing": {"resources_servers": {"r": {"entrypoint": "app.py"}}},
        "two": {"responses_api_models": {"m": {"entrypoint": "app.py"}, "n": {}}},
    }

    text = report(tree)

    assert "Configuration Warnings: Almost-Servers Detected\n4 almost-server(s) with validation errors" in text
    assert "will NOT be started" in text
    assert "Almost-Server Detected: 'env': it will NOT be started\n  - resources_servers -> r -> domain: " in text
    assert "Must be one of: 'math', " in text
    assert "(it is 'maths')" in text
    assert "  - responses_api_agents -> a -> port: Input should be a valid integer" in text
    assert "A license is required for train data sets: add `license` to 't'" in text
    assert "A domain is required for resources servers: add `domain` to 'r'" in text
    assert "  - responses_api_models -> n -> entrypoint: Field required" in text
    assert "fine" not in text
    assert text.endswith("+error_on_almost_servers=false")


@pytest.mark.parametrize("no", [False, "no", "false"])
def test_almost_servers_can_be_gone_without(caplog: pytest.LogCaptureFixture, no: object) -> None:
    tree = {"env": resources(domain="maths"), "error_on_almost_servers": no}

    assert almost_server_problems(find_instances(OmegaConf.create(tree))[1], tree) == []
    assert "Configuration Warnings: Almost-Servers Detected" in caplog.text
    assert "Almost-Server Detected: 'env'" in caplog.text


def test_exactly_one_implementation_is_expected() -> None:
    block = {"responses_api_models": {name: {"entrypoint": "app.py"} for name in ("m", "n")}}

    _, almost = find_instances(OmegaConf.create({"x": block}))

    assert readable_errors(almost["x"]) == [
        "the block: exactly one implementation is expected under 'responses_api_models', found ['m', 'n']"
    ]


class Choice(BaseModel):
    either: Literal["a", "b"] | Literal["c"]


def test_the_choices_for_one_place_stand_on_one_line() -> None:
    with pytest.raises(ValidationError) as failure:
        Choice.model_validate({"either": "d"})

    assert len(readable_errors(failure.value)) == 1
    assert all(f"'{choice}'" in readable_errors(failure.value)[0] for choice in "abcd")


class Settings(BaseModel):
    api_key: int
    url: int
    size: int


def test_errors_show_the_value_but_no_secret() -> None:
    with pytest.raises(ValidationError) as failure:
        Settings.model_validate({"api_key": "hunter2", "url": "http://u:hunter2@h", "size": "big"})

    lines = readable_errors(failure.value)

    assert "hunter2" not in str(lines)
    assert lines[0].endswith("(it is ****)")
    assert lines[1].endswith("(it is 'http://u:****@h')")
    assert lines[2].endswith("(it is 'big')")


def test_references_are_checked_and_those_in_mappings_of_the_author_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = {
        "policy_model": model(),
        "agent": agent(
            direct=ref("responses_api_models", "gone"),
            several=[ref("responses_api_models", "policy_model"), ref("responses_api_models", "gone")],
            nested={"deep": [{"er": ref("resources_servers", "gone")}]},
            judge=ref("responses_api_models", "policy_model", weight=[ref("responses_api_agents", "gone")]),
            fine=ref("responses_api_models", "policy_model"),
            no_ref={"type": "something", "name": "else"},
        ),
    }

    places = [message.split("refers to in `")[1].split("`")[0] for message in dangling(tree)]

    assert places == ["direct", "several[1]"]
    assert all(f"`{place}`" in caplog.text for place in ("nested.deep[0].er", "judge.weight[0]"))


def test_a_dangling_reference_names_the_instance_the_target_and_what_was_probably_meant() -> None:
    tree = {"math_env": resources(), "agent": agent(server=ref("resources_servers", "mth_env"))}

    (message,) = dangling(tree)

    assert message == (
        "Could not find 'mth_env' (resources_servers), which 'agent' refers to in `server`, "
        "in the list of available servers. Did you mean 'math_env'?"
    )


def test_a_reference_with_the_wrong_type_says_so() -> None:
    tree = {"env": resources(), "agent": agent(server=ref("responses_api_models", "env"))}

    assert "'env' is one of the resources_servers: correct `type`" in dangling(tree)[0]


def test_a_missing_policy_model_is_answered_with_ways_to_add_one() -> None:
    (message,) = dangling({"agent": agent(server=ref("responses_api_models", "policy_model"))})

    assert "Add a model: +model=openai:<name>, +model=vllm:<url>#<name>, or +model=scripted" in message
    assert "or its config file to config_paths (ng_list_models lists them)" in message


def test_without_a_similar_name_the_available_ones_are_listed_up_to_a_point() -> None:
    tree = {f"server{i:02}": resources() for i in range(12)}

    (message,) = dangling({**tree, "agent": agent(server=ref("resources_servers", "xyz"))})

    assert message.endswith("server08, server09 and 2 more")


def test_a_dangling_reference_can_be_caught_as_what_it_was_upstream() -> None:
    (problem,) = dangling_refs(
        find_instances(OmegaConf.create({"a": agent(x=ref("resources_servers", "y"))}))[0],
        {"a": agent(x=ref("resources_servers", "y"))},
    )

    assert isinstance(problem, AssertionError)
    assert isinstance(problem, ValueError)


def test_a_real_model_takes_the_place_of_the_dummy() -> None:
    dummy = {"entrypoint": "app.py"}
    tree: dict[str, Any] = {
        "policy_model": {"responses_api_models": {"dummy_model": dict(dummy), "vllm": {"url": "u"}}},
        "only_dummy": {"responses_api_models": {"dummy_model": dict(dummy)}},
        "other_type": {"responses_api_models": {"dummy_model": dict(dummy)}, **agent()},
        "unresolved": {"responses_api_models": {"dummy_model": dict(dummy), "vllm": "${x}"}},
        "free": 5,
    }

    merge_dummy_model(tree)

    assert tree == {
        "policy_model": {"responses_api_models": {"vllm": {"entrypoint": "app.py", "url": "u"}}},
        "only_dummy": {"responses_api_models": {"dummy_model": dummy}},
        "other_type": agent(),
        "unresolved": {"responses_api_models": {"vllm": "${x}"}},
        "free": 5,
    }


def test_a_server_that_is_a_reference_to_another_becomes_a_server_of_its_own() -> None:
    tree: dict[str, Any] = {
        "env": resources(),
        "whole": "${env}",
        "type": {"resources_servers": "${env.resources_servers}"},
        "inner": {"resources_servers": {"r": "${env.resources_servers.r}"}},
        "far": "${farther}",
        "farther": "${whole}",
        "circle": "${elcric}",
        "elcric": "${circle}",
        "data": {"x": 1},
        "free": "${data}",
        "text": "${word}",
        "word": "w",
    }

    copy_aliases(tree)
    result = apply_directives(tree)

    assert result["whole"] == result["type"] == result["inner"] == resources()
    assert result["far"] == result["farther"] == resources()
    assert result["circle"] == "${elcric}"
    assert result["free"] == "${data}"
    assert result["text"] == "${word}"
