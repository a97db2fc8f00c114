import asyncio
import re
import time
from collections.abc import Iterator

import pytest

from nemo_gym.workers.pool import PatternMatcher, PatternTimeoutError, captured

ENDLESS, TEXT = "(a+)+$", "a" * 60 + "b"
"""Takes longer than the universe."""


@pytest.fixture
def matcher() -> Iterator[PatternMatcher]:
    matcher = PatternMatcher(timeout_s=60.0)
    yield matcher
    matcher.close()


@pytest.mark.parametrize(
    ("pattern", "text", "flags", "found"),
    [
        (r"a=(\d)", "a=1 a=2", 0, ["a=2", "2"]),
        (r"(x)?a", "a", 0, ["a", None]),
        ("B", "abc", re.IGNORECASE, ["b"]),
        ("^b.c$", "a\nb\nc", re.MULTILINE | re.DOTALL, ["b\nc"]),
        ("no", "yes", 0, None),
        ("\ud83d", "half a \ud83d", 0, ["\ud83d"]),
        ("", "ab", 0, [""]),
    ],
)
def test_the_last_match_counts(
    pattern: str, text: str, flags: int, found: list[str | None] | None, matcher: PatternMatcher
) -> None:
    assert asyncio.run(matcher.last_match(pattern, text, flags)) == found


def test_what_is_no_regular_expression_is_said_to_be_none(matcher: PatternMatcher) -> None:
    with pytest.raises(re.error):
        asyncio.run(matcher.last_match("(", "text"))


def test_a_pattern_that_takes_for_ever_is_given_up_and_holds_up_nobody() -> None:
    matcher = PatternMatcher(timeout_s=2.0, processes=1)

    async def use() -> float:
        longest_s, last_s = 0.0, time.monotonic()
        endless = asyncio.create_task(matcher.last_match(ENDLESS, TEXT))
        while not endless.done():
            await asyncio.sleep(0.01)
            longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        with pytest.raises(PatternTimeoutError, match=r"\(a\+\)\+\$.* was given up on a text of 61 characters"):
            endless.result()
        assert await matcher.last_match("b", TEXT) == ["b"]
        return longest_s

    try:
        assert asyncio.run(use()) < 2.0
    finally:
        matcher.close()


@pytest.mark.parametrize(
    ("found", "text"), [(["all"], "all"), (["all", None, "", "x"], "x"), (["all", None], "all"), ([""], "")]
)
def test_the_first_group_that_says_something_is_what_is_captured(found: list[str | None], text: str) -> None:
    assert captured(found) == text
