"""Plain data as configurations: paths, laying over, changing."""

from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ConfigTypeError

from nemo_gym.config.trees import (
    ABSENT,
    as_block,
    delete_at,
    lay_over,
    leaves,
    merge_trees,
    path_parts,
    set_at,
    value_at,
    walk,
)


@pytest.mark.parametrize(
    ("path", "parts"),
    [("a", ("a",)), ("a.b.c", ("a", "b", "c")), ("a[0].b", ("a", "0", "b")), ("a.b[1][2]", ("a", "b", "1", "2"))],
)
def test_a_path_has_parts(path: str, parts: tuple[str, ...]) -> None:
    assert path_parts(path) == parts


def test_leaves_are_named_by_paths_that_lead_back_to_them() -> None:
    tree = {"a": {"b": 1, 2: "two"}, "c": [{"d": None}, [5]], "empty": {}}

    found = dict(leaves(tree))

    assert found == {"a.b": 1, "a.2": "two", "c[0].d": None, "c[1][0]": 5}
    assert all(value_at(tree, path) == value for path, value in found.items())


def test_a_walk_meets_every_mapping_and_list_before_what_it_holds() -> None:
    tree = {"a": {"b.c": [1, {}]}, 2: None}

    assert [(place.path, place.keys, place.value) for place in walk(tree)] == [
        ("a", ("a",), {"b.c": [1, {}]}),
        ("a.b.c", ("a", "b.c"), [1, {}]),
        ("a.b.c[0]", ("a", "b.c", 0), 1),
        ("a.b.c[1]", ("a", "b.c", 1), {}),
        ("2", (2,), None),
    ]
    assert list(walk("text")) == []


def test_a_value_that_is_not_there_is_absent() -> None:
    tree = {"a": {"b": [1]}}

    assert [value_at(tree, path) for path in ("x", "a.x", "a.b[1]", "a.b.c", "a.b[0].c")] == [ABSENT] * 5


def test_mappings_are_merged_and_everything_else_is_replaced() -> None:
    low = {"map": {"a": 1, "b": {"x": 1}}, "list": [1, 2], "scalar": 1, "kept": True}
    high = {"map": {"b": {"y": 2}}, "list": [3], "scalar": None}

    assert merge_trees([low, high]) == {
        "map": {"a": 1, "b": {"x": 1, "y": 2}},
        "list": [3],
        "scalar": None,
        "kept": True,
    }


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from(["text", "", "???"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
TREES = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_trees_merge_like_omegaconf_merges_configs(trees: list[dict[str, Any]]) -> None:
    try:
        theirs = OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.create, trees)))
    except ConfigTypeError:  # a mapping where a list was, or the other way round: here the later one replaces
        reject()

    assert merge_trees(trees) == theirs


def test_merging_changes_none_of_the_sources() -> None:
    low: dict[str, Any] = {"map": {"a": 1}, "only": {"list": [1]}}
    high: dict[str, Any] = {"map": {"b": 2}}

    merged = merge_trees([low, high])
    set_at(merged, "map.c", 3)
    set_at(merged, "only.list[0]", 2)

    assert (low, high) == ({"map": {"a": 1}, "only": {"list": [1]}}, {"map": {"b": 2}})


def test_a_value_still_to_be_supplied_replaces_nothing() -> None:
    assert merge_trees([{"a": 1}, {"a": "???", "b": "???"}]) == {"a": 1, "b": "???"}
    assert merge_trees([{"a": "???"}, {"a": 1}]) == {"a": 1}


def test_names_at_the_top_are_text() -> None:
    assert merge_trees([{7: {7: "seven"}}]) == {"7": {7: "seven"}}


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("${a.b}", {"_copy": "a.b"}),
        (" ${ a[0] } ", {"_copy": "a[0]"}),
        ("${copy:a.b}", {"_copy": "a.b"}),
        ("${inherit_from:a.b}", {"_inherit_from": "a.b"}),
        ("${.a}", None),
        ("${oc.env:A}", None),
        ("x${a}", None),
        ("${a.${b}}", None),
        ("a", None),
    ],
)
def test_a_reference_can_be_turned_into_a_block(text: str, block: dict[str, str] | None) -> None:
    assert as_block(text) == block


def test_a_mapping_over_a_reference_changes_a_copy_of_what_it_refers_to() -> None:
    assert lay_over("${base}", {"x": 1}) == {"_copy": "base", "x": 1}
    assert lay_over("${inherit_from:base}", {"x": 1}) == {"_inherit_from": "base", "x": 1}
    assert lay_over("text", {"x": 1}) == {"x": 1}


def test_setting_makes_the_mappings_on_the_way() -> None:
    tree: dict[str, Any] = {"none": None, "missing": "???"}

    set_at(tree, "a.b.c", 1)
    set_at(tree, "none.x", 2)
    set_at(tree, "missing.x", 3)

    assert tree == {"a": {"b": {"c": 1}}, "none": {"x": 2}, "missing": {"x": 3}}


def test_setting_reaches_into_lists_and_number_keys() -> None:
    tree: dict[str, Any] = {"list": [1, {"x": 1}], "map": {0: "zero"}}

    set_at(tree, "list[0]", 5)
    set_at(tree, "list.1.x", 6)
    set_at(tree, "map.0", "nil")

    assert tree == {"list": [5, {"x": 6}], "map": {0: "nil"}}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("scalar.x", "scalar is a single value"),
        ("text.x.y", "text is a single value"),
        ("list[1]", "list is a list of 1"),
        ("list.name", "list is a list of 1"),
        ("list[3].x", r"list\[3\]"),
    ],
)
def test_setting_says_why_there_can_be_nothing_at_a_path(path: str, reason: str) -> None:
    with pytest.raises(LookupError, match=reason):
        set_at({"scalar": 5, "text": "words", "list": [1]}, path, 1)


def test_deleting_removes_from_mappings_and_lists_and_ignores_what_is_not_there() -> None:
    tree: dict[str, Any] = {"a": {"b": 1, 2: 2}, "list": [1, 2, 3]}

    for path in ("a.b", "a.2", "list[1]", "nothing.here", "list[9]"):
        delete_at(tree, path)

    assert tree == {"a": {}, "list": [1, 3]}
