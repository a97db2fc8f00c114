import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.runs.record import IndexSet, IntSet, KeySet, SeenFilter, without_garbage_collection

SMALL = st.integers(0, 50)
LARGE = st.integers(0, 2**64 - 2)


@given(st.lists(SMALL | LARGE), st.lists(SMALL | LARGE))
def test_an_int_set_behaves_like_a_set(added: list[int], asked: list[int]) -> None:
    compact, builtin = IntSet(), set[int]()
    for value in added:
        assert compact.add(value) is (value not in builtin)
        builtin.add(value)
    assert len(compact) == len(builtin)
    assert [value in compact for value in added + asked] == [value in builtin for value in added + asked]


def test_an_int_set_grows() -> None:
    compact = IntSet()
    for value in range(0, 100_000, 7):
        compact.add(value)
    assert len(compact) == len(range(0, 100_000, 7))
    assert all((value in compact) is (value % 7 == 0) for value in range(1_000))


@pytest.mark.parametrize("value", [-1, 2**64 - 1])
def test_an_int_set_refuses_what_does_not_fit(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        IntSet().add(value)


INDICES = SMALL | st.text(max_size=2) | st.none() | st.integers(2**70, 2**71) | st.integers(-5, -1)


@given(st.lists(INDICES), st.lists(INDICES))
def test_task_indices_need_not_be_small_numbers(added: list[object], asked: list[object]) -> None:
    compact, builtin = IndexSet(), set[object]()
    for index in added:
        assert compact.add(index) is (index not in builtin)
        builtin.add(index)
    assert len(compact) == len(builtin)
    assert [index in compact for index in asked] == [index in builtin for index in asked]


@given(st.lists(st.tuples(INDICES, SMALL)), st.lists(st.tuples(INDICES, SMALL)))
def test_a_key_set_behaves_like_a_set(added: list[tuple[object, int]], asked: list[tuple[object, int]]) -> None:
    compact, builtin = KeySet(), set[tuple[object, int]]()
    for key in added:
        assert compact.add(key) is (key not in builtin)
        builtin.add(key)
    assert len(compact) == len(builtin)
    assert [key in compact for key in asked] == [key in builtin for key in asked]


@given(st.lists(st.integers(0, 2**63)), st.integers(0, 100))
def test_the_filter_never_misses_a_repetition(hashes: list[int], expected: int) -> None:
    seen, before = SeenFilter(expected), set[int]()
    for hashed in hashes:
        assert seen.came_before(hashed) or hashed not in before
        before.add(hashed)


def test_the_filter_is_seldom_wrong_about_as_many_as_announced() -> None:
    seen = SeenFilter(10_000)
    assert sum(seen.came_before(hash(str(number)) & 2**63 - 1) for number in range(10_000)) < 200


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_afterwards_as_it_was_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with without_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
