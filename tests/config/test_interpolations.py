"""`${...}`: what it names, what it stands for, and what is said when it stands for nothing."""

from typing import Any

import pytest

from nemo_gym.config.references import Resolved, names_used_by_interpolations, resolve, to_config
from nemo_gym.errors import ConfigError, ConfigInterpolationError


def resolved(tree: dict[str, Any]) -> Resolved:
    return resolve(to_config(tree), tree)


def test_references_are_resolved_wherever_they_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT_OF_THE_TEST", "8000")
    tree = {
        "a": {"list": [1, 2], "sibling": "${.list[1]}", "above": "${..top}", "entry": "${a.list[0]}"},
        "top": "t",
        "inside": "x-${a.entry}-${top}",
        "block": "${a}",
        "env": "${oc.env:PORT_OF_THE_TEST}",
        "default": "${oc.env:SURELY_NOT_SET,none}",
        "chosen": "${a.${key}}",
        "key": "entry",
        "escaped": r"\${not.a.reference}",
        "in_list": ["${top}", {"deep": "${inside}"}],
    }

    found = resolved(tree)

    block = {"list": [1, 2], "sibling": 2, "above": "t", "entry": 1}
    assert found.problems == []
    assert found.unsettled == set()
    assert found.tree == {
        "a": block,
        "top": "t",
        "inside": "x-1-t",
        "block": block,
        "env": "8000",
        "default": "none",
        "chosen": 1,
        "key": "entry",
        "escaped": "${not.a.reference}",
        "in_list": ["t", {"deep": "x-1-t"}],
    }


def test_an_unset_environment_variable_is_named_with_place_and_remedy() -> None:
    found = resolved({"model": {"key": "${oc.env:SURELY_NOT_SET}"}, "other": "fine"})

    (problem,) = found.problems
    assert isinstance(problem, ConfigInterpolationError)
    assert "'SURELY_NOT_SET' is not set" in str(problem)
    assert "model.key ('${oc.env:SURELY_NOT_SET}')" in str(problem)
    assert "${oc.env:SURELY_NOT_SET,<default>}" in str(problem)
    assert found.unsettled == {"model"}


def test_an_unset_key_is_named_once_however_many_values_need_it() -> None:
    tree = {f"agent_{i}": {"model": "${policy_model_nam}"} for i in range(5)}

    (problem,) = resolved({**tree, "policy_model_name": "m"}).problems

    message = str(problem)
    assert message.startswith("'policy_model_nam' is not set, but agent_0.model ('${policy_model_nam}')")
    assert "and 2 more need it" in message
    assert "++policy_model_nam=<value>" in message
    assert message.endswith("did you mean 'policy_model_name'?")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("${a.missing}", "a.missing"),
        ("${.missing}", "missing"),
        ("${a.${missing}}", "missing"),
        ("x${missing}y", "missing"),
    ],
)
def test_the_missing_key_is_named_in_every_form(text: str, named: str) -> None:
    (problem,) = resolved({"a": {"b": 1, "ref": text}}).problems

    assert str(problem).startswith(f"{named!r} is not set, but a.ref ({text!r}) needs it")


def test_other_failures_are_told_with_place_value_and_reason() -> None:
    problems = resolved({"a": "${b}", "b": "${a}", "c": "${nosuch:1}", "d": {"e": "${d}"}}).problems

    assert [str(problem) for problem in problems] == [
        "a is '${b}', which cannot be resolved: Recursive interpolation detected",
        "b is '${a}', which cannot be resolved: Recursive interpolation detected",
        "c is '${nosuch:1}', which cannot be resolved: Unsupported interpolation type nosuch",
        "d.e is '${d}', which cannot be resolved: Interpolation to parent node detected",
    ]


def test_a_reference_to_a_value_still_to_be_supplied_is_no_problem_of_its_own() -> None:
    found = resolved({"a": {"x": "${b}"}, "b": "???", "c": 1})

    assert found.problems == []
    assert found.unsettled == {"a", "b"}


def test_a_reference_that_cannot_be_read_is_named_by_its_place() -> None:
    with pytest.raises(ConfigInterpolationError, match=r"a\.b holds a \$\{\.\.\.\} that cannot be read"):
        to_config({"a": {"b": "${b"}})


def test_a_value_no_config_can_hold_is_named_by_its_place() -> None:
    with pytest.raises(ConfigError, match=r"a\[1\]\.b in the configuration is neither text"):
        to_config({"a": [1, {"b": {1, 2}}]})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("${name}", {"name"}),
        ("${ name.deeper[0] }", {"name"}),
        ("a ${one} b ${two.x} c", {"one", "two"}),
        ("${a.${b}.c}", {"a", "b"}),
        ("${.sibling}", {"sibling"}),
        ("${..above.x}", {"above"}),
        ("${oc.select:name.x,default}", {"name"}),
        ("${oc.select:name,${other}}", {"name", "other"}),
        ("${oc.env:HOME,${fallback}}", {"fallback"}),
        ("${oc.decode:${text}}", {"text"}),
        ("${oc.dict.keys:some.block}", {"some"}),
        ("${oc.env:HOME}", set()),
        ("$name {name}", set()),
    ],
)
def test_the_names_an_interpolation_uses_are_found(text: str, names: set[str]) -> None:
    assert names_used_by_interpolations({"x": [{"y": text}]}) == names


@pytest.mark.parametrize("name", ["", "${b", "a.b", "[0]", "."])
def test_a_name_that_is_no_path_is_reported_like_any_other(name: str) -> None:
    found = resolved({name: "${nowhere}", "fine": 1})

    assert found.unsettled == {name}
    assert found.tree == {name: "${nowhere}", "fine": 1}
    assert "'nowhere' is not set" in str(found.problems[0])
