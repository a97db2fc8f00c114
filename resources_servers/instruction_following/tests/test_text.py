"""How texts are cut into sentences."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from resources_servers.instruction_following import text as counting

MARKS = ".!?\u2026\u3002\uff01\uff1f\uff0e\u061f\u06d4\u0964\"')]\u2019\u201d*_ \n\u3000a1"
PLAIN_END = re.compile(r"[.!?\u2026]+[\"')\]\u2019\u201d*_]*(?=\s|\Z)|[\u3002\uff01\uff1f\uff0e\u061f\u06d4\u0964]+")
"""Where a sentence may end, in the plainest words; this takes quadratic time on a long run of dots."""


def ends(pattern: "re.Pattern[str]", text: str) -> list[tuple[int, int]]:
    return [found.span() for found in pattern.finditer(text)]


def test_short_texts_end_where_the_plainest_pattern_says() -> None:
    for length in range(7):
        for letters in itertools.product('.?"\u3002 a', repeat=length):
            text = "".join(letters)
            assert ends(counting._END, text) == ends(PLAIN_END, text), text


@given(st.text(MARKS, max_size=40))
def test_random_texts_end_where_the_plainest_pattern_says(text: str) -> None:
    assert ends(counting._END, text) == ends(PLAIN_END, text)
