"""Caps that hold for all shards together."""

from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.executors.caps import TOTAL, CapShares, caps_of, in_flight_by_cap, with_caps
from nemo_gym.runs.options import Concurrency


def settled(shares: CapShares, *members: str) -> list[int]:
    """The share of each once all have heard of their new ones; nobody has anything in flight."""
    granted = {member: {TOTAL: 0} for member in members}
    for _ in range(3):
        for member in members:
            granted[member] = shares.exchange(member, granted[member], {})
    return [granted[member][TOTAL] for member in members]


def test_a_cap_is_divided_evenly_among_those_that_run() -> None:
    shares = CapShares({TOTAL: 10})

    assert settled(shares, "a") == [10]
    assert settled(shares, "a", "b", "c") == [4, 3, 3]
    shares.leave("a")
    assert settled(shares, "b", "c") == [5, 5]


def test_who_joins_waits_until_others_have_let_go() -> None:
    shares = CapShares({TOTAL: 10})
    assert shares.exchange("a", {}, {}) == {TOTAL: 10}
    assert shares.exchange("b", {}, {}) == {TOTAL: 0}
    assert shares.exchange("a", {TOTAL: 10}, {TOTAL: 10}) == {TOTAL: 5}
    assert shares.exchange("b", {TOTAL: 0}, {}) == {TOTAL: 0}  # a has not heard of it yet
    shares.exchange("a", {TOTAL: 5}, {TOTAL: 8})
    assert shares.exchange("b", {TOTAL: 0}, {}) == {TOTAL: 2}  # a has 8 in flight, of which it may start no new ones


def test_who_has_nothing_more_to_start_leaves_the_rest_of_its_share_to_others() -> None:
    shares = CapShares({TOTAL: 10})
    assert settled(shares, "a", "b") == [5, 5]
    assert shares.exchange("a", {TOTAL: 5}, {TOTAL: 2}, is_draining=True) == {TOTAL: 2}
    assert shares.exchange("b", {TOTAL: 5}, {TOTAL: 5}) == {TOTAL: 5}  # a has not heard of it yet
    shares.exchange("a", {TOTAL: 2}, {TOTAL: 1}, is_draining=True)
    assert shares.exchange("b", {TOTAL: 5}, {TOTAL: 5}) == {TOTAL: 8}
    assert shares.exchange("a", {TOTAL: 1}, {TOTAL: 1}) == {TOTAL: 2}  # a retry: it wants its share back
    assert shares.exchange("b", {TOTAL: 8}, {TOTAL: 8}) == {TOTAL: 5}


STEPS = st.tuples(st.integers(0, 4), st.integers(0, 20), st.booleans())


@given(cap=st.integers(1, 20), steps=st.lists(STEPS, max_size=60))
def test_the_cap_holds_whoever_speaks_when_and_starts_as_much_as_it_may(
    cap: int, steps: list[tuple[int, int, bool]]
) -> None:
    shares = CapShares({TOTAL: cap})
    in_force = dict.fromkeys(range(5), 0)
    in_flight = dict.fromkeys(range(5), 0)
    for member, finished, is_draining in steps:
        in_flight[member] = max(in_flight[member] - finished, 0)
        if not is_draining:
            in_flight[member] = max(in_flight[member], in_force[member])  # starts what it may
        assert sum(in_flight.values()) <= cap
        said = ({TOTAL: in_force[member]}, {TOTAL: in_flight[member]})
        in_force[member] = shares.exchange(member, *said, is_draining=is_draining)[TOTAL]


def test_caps_of_agents_are_divided_each_for_itself() -> None:
    concurrency = Concurrency(total=None, per_agent={"a": 4, "free": None}, each_other=6)
    assert caps_of(concurrency) == {"a": 4, "_default": 6}
    assert caps_of(Concurrency(total=None)) == {}

    half = with_caps(concurrency, {"a": 2, "_default": 3})
    assert (half.total, half.cap_of("a"), half.cap_of("free"), half.cap_of("x")) == (None, 2, None, 3)
    assert with_caps(Concurrency(total=8), {}).total == 8
    assert with_caps(Concurrency(total=8), {TOTAL: 9}).total == 8
    assert with_caps(Concurrency(total=8), {TOTAL: 0}).total == 0
    taken = in_flight_by_cap(concurrency, 9, {"a": 1, "x": 2, "y": 5, "free": 1})
    assert taken == {TOTAL: 9, "a": 1, "free": 1, "_default": 5}
