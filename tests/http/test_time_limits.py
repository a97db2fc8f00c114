"""Limits of time: those that are long share a timer, and end what they bound all the same."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nemo_gym.http.transports import base
from nemo_gym.server_utils import time_limit

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["short", "long"])
def limit_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """A limit that ends soon, whichever way it is kept."""
    if request.param == "long":
        monkeypatch.setattr(base, "_LONG_S", 0.001)
        monkeypatch.setattr(base, "_LOOKED_AT_EVERY_S", 0.01)
    return 0.02


def test_what_takes_too_long_ends_in_a_timeout_and_the_rest_goes_on(run: Run, limit_s: float) -> None:
    async def work() -> list[str]:
        told = []
        for number in range(2):  # the second finds the timer of the first, or none
            try:
                with time_limit(limit_s):
                    await asyncio.Event().wait()
            except TimeoutError:
                told.append(f"over {number}")
        with time_limit(limit_s):
            told.append("in time")
        await asyncio.sleep(3 * limit_s)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        return told

    assert run(work()) == ["over 0", "over 1", "in time"]
    assert not any(base._LONG_WAITS.values())


def test_of_two_limits_the_one_that_is_over_ends_what_it_bounds(run: Run, limit_s: float) -> None:
    async def work() -> str:
        with time_limit(3600):
            try:
                with time_limit(limit_s), time_limit(3600):
                    await asyncio.Event().wait()
            except TimeoutError:
                return "inner"
        return "none"

    assert run(work()) == "inner"


def test_who_is_cancelled_from_outside_is_not_told_of_a_timeout(run: Run, limit_s: float) -> None:
    async def bounded() -> None:
        with time_limit(limit_s + 3600):
            await asyncio.Event().wait()

    async def work() -> bool:
        task = asyncio.create_task(bounded())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run(work())


def test_what_else_is_raised_stays_what_it_is(run: Run, limit_s: float) -> None:
    async def work() -> None:
        with time_limit(limit_s):
            raise LookupError("not found")

    with pytest.raises(LookupError, match="not found"):
        run(work())
