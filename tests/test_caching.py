"""Whatever models and rows say, what is remembered of it stays small."""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym.http.transports.base import _beginning, _fixed_headers, _target, target_of
from nemo_gym.http.transports.response import MOST_KEY_CHARACTERS, _attributes, _is_name, _read_cookie, bounded_cache
from nemo_gym.servers.sessions import MOST_REMEMBERED_COOKIES, REMEMBERED_COOKIES, Sessions

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


class _CountedSessions(Sessions):
    read = 0

    def _read(self, cookie: bytes) -> Any:
        self.read += 1
        return super()._read(cookie)

    @property
    def remembered(self) -> int:
        return len(self._known) + len(self._known_before)

    def call(self, cookie: bytes | None = None) -> bytes:
        """The cookie that an answer brings, to a request with or without one."""
        headers = [] if cookie is None else [(b"cookie", cookie)]
        return self.header(self.open({"headers": headers}))[1].partition(b";")[0]


def test_few_sessions_at_a_time_leave_little_behind_however_many_there_were() -> None:
    sessions = _CountedSessions("agent", "secret")
    for _ in range(20 * REMEMBERED_COOKIES):
        cookie = sessions.call()
        assert sessions.call(cookie) == cookie

    assert sessions.read == 0
    assert REMEMBERED_COOKIES // 2 <= sessions.remembered <= REMEMBERED_COOKIES


def test_more_sessions_at_a_time_than_are_remembered_make_room_for_themselves() -> None:
    sessions = _CountedSessions("agent", "secret")
    cookies = [sessions.call() for _ in range(10 * REMEMBERED_COOKIES)]
    for _ in range(20):
        assert [sessions.call(cookie) for cookie in cookies] == cookies

    assert sessions.read <= 2 * len(cookies)
    assert sessions.remembered <= 2 * len(cookies) + REMEMBERED_COOKIES
    others = [sessions.call() for _ in range(2 * MOST_REMEMBERED_COOKIES)]
    for cookie in others:
        sessions.call(cookie)
    assert sessions.remembered <= MOST_REMEMBERED_COOKIES


def test_sessions_that_were_made_in_advance_are_not_begun_by_a_copy_of_the_process() -> None:
    sessions = _CountedSessions("agent", "secret")
    sessions.call()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, sessions.call())
        os._exit(0)
    os.waitpid(child, 0)
    begun_there = os.read(reading, 10_000)
    begun_here = {sessions.call() for _ in range(200)}

    assert len(begun_here) == 200
    assert begun_there not in begun_here
    assert _CountedSessions("agent", "secret").call(begun_there) == begun_there
