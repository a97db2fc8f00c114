"""Long bodies, which are read to where they belong: whole, broken off, too long, and with something on their heels."""

import asyncio
import tracemalloc
from typing import Any

import aiohttp
import pytest
import uvloop

from nemo_gym.http.errors import AnswerTooLargeError
from nemo_gym.http.transports import wire_connection
from nemo_gym.http.transports.base import local_request, target_of
from nemo_gym.http.transports.wire_connection import Connection
from tests.http.wire_peers import Line, ask, body_of, once, peer_on, plain, pool_of

LONG = bytes(range(256)) * 8_000
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def run(work: Any, loop: Any) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("size", [0, 1_000, 100_000])
def test_a_long_answer_comes_whole_without_the_parser(loop: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []
    monkeypatch.setattr(Connection, "on_body", lambda self, data: pieces.append(data))

    async def behave(line: Line) -> None:
        while await line.request():
            await line.say(plain(LONG), size)

    async def main() -> None:
        async with peer_on(behave) as peer, pool_of() as pool:
            for _ in range(3):
                assert await body_of(pool, peer.port) == LONG
            assert len(peer.lines) == 1

    run(main(), loop)
    assert not pieces


@pytest.mark.parametrize("loop", LOOPS)
def test_a_long_answer_is_not_copied_once_it_is_there(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Noted(wire_connection.LongBody):
        def _hand_over(self) -> None:
            tracemalloc.start()
            try:
                super()._hand_over()
                made.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()

    monkeypatch.setattr(wire_connection, "LongBody", Noted)

    async def main() -> bytes:
        async with peer_on(once(plain(LONG))) as peer, pool_of() as pool:
            return await body_of(pool, peer.port)

    assert run(main(), loop) == LONG
    assert made[0] < len(LONG) // 100


@pytest.mark.parametrize("loop", LOOPS)
def test_a_long_answer_that_breaks_off_is_broken(loop: Any) -> None:
    async def main() -> None:
        async with peer_on(once(plain(LONG)[:-1])) as peer, pool_of() as pool:
            response = await ask(pool, peer.port)
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_nobody_is_given_what_follows_a_long_answer(loop: Any) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(plain(LONG) + plain(b"not asked for"))
        await line.request()
        await line.say(plain(b"late"))

    async def main() -> None:
        async with peer_on(behave) as peer, pool_of() as pool:
            assert await body_of(pool, peer.port) == LONG
            await asyncio.sleep(0.05)
            assert await body_of(pool, peer.port) == LONG
            assert len(peer.lines) == 2

    run(main(), loop)


def test_a_long_answer_may_be_no_longer_than_allowed() -> None:
    async def main() -> None:
        async with peer_on(once(plain(LONG))) as peer, pool_of(max_response_bytes=1_000_000) as pool:
            with pytest.raises(AnswerTooLargeError):
                await body_of(pool, peer.port)

    asyncio.run(main())


def test_no_memory_is_set_aside_for_what_is_only_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_connection, "LONGEST_AT_ONCE_BYTES", 1_000_000)
    monkeypatch.setattr(wire_connection, "LongBody", None)

    async def main() -> None:
        async with peer_on(once(plain(LONG))) as peer, pool_of() as pool:
            assert await body_of(pool, peer.port) == LONG

    asyncio.run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_body_in_pieces_goes_out_as_one(loop: Any) -> None:
    got: list[bytes] = []

    async def behave(line: Line) -> None:
        got.append(await line.request())
        await line.say(plain(b"yes"))

    async def main() -> None:
        async with peer_on(behave) as peer, pool_of() as pool:
            target = target_of(f"http://127.0.0.1:{peer.port}/")
            assert target is not None
            whole = local_request("POST", target.origin, target.path, {"data": b"ab" + LONG + b"c"}, target.address)
            assert whole is not None
            await pool.exchange(whole._replace(body=b"", pieces=(b"ab", LONG, b"c")), 10)

    run(main(), loop)
    assert got[0].endswith(b"\r\n\r\nab" + LONG + b"c")
