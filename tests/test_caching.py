"""Whatever models and rows say, what is remembered of it stays small."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym.http.transports.base import _beginning, _fixed_headers, _target, target_of
from nemo_gym.http.transports.response import MOST_KEY_CHARACTERS, _attributes, _is_name, _read_cookie, bounded_cache

LONG = 500_000


def test_what_was_looked_up_is_remembered_up_to_so_much_text() -> None:
    asked: list[str] = []

    @bounded_cache(100, most_characters=1_000)
    def length_of(text: str) -> int:
        asked.append(text)
        return len(text)

    assert [length_of("a"), length_of("a"), length_of("b" * 900), length_of("a")] == [1, 1, 900, 1]
    assert asked == ["a", "b" * 900]
    length_of("c" * 900)  # now it is too much
    assert length_of("a") == 1
    assert asked == ["a", "b" * 900, "c" * 900, "a"]


def test_what_is_too_long_by_itself_still_gets_its_answer() -> None:
    @bounded_cache(100, most_characters=10)
    def length_of(text: str) -> int:
        return len(text)

    assert [length_of("a" * 50), length_of("b" * 60), length_of("a" * 50)] == [50, 60, 50]
    assert length_of.cache_info().currsize == 1


CACHES: list[tuple[Callable[..., Any], Callable[[str], tuple[Any, ...]]]] = [
    (_read_cookie, lambda text: (f"session={text}; Path=/".encode(),)),
    (_is_name, lambda text: (text,)),
    (_attributes, lambda text: (f"Path=/{text}",)),
    (_target, lambda text: ("http://127.0.0.1:1", f"/{text}")),
    (_fixed_headers, lambda text: ((("x", text),), "http://127.0.0.1:1", True, False)),
    (_beginning, lambda text: ("POST", ("http://x/", "/", b"/", b""), ((b"x", text.encode()),))),
    (target_of, lambda text: (f"http://127.0.0.1:1/{text}",)),
]


@pytest.mark.parametrize(("cached", "arguments"), CACHES, ids=lambda value: getattr(value, "__name__", ""))
def test_long_texts_are_not_kept(cached: Any, arguments: Callable[[str], tuple[Any, ...]]) -> None:
    cached.cache_clear()
    for number in range(20):
        cached(*arguments(f"{number:02}" + "x" * LONG))
    gc.collect()

    assert cached.cache_info().currsize <= MOST_KEY_CHARACTERS / LONG
    cached.cache_clear()
