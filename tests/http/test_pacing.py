"""The pace of calls: by a clock that the test moves, and by real calls to real endpoints."""

import asyncio
import itertools
import random
import selectors
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from nemo_gym.http.pace_books import Books, share_pace
from nemo_gym.http.pacing import SESSION, FairQueue, Pace, Pacer, TokenEstimate, Turn, duration_s, told_pause_s
from nemo_gym.retry import RetryPolicy, Tries
from tests.collection.pace_lab import most_within

DEADLINE_S = 30.0


class _Jumping(selectors.DefaultSelector):
    """Does not wait: the time that it should have waited has passed, and a little more."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.now_s, self._late_s, self._draws = 1000.0, late_s, random.Random(5)

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.now_s += timeout + self._draws.uniform(0, self._late_s)
        return super().select(0)


class FakeTime(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it, and comes a little late each time."""

    def __init__(self, late_s: float = 0.0) -> None:
        self._jumping = _Jumping(late_s)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self.run_until_complete(work)
        finally:
            self.close()


def pacers(loop: FakeTime, pace: Pace, config_file: Path | None, number: int = 1) -> list[Pacer]:
    """As many as there are replicas."""
    return [Pacer(pace, Books(config_file, "policy_model"), number, clock=loop.time) for _ in range(number)]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.touch()
    return file


async def sent(
    pacer: Pacer,
    calls: int,
    sessions: int = 10,
    size: int = 0,
    lasts_s: float = 0.0,
    usage: Any = None,
    prefix: str = "session",
) -> list[tuple[float, str]]:
    """When calls went, and whose they were."""
    went: list[tuple[float, str]] = []
    loop = asyncio.get_running_loop()

    async def call(number: int) -> None:
        turn = Turn(pacer, f"{prefix} {number % sessions}", size)
        try:
            await turn.wait()
            went.append((loop.time(), turn.session))
            await asyncio.sleep(lasts_s)
            turn.answered({"usage": usage}, {})
        finally:
            turn.close()

    await asyncio.gather(*map(call, range(calls)))
    return went


@pytest.mark.parametrize(("per_minute", "replicas"), [(600, 1), (600, 4), (6_000, 3), (40, 2)])
def test_requests_go_evenly_and_no_stretch_of_time_has_more_than_its_share(
    config_file: Path, per_minute: int, replicas: int
) -> None:
    loop = FakeTime(late_s=0.02)
    calls = per_minute // 2

    async def scenario() -> list[float]:
        made = pacers(loop, Pace(requests_per_minute=per_minute), config_file, replicas)
        went = await asyncio.gather(*(sent(pacer, calls // replicas) for pacer in made))
        return [at for of_one in went for at, _ in of_one]

    times = loop.run(scenario())

    assert most_within(times, 10.0) <= per_minute / 6 * 1.02 or most_within(times, 10.0) <= per_minute / 6 + 1
    assert most_within(times, 1.0) <= per_minute / 60 * 1.1 + 1
    assert len(times) == calls // replicas * replicas
    assert max(times) - min(times) == pytest.approx(30, rel=0.1)  # and the limit is used up


def test_what_an_idle_replica_does_not_use_is_there_for_the_others(config_file: Path) -> None:
    loop = FakeTime()

    async def scenario() -> list[float]:
        busy, _, _, _ = pacers(loop, Pace(requests_per_minute=600), config_file, 4)
        return [at for at, _ in await sent(busy, 100)]

    times = loop.run(scenario())

    assert max(times) - min(times) == pytest.approx(9.9, abs=0.2)


def test_replicas_that_wait_take_turns(config_file: Path) -> None:
    loop = FakeTime(late_s=0.003)

    async def scenario() -> list[int]:
        made = pacers(loop, Pace(requests_per_minute=600), config_file, 3)
        works = [asyncio.ensure_future(sent(pacer, 200)) for pacer in made]
        await asyncio.sleep(20.0)
        counts = [pacer._under_way for pacer in made]
        waits = [len(pacer._queue) for pacer in made]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        assert counts == [0, 0, 0]
        return [200 - left for left in waits]

    assert all(went >= 30 for went in loop.run(scenario()))  # of 200 in all


def test_without_a_common_file_the_limits_are_divided_by_the_number_of_processes() -> None:
    loop = FakeTime()

    async def scenario() -> list[float]:
        (pacer,) = pacers(loop, Pace(requests_per_minute=600), None)
        divided = Pacer(Pace(requests_per_minute=600, max_concurrent_requests=10), Books(None, "m"), 4, loop.time)
        whole, part = await asyncio.gather(sent(pacer, 41), sent(divided, 41))
        return [went[-1][0] - went[0][0] for went in (whole, part)]

    assert loop.run(scenario()) == [pytest.approx(4.0, abs=0.2), pytest.approx(16.0, abs=0.5)]


def test_a_session_with_many_calls_does_not_starve_the_others() -> None:
    loop = FakeTime()

    async def scenario() -> float:
        (pacer,) = pacers(loop, Pace(requests_per_minute=60), None)
        greedy = asyncio.ensure_future(sent(pacer, 500, sessions=1))
        await asyncio.sleep(3.5)
        went = await sent(pacer, 4, sessions=4, prefix="small")
        greedy.cancel()
        await asyncio.gather(greedy, return_exceptions=True)
        return max(at for at, _ in went) - 1000

    assert loop.run(scenario()) <= 9  # four calls, after at most one of the 496 that were there before


def test_calls_of_sessions_take_turns_and_those_that_are_tried_again_go_first() -> None:
    queue = FairQueue()
    pacer = Pacer(Pace(), Books(None, "m"))
    turns = [Turn(pacer, session) for session in ("a", "a", "a", "b", "c", "b")]
    again = Turn(pacer, "a")
    again.has_slot = True
    for turn in [*turns, again]:
        queue.add(turn)
    queue.discard(turns[4])
    queue.discard(turns[4])  # gone already

    assert queue.first() is queue.pop() is again
    assert [queue.pop().session for _ in range(len(queue))] == ["a", "b", "a", "b", "a"]
    assert len(queue) == 0


def test_tokens_are_estimated_and_put_right_by_usage(config_file: Path) -> None:
    loop = FakeTime()
    usage = {"input_tokens": 600, "output_tokens": 400}

    async def scenario() -> list[float]:
        made = pacers(loop, Pace(tokens_per_minute=60_000), config_file, 2)
        went = await asyncio.gather(*(sent(pacer, 90, size=100, lasts_s=0.3, usage=usage) for pacer in made))
        return [at for of_one in went for at, _ in of_one]

    times = loop.run(scenario())

    assert max(times) - min(times) == pytest.approx(180, rel=0.05)  # 1,000 of each call at 1,000 a second
    assert most_within(sorted(times)[20:], 10.0) <= 12


def test_a_call_that_alone_exceeds_the_limit_goes_and_the_next_waits_for_it() -> None:
    loop = FakeTime()

    async def scenario() -> list[float]:
        (pacer,) = pacers(loop, Pace(tokens_per_minute=1_000), None)
        usage = {"prompt_tokens": 4_000, "completion_tokens": 1_000}
        return [at for at, _ in await sent(pacer, 2, size=20_000, lasts_s=1.0, usage=usage)]

    first, second = loop.run(scenario())

    assert second - first == pytest.approx(300, rel=0.1)


def test_an_estimate_follows_what_is_reported_and_never_exceeds_what_a_request_allows() -> None:
    estimate = TokenEstimate()
    assert estimate.of(400, 1e9) == 100 + 256
    for _ in range(20):
        estimate.learn(1_000, 500, 40)

    assert estimate.of(2_000, 1e9) == pytest.approx(1_040)
    assert estimate.of(2_000, 8) == pytest.approx(1_008)


@pytest.mark.parametrize("usage", [{"input_tokens": -5, "output_tokens": 1}, {"total_tokens": 1e300}, "many", None, {}])
def test_usage_that_makes_no_sense_leaves_the_estimate_as_it_is(usage: Any) -> None:
    loop = FakeTime()

    async def scenario() -> float:
        (pacer,) = pacers(loop, Pace(tokens_per_minute=60_000), None)
        went = await sent(pacer, 11, size=400, usage=usage)
        return went[-1][0] - went[0][0]

    assert loop.run(scenario()) == pytest.approx(3.56, rel=0.05)  # 10 x (100 + 256) tokens at 1,000 a second


def test_no_more_at_once_than_allowed_over_all_replicas_and_killed_ones_count_no_more(config_file: Path) -> None:
    loop = FakeTime()

    async def scenario() -> int:
        made = pacers(loop, Pace(max_concurrent_requests=5), config_file, 3)
        made[2]._books._write_row(2**22 + 1, 4, 0)  # the number of no process: this one was killed with four under way
        under_way, most = 0, 0

        async def call(pacer: Pacer, number: int) -> None:
            nonlocal under_way, most
            turn = Turn(pacer, str(number))
            await turn.wait()
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(1.0)
            under_way -= 1
            turn.close()

        await asyncio.gather(*(call(pacer, number) for pacer in made[:2] for number in range(20)))
        assert loop.time() < 1000 + 15
        return most

    assert loop.run(scenario()) == 5


def test_replicas_that_wait_for_the_same_slot_take_turns(config_file: Path) -> None:
    loop = FakeTime()

    async def scenario() -> list[int]:
        made = pacers(loop, Pace(max_concurrent_requests=1), config_file, 3)
        works = [asyncio.ensure_future(sent(pacer, 40, lasts_s=0.5)) for pacer in made]
        await asyncio.sleep(30.0)
        waits = [len(pacer._queue) for pacer in made]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        return [40 - left for left in waits]

    went = loop.run(scenario())
    assert min(went) >= 10
    assert sum(went) >= 50


def test_a_share_of_the_limits_holds_as_soon_as_it_is_given(config_file: Path) -> None:
    loop = FakeTime()
    share_pace(config_file, 0.0)

    async def scenario() -> list[float]:
        (pacer,) = pacers(loop, Pace(requests_per_minute=600, max_concurrent_requests=40), config_file)
        work = asyncio.ensure_future(sent(pacer, 30))
        await asyncio.sleep(5.0)
        share_pace(config_file, 0.25)
        await asyncio.sleep(4.0)
        share_pace(config_file, 1.0)
        return [at - 1000 for at, _ in await work]

    times = loop.run(scenario())

    assert min(times) >= 5
    assert 9 <= sum(at < 9 for at in times) <= 11
    assert max(times) == pytest.approx(9 + 2.0, abs=0.6)


def test_a_call_that_is_given_up_leaves_its_place_to_the_next() -> None:
    loop = FakeTime()

    async def scenario() -> tuple[float, int]:
        (pacer,) = pacers(loop, Pace(requests_per_minute=60, max_concurrent_requests=1), None)
        await sent(pacer, 1)
        given_up = [asyncio.ensure_future(sent(pacer, 1)) for _ in range(50)]
        await asyncio.sleep(0.1)
        last = asyncio.ensure_future(sent(pacer, 1))
        await asyncio.sleep(0.1)
        for call in given_up:
            call.cancel()
        ((at, _),) = await last
        return at - 1000, len(pacer._queue) + pacer._under_way

    assert loop.run(scenario()) == (pytest.approx(1.0, abs=0.2), 0)


def test_what_an_endpoint_asks_for_holds_for_all_replicas(config_file: Path) -> None:
    loop = FakeTime()

    async def scenario() -> list[float]:
        one, other = pacers(loop, Pace(requests_per_minute=60_000), config_file, 2)
        Turn(one, "a").refused(429, {}, 7.0)
        Turn(one, "a").refused(500, {}, 70.0)  # which is no answer of a busy endpoint
        ((first, _),) = await sent(other, 1)
        Turn(other, "a").answered({}, {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"})
        ((second, _),) = await sent(one, 1)
        return [first - 1000, second - first]

    assert loop.run(scenario()) == [pytest.approx(7.0, abs=0.1), pytest.approx(360.0, abs=0.1)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("200ms", 0.2),
        ("1h2m3.5s", 3723.5),
        ("1d", 86_400.0),
        ("12", 12.0),
        (" 0.5 ", 0.5),
        ("1700000060", 60.0),
        ("1700000060000", 60.0),
        ("1600000000", 0.0),
        ("soon", None),
        ("6m0s and a bit", None),
        ("", None),
        ("nan", None),
        (None, None),
    ],
)
def test_durations_are_read_in_the_formats_of_endpoints(text: str | None, seconds: float | None) -> None:
    assert duration_s(text, now_s=1_700_000_000) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("remaining", "limit", "reset", "pause_s"),
    [
        ("500", "600", "30s", 0.0),  # enough
        ("0", "600", "30s", 30.0),  # nothing: until it is reset
        ("0", None, "30s", 30.0),
        ("5", None, "30s", 0.0),  # of how many?
        ("29", "600", "30s", 1.0),  # little: it should last until then
        ("29", "600", None, 0.0),
        ("no", "600", "30s", 0.0),
    ],
)
def test_what_is_left_is_spread_over_the_time_until_more_comes(
    remaining: str, limit: str | None, reset: str | None, pause_s: float
) -> None:
    told = {"remaining": remaining, "limit": limit, "reset": reset}
    for kind, names in {"requests": "-requests", "tokens": "-tokens"}.items():
        headers = {f"x-ratelimit-{what}{names}": value for what, value in told.items() if value is not None}
        assert told_pause_s(headers, kind, 1.0) == pytest.approx(pause_s)
    plain = {f"x-ratelimit-{what}": value for what, value in told.items() if value is not None}
    assert told_pause_s(plain, "requests", 1.0) == pytest.approx(pause_s)
    assert told_pause_s(plain, "tokens", 1.0) == 0.0


def test_waiting_for_the_pace_does_not_use_up_the_time_for_tries() -> None:
    tries = Tries(RetryPolicy(max_elapsed_s=5.0, first_delay_s=0.0))
    tries.excuse(100.0)  # nothing has failed yet
    assert tries.pause_after_failure() is not None
    tries._first_failure_s = time.monotonic() - 60.0
    tries.excuse(58.0)
    assert tries.pause_after_failure() is not None
    tries._first_failure_s = time.monotonic() - 60.0
    assert tries.pause_after_failure() is None


def paced_client(port: int, pace: Pace) -> NeMoGymAsyncOpenAI:
    client = NeMoGymAsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key")
    client.pacer = Pacer(pace, Books(None, "m"))
    return client


def test_real_calls_keep_the_pace_and_tell_how_long_they_waited(serve: Callable[..., int]) -> None:
    app, arrived = FastAPI(), []

    @app.post("/v1/responses")
    async def respond(request: Request) -> Any:
        arrived.append(time.monotonic())
        return {"usage": {"input_tokens": 3, "output_tokens": 4}}

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        client = paced_client(serve(app), Pace(requests_per_minute=1_200))
        calls = [asyncio.ensure_future(client.create_response(model="m")) for _ in range(20)]
        await asyncio.sleep(0.2)
        during = await client.contact.state()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*calls)
        return during, await client.contact.state()

    during, after = asyncio.run(scenario())

    assert arrived[-1] - arrived[0] >= 0.8  # 19 x 50 ms
    assert during["pacing"] > 0
    assert 0 < during["paced_s"] < after["paced_s"]
    assert after["pacing"] == 0
    assert after["paced_s"] >= 0.5 * sum(range(20)) * 0.05
    assert (after["ridden_out"], after["ridden_out_cost_s"], after["problem"]) == ({}, 0.0, "")


def test_retry_after_of_one_call_is_obeyed_by_all_and_the_retry_goes_first(serve: Callable[..., int]) -> None:
    app, arrived = FastAPI(), []
    statuses = itertools.chain([429], itertools.repeat(200))

    @app.post("/v1/chat/completions")
    async def respond(request: Request) -> Any:
        arrived.append((time.monotonic(), (await request.json())["messages"]))
        status = next(statuses)
        return JSONResponse({}, status, headers={"retry-after": "1.5"} if status == 429 else {})

    async def scenario() -> dict[str, Any]:
        client = paced_client(serve(app), Pace(requests_per_minute=600))
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(client.create_chat_completion(messages=str(number)) for number in range(6)))
        return await client.contact.state()

    state = asyncio.run(scenario())

    held = [at for at, _ in arrived if at - arrived[0][0] >= 1.4]
    assert len(arrived) == 7
    assert len(held) >= 5  # all but those that were on their way already
    assert Counter(message for _, message in arrived)["0"] == 2
    assert state["ridden_out"] == {"429": 1}


def test_what_an_endpoint_says_is_left_is_heard_in_its_answers(serve: Callable[..., int]) -> None:
    app, arrived = FastAPI(), []

    @app.post("/v1/responses")
    async def respond() -> Any:
        arrived.append(time.monotonic())
        left = {
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": "900ms",
        }
        return JSONResponse({}, headers=left)

    async def scenario() -> dict[str, Any]:
        client = paced_client(serve(app), Pace(max_concurrent_requests=8))
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(2):
                await client.create_response(model="m")
        return await client.contact.state()

    state = asyncio.run(scenario())

    assert arrived[1] - arrived[0] >= 0.8
    assert state["paced_s"] >= 0.8
    assert state["ridden_out"] == {}


def test_a_call_whose_caller_goes_away_stops_waiting(serve: Callable[..., int]) -> None:
    app, arrived = FastAPI(), []

    @app.post("/v1/responses")
    async def respond() -> Any:
        arrived.append(1)
        return {}

    async def scenario() -> dict[str, Any]:
        client = paced_client(serve(app), Pace(requests_per_minute=1, max_concurrent_requests=1))
        await client.create_response(model="m")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.create_response(model="m")
        return await client.contact.state()

    state = asyncio.run(scenario())

    assert arrived == [1]
    assert (state["waiting"], state["pacing"]) == (0, 0)
    assert 0.2 < state["paced_s"] < DEADLINE_S


def test_counting_tokens_takes_none(serve: Callable[..., int]) -> None:
    app = FastAPI()

    @app.post("/tokenize")
    async def tokenize() -> Any:
        return {"tokens": [1, 2]}

    async def scenario() -> None:
        client = paced_client(serve(app), Pace(tokens_per_minute=1))
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(5):
                assert (await client.create_tokenize(prompt="word " * 100))["tokens"] == [1, 2]

    asyncio.run(scenario())


def test_the_session_of_the_running_code_is_the_one_whose_turn_it_is() -> None:
    pacer = Pacer(Pace(requests_per_minute=1), Books(None, "m"))
    token = SESSION.set("mine")
    try:
        turn = pacer.turn({"max_tokens": 7}, 100)
    finally:
        SESSION.reset(token)

    assert (turn.session, turn.size, turn.most_output) == ("mine", 100, 7)
    assert pacer.turn({}, 0).session == ""


def test_books_are_this_process_alone_where_nothing_was_handed_over_or_there_is_no_room(
    config_file: Path, tmp_path: Path
) -> None:
    assert not Books(None, "m").is_shared
    assert not Books(tmp_path / "gone.yaml", "m").is_shared
    assert all(Books(config_file, f"server {number}").is_shared for number in range(64))
    assert not Books(config_file, "one too many").is_shared
    first = Books(config_file, "server 0")
    assert first.is_shared
    first.close()
