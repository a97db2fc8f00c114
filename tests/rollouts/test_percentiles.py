"""The median and p95 of what rollouts took."""

import random
from typing import Any

from nemo_gym.runs.spending import Percentiles


def record(duration_s: Any, tokens: Any) -> dict[str, Any]:
    return {"_ng_timing": {"duration_s": duration_s}, "response": {"usage": {"output_tokens": tokens}}}


def test_they_are_those_of_the_sorted_numbers_whatever_their_order() -> None:
    numbers = list(range(1, 101))
    random.Random(0).shuffle(numbers)
    taken = Percentiles()
    for number in numbers:
        taken.add(record(number / 8, number))

    assert taken.as_json() == {"duration_s": {"p50": 6.25, "p95": 11.9}, "output_tokens": {"p50": 50, "p95": 95}}


def test_a_million_different_numbers_take_little_room() -> None:
    taken = Percentiles()
    drawn = random.Random(1)
    for _ in range(20_000):
        taken.add(record(drawn.lognormvariate(0, 3), drawn.randrange(10**9)))

    assert max(map(len, taken._counts.values())) < 9_000
    assert 0.9 < taken.as_json()["duration_s"]["p50"] < 1.1


def test_what_a_record_does_not_say_or_nobody_can_count_is_left_out() -> None:
    taken = Percentiles()
    odd_ones: list[Any] = [float("nan"), float("inf"), -1, 10**400, "3", None, [], True]
    for odd in odd_ones:
        taken.add(record(odd, odd if odd is not True else None))
    others: list[dict[str, Any]] = [{}, {"_ng_timing": 3, "response": "gone"}, {"response": {"usage": []}}]
    for other in others:
        taken.add(other)

    assert taken.as_json() == {"duration_s": {"p50": 1.0, "p95": 1.0}}
    assert Percentiles().as_json() == {}
