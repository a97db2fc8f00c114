"""Which coroutine functions have no place to be suspended at."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

from nemo_gym.coroutines import NEVER_WAITS, never_waits


async def computes(number: int) -> int:
    return sum(range(number)) if number else len([each * 2 for each in "abc"])


async def awaits() -> None:
    await asyncio.sleep(0)


async def numbers() -> AsyncIterator[int]:
    yield 1


async def iterates() -> int:
    async for number in numbers():
        return number
    return 0


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[None]:
    yield


async def enters() -> None:
    async with opened():
        pass


class Server:
    async def computes(self) -> int:
        return 1

    async def awaits(self) -> int:
        return await self.computes()


def test_a_function_that_only_computes_never_waits() -> None:
    assert never_waits(computes)
    assert never_waits(Server().computes)


def test_whatever_may_be_suspended_may_wait() -> None:
    assert not any(never_waits(each) for each in (awaits, numbers, iterates, enters, Server().awaits))


def test_what_has_no_code_of_its_own_is_not_trusted() -> None:
    assert not never_waits(functools.partial(computes, 1))


def test_a_wrapper_may_speak_for_what_it_wraps() -> None:
    async def wrapper() -> Any:
        return await computes(1)

    assert not never_waits(wrapper)
    setattr(wrapper, NEVER_WAITS, never_waits(computes))
    assert never_waits(wrapper)
