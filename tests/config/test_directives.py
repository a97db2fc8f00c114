"""`_inherit_from`, `_copy` and `_delete_key`."""

from copy import deepcopy
from itertools import permutations
from typing import Any

import pytest

from nemo_gym.config.references import apply_directives
from nemo_gym.errors import ConfigError, InheritPathNotFoundError


def test_inheriting_takes_the_source_and_removes_it() -> None:
    config = {"base": {"x": 1, "y": {"z": 2}}, "leaf": {"_inherit_from": "base", "y": {"w": 3}}}

    assert apply_directives(config) == {"leaf": {"x": 1, "y": {"z": 2, "w": 3}}}


def test_copying_leaves_the_source() -> None:
    config = {"base": {"x": 1}, "leaf": {"_copy": "base", "x": 2}}

    assert apply_directives(config) == {"base": {"x": 1}, "leaf": {"x": 2}}


def test_a_single_value_can_be_inherited_or_copied() -> None:
    config = {"base": {"x": 1, "y": [2]}, "moved": "${inherit_from:base.x}", "copied": "${copy: base.y }"}

    assert apply_directives(config) == {"base": {"y": [2]}, "moved": 1, "copied": [2]}


def test_a_block_that_inherits_a_plain_value_becomes_that_value() -> None:
    assert apply_directives({"base": 5, "leaf": {"_inherit_from": "base"}}) == {"leaf": 5}


def test_new_keys_may_be_added() -> None:
    assert apply_directives({"base": {"x": 1}, "leaf": {"_inherit_from": "base", "new": {"deep": 1}}}) == {
        "leaf": {"x": 1, "new": {"deep": 1}}
    }


def test_several_blocks_may_inherit_from_one_source() -> None:
    config = {"base": {"x": 1}, "a": {"_inherit_from": "base"}, "b": {"_inherit_from": "base", "x": 2}}

    assert apply_directives(config) == {"a": {"x": 1}, "b": {"x": 2}}


def test_what_blocks_inherit_is_not_shared_between_them() -> None:
    result = apply_directives({"base": {"list": [1]}, "a": {"_copy": "base"}, "b": {"_copy": "base"}})

    result["a"]["list"].append(2)

    assert result["b"] == result["base"] == {"list": [1]}


def test_chains_are_followed() -> None:
    config = {
        "base": {"x": 1, "o": {"p": 1, "q": 2}},
        "mid": {"_inherit_from": "base", "y": 2},
        "leaf": {"_inherit_from": "mid", "z": 3},
        "part": {"_copy": "mid.o"},
    }

    assert apply_directives(config) == {
        "leaf": {"x": 1, "o": {"p": 1, "q": 2}, "y": 2, "z": 3},
        "part": {"p": 1, "q": 2},
    }


def test_chains_may_run_through_values() -> None:
    config = {"a": {"x": {"y": 1}}, "b": "${copy:a.x}", "c": {"_copy": "b", "z": 2}, "d": "${copy:b.y}"}

    assert apply_directives(config) == {"a": {"x": {"y": 1}}, "b": {"y": 1}, "c": {"y": 1, "z": 2}, "d": 1}


def test_the_order_of_keys_does_not_matter() -> None:
    blocks: dict[str, Any] = {
        "base": {"x": 1, "part": {"y": 2}},
        "mover": {"_inherit_from": "base"},
        "copier": {"_copy": "base.part"},
        "leaf": {"_inherit_from": "mover", "z": 3},
    }

    results = [apply_directives({name: deepcopy(blocks[name]) for name in order}) for order in permutations(blocks)]

    assert all(result == results[0] for result in results)
    assert results[0] == {"leaf": {"x": 1, "part": {"y": 2}, "z": 3}, "copier": {"y": 2}}


def test_directives_work_in_lists_and_on_entries_of_lists() -> None:
    config = {
        "base": {"x": 1},
        "list": [{"_copy": "base", "y": 2}, "${copy:base.x}", [{"_copy": "list[0]"}]],
        "entry": {"_inherit_from": "list[1]"},
    }

    assert apply_directives(config) == {"base": {"x": 1}, "list": [{"x": 1, "y": 2}, [{"x": 1, "y": 2}]], "entry": 1}


def test_moving_several_entries_of_a_list_moves_the_right_ones() -> None:
    config = {"list": ["a", "b", "c"], "x": "${inherit_from:list[0]}", "y": "${inherit_from:list[1]}"}

    assert apply_directives(config) == {"list": ["c"], "x": "a", "y": "b"}


def test_a_block_may_use_its_own_parts_as_written_together_with_what_it_inherits() -> None:
    config = {
        "base": {"a": {"w": 2}, "z": 1},
        "agent": {"_inherit_from": "base", "a": {"v": 1}, "b": {"_copy": "agent.a"}},
        "wrapped": {"_inherit_from": "wrapped.inner", "inner": {"x": 1}},
    }

    assert apply_directives(config) == {
        "agent": {"a": {"w": 2, "v": 1}, "z": 1, "b": {"w": 2, "v": 1}},
        "wrapped": {"x": 1},
    }


def test_number_keys_can_be_part_of_a_path() -> None:
    assert apply_directives({"base": {0: {"x": 1}}, "leaf": {"_copy": "base.0"}})["leaf"] == {"x": 1}


def test_keys_over_an_inherited_reference_change_a_copy_of_what_it_refers_to() -> None:
    config = {"shared": {"x": 1}, "base": {"o": "${shared}"}, "leaf": {"_inherit_from": "base", "o": {"y": 2}}}

    assert apply_directives(config) == {"shared": {"x": 1}, "leaf": {"o": {"x": 1, "y": 2}}}


def test_interpolations_stay_as_they_are() -> None:
    config = {"base": {"x": "${other}", "y": "${.x}"}, "leaf": {"_inherit_from": "base", "z": "${oc.env:HOME}"}}

    assert apply_directives(config) == {"leaf": {"x": "${other}", "y": "${.x}", "z": "${oc.env:HOME}"}}


def test_keys_are_deleted_from_the_block_first_and_else_from_what_it_inherits() -> None:
    config = {
        "base": {"x": 1, "y": 2, "z": 3},
        "own": {"_copy": "base", "_delete_key": "x", "x": 5},
        "inherited": {"_copy": "base", "_delete_key": " x , y"},
        "listed": {"_copy": "base", "_delete_key": ["y", "z"]},
        "plain": {"_delete_key": "a, nothing", "a": 1, "b": 2},
    }

    result = apply_directives(config)

    assert result["own"] == {"x": 1, "y": 2, "z": 3}
    assert result["inherited"] == {"z": 3}
    assert result["listed"] == {"x": 1}
    assert result["plain"] == {"b": 2}


def test_keys_are_deleted_deep_inside_what_is_inherited() -> None:
    config = {"base": {"o": {"p": 1, "q": 2}}, "leaf": {"_inherit_from": "base", "o": {"_delete_key": "p", "r": 3}}}

    assert apply_directives(config) == {"leaf": {"o": {"q": 2, "r": 3}}}


def test_what_a_block_deletes_cannot_be_taken_from_it() -> None:
    config = {
        "base": {"x": {"y": 1}},
        "mid": {"_copy": "base", "_delete_key": "x"},
        "own": {"_delete_key": "x", "x": 1},
    }

    assert apply_directives({**config, "leaf": {"_copy": "mid"}})["leaf"] == {}
    for path in ("mid.x", "mid.x.y", "own.x"):
        with pytest.raises(InheritPathNotFoundError, match="does not exist"):
            apply_directives({**config, "leaf": {"_copy": path}})


def test_what_a_block_replaces_and_deletes_is_taken_from_its_source() -> None:
    config = {"base": {"x": 1}, "mid": {"_copy": "base", "_delete_key": "x", "x": 2}, "leaf": "${copy:mid.x}"}

    assert apply_directives(config)["leaf"] == 1


def test_deleting_from_an_inheriting_block_what_nobody_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"_delete_key in leaf names 'w'.*'base'.*they have x"):
        apply_directives({"base": {"x": 1}, "leaf": {"_inherit_from": "base", "_delete_key": "w"}})


@pytest.mark.parametrize(
    ("config", "chain"),
    [
        ({"a": {"_copy": "a"}}, "a -> a"),
        ({"a": {"_copy": "b"}, "b": {"_inherit_from": "a"}}, "b -> a -> b"),
        ({"a": "${copy:b}", "b": {"x": "${copy:c.y}"}, "c": {"y": {"_copy": "a"}}}, "b -> c.y -> a -> b"),
        ({"a": {"b": {"_copy": "a"}}}, "a -> a"),
    ],
)
def test_a_circle_is_reported_with_its_path(config: dict[str, Any], chain: str) -> None:
    with pytest.raises(InheritPathNotFoundError, match=f"circle: {chain};"):
        apply_directives(config)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("bsae", "did you mean 'base'"),
        ("base.y", "nothing is called 'y'; there is x"),
        ("base.x.deeper", "ends before 'deeper'"),
    ],
)
def test_a_path_that_leads_nowhere_is_a_value_error_that_says_where_it_ends(path: str, hint: str) -> None:
    with pytest.raises(ValueError, match="Path specified does not exist in config") as failure:
        apply_directives({"base": {"x": 1}, "outer": {"leaf": {"_inherit_from": path}}})

    assert isinstance(failure.value, InheritPathNotFoundError)
    assert repr(path) in str(failure.value)
    assert "outer.leaf" in str(failure.value)
    assert hint in str(failure.value)


@pytest.mark.parametrize("directive", [{"_copy": 5}, {"_inherit_from": None}, {"_copy": ""}, "${copy:}"])
def test_a_directive_without_a_path_is_an_error_that_names_the_place(directive: object) -> None:
    with pytest.raises(InheritPathNotFoundError, match=r"leaf.*path"):
        apply_directives({"leaf": directive})


def test_a_source_still_to_be_supplied_makes_the_taker_so_too() -> None:
    config = {"base": "???", "whole": {"_copy": "base", "x": 1}, "part": "${copy:base.deep.er}"}

    assert apply_directives(config) == {"base": "???", "whole": "???", "part": "???"}


def test_the_given_config_is_left_alone() -> None:
    config = {"base": {"x": [1]}, "leaf": {"_inherit_from": "base", "_delete_key": "x"}}
    before = deepcopy(config)

    apply_directives(config)

    assert config == before
