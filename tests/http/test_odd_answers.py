"""The same bytes to both clients: what aiohttp makes of an odd answer, a bare connection makes of it, too.

Where they differ the reason is in a test's name.
"""

import asyncio
import gzip
import io
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from nemo_gym.http.errors import AnswerTooLargeError, NotHttpError, ResponseTooLargeError, ServerResponseError
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from nemo_gym.http.request import get_response_json, raise_for_status, request
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.http.transports.session import close_global_aiohttp_client, get_global_aiohttp_client, use_client_settings
from tests.http.odd_answers import AFTER, BODILESS, HEADERS, LENGTHS, ODD, OK, PACKED, Odd, chunks, zipped
from tests.http.wire_peers import Behaviour, Line, ask, peer_on, plain, pool_of

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Client = Callable[[int], Awaitable[Any]]
SECOND = plain(b"second")

KEEPS_THE_ANSWER = {
    *(AFTER.keys() - {"an answer after the end", "half an answer after the end", "blank lines after the end"}),
    *(name for name in BODILESS if name.endswith(("with a body", "with chunks"))),
    *("too short a length", "Connection: close, more to come"),
}
OTHERWISE = {*KEEPS_THE_ANSWER, "half an answer after the end", "gzip cut short", "two headers of 40 KB"}


def saying(odd: Odd) -> Behaviour:
    """The first connection answers oddly, once; whatever comes then is answered with its connection's number."""

    async def behave(line: Line) -> None:
        if line.number == 1 and await line.request():
            await line.say(odd.data)
            if odd.ends:
                return
        while await line.request():
            await line.say(plain(b"%d" % line.number))

    return behave


async def outcome(call: Awaitable[Any]) -> Any:
    """Status, body and headers of an answer; that it is an error if it cannot be had."""
    async with asyncio.timeout(20):
        try:
            answer = await call
            body = await answer.read()
        except (aiohttp.ClientError, OSError):
            return "an error"
    return answer.status, body, [(name.lower(), value) for name, value in answer.raw_headers]


async def both_calls(call: Client, odd: Odd) -> Any:
    """What an odd answer is taken for, and whether its connection carries the next call."""
    async with peer_on(saying(odd)) as peer:
        first = await outcome(call(peer.port))
        await asyncio.sleep(0.01)  # for what came after the answer
        second = await outcome(call(peer.port))
        assert second[1] in (b"1", b"2")
        return first, second[1] == b"1"


async def over_the_wire(odd: Odd) -> Any:
    async with pool_of() as pool:
        return await both_calls(lambda port: ask(pool, port), odd)


async def over_aiohttp(odd: Odd) -> Any:
    try:
        return await both_calls(lambda port: get_global_aiohttp_client().get(f"http://127.0.0.1:{port}/"), odd)
    finally:
        await close_global_aiohttp_client()


@pytest.mark.parametrize("kind", sorted(ODD.keys() - OTHERWISE))
def test_an_odd_answer_is_taken_for_what_aiohttp_takes_it_for(run: Run, kind: str) -> None:
    async def compare() -> None:
        assert await over_the_wire(ODD[kind]) == await over_aiohttp(ODD[kind])

    run(compare())


@pytest.mark.parametrize("kind", sorted(KEEPS_THE_ANSWER))
def test_a_complete_answer_is_not_lost_to_what_follows_it_as_with_aiohttp_when_both_come_at_once(
    run: Run, kind: str
) -> None:
    async def compare() -> None:
        (status, body, _), is_reused = await over_the_wire(ODD[kind])
        assert status < 400
        assert b"more" not in body
        assert b"garbage" not in body
        assert not is_reused
        assert await over_aiohttp(ODD[kind]) == ("an error", False)

    run(compare())


def test_a_connection_with_half_an_answer_nobody_asked_for_is_not_used_again_though_aiohttp_would(run: Run) -> None:
    async def compare() -> None:
        odd = ODD["half an answer after the end"]
        (first, is_reused), (first_of_aiohttp, is_reused_by_aiohttp) = await over_the_wire(odd), await over_aiohttp(odd)
        assert first == first_of_aiohttp
        assert (is_reused, is_reused_by_aiohttp) == (False, True)

    run(compare())


def test_a_gzip_that_was_cut_short_is_not_taken_for_a_whole_one_though_aiohttp_does(run: Run) -> None:
    async def compare() -> None:
        assert await over_the_wire(PACKED["gzip cut short"]) == ("an error", False)
        (status, _, _), _ = await over_aiohttp(PACKED["gzip cut short"])
        assert status == 200

    run(compare())


def test_headers_are_bounded_all_together_where_aiohttp_bounds_each(run: Run) -> None:
    async def compare() -> None:
        odd = HEADERS["two headers of 40 KB"]
        assert await over_the_wire(odd) == ("an error", False)
        (status, _, _), _ = await over_aiohttp(odd)
        assert status == 200

    run(compare())


def test_the_table_covers_every_kind_of_framing() -> None:
    assert len(ODD) == 148
    assert ODD.keys() >= OTHERWISE
    assert LENGTHS.keys() >= {"equal lengths twice", "different lengths", "a negative length", "length and chunks"}


def refusing_early(line_is_kept: bool) -> Behaviour:
    """Answers 413 when it has seen the head, reads no further, and keeps the connection open or ends it."""

    async def behave(line: Line) -> None:
        await line.reader.readuntil(b"\r\n\r\n")
        if line.number > 1:
            await line.say(plain(b"second"))
            await line.request()
            return
        await line.say(plain(b"too large", "413 Payload Too Large"))
        if line_is_kept:
            await asyncio.Event().wait()

    return behave


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_connection_whose_request_did_not_go_out_completely_is_not_used_again(run: Run, is_kept: bool) -> None:
    async def calls(call: Callable[..., Awaitable[Any]]) -> Any:
        async with peer_on(refusing_early(is_kept)) as peer, asyncio.timeout(20):
            first = await outcome(call(peer.port, method="POST", data=b"x" * 20_000_000))
            second = await outcome(call(peer.port))
            return first[:2] if is_kept else None, second[1], len(peer.lines)

    async def compare() -> Any:
        async with pool_of() as pool:
            ours = await calls(lambda port, **options: ask(pool, port, **options))

        def aiohttps(port: int, method: str = "GET", data: bytes = b"") -> Awaitable[Any]:
            return get_global_aiohttp_client().request(method, f"http://127.0.0.1:{port}/", data=io.BytesIO(data))

        theirs = await calls(aiohttps)
        await close_global_aiohttp_client()
        return ours, theirs

    expected = ((413, b"too large") if is_kept else None, b"second", 2)
    assert run(compare()) == (expected, expected)


def test_what_a_server_says_as_soon_as_it_is_called_is_its_answer(run: Run) -> None:
    busy = plain(b"come back later", "503 Service Unavailable", "Connection: close")

    async def behave(line: Line) -> None:
        await line.say(busy)
        await line.request()

    async def compare() -> Any:
        async with peer_on(behave) as peer, pool_of() as pool:
            ours = await outcome(ask(pool, peer.port))
            theirs = await outcome(get_global_aiohttp_client().get(f"http://127.0.0.1:{peer.port}/"))
            await close_global_aiohttp_client()
            return ours[:2], theirs[:2]

    assert run(compare()) == ((503, b"come back later"),) * 2


async def called(port: int, whole: bool) -> Any:
    """What a model endpoint answers, over a bare connection, or any server over aiohttp."""
    url = f"http://127.0.0.1:{port}"
    if whole:
        return await NeMoGymAsyncOpenAI(base_url=url, api_key="k").create_models()
    return await get_response_json(await request("GET", url))


FOREIGN = {
    b"\x15\x03\x01\x00\x02\x02\x46": "TLS port: use https://",
    b"SSH-2.0-OpenSSH_9.6\r\n": "an SSH server",
    b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64\x00\x04": r"HTTP/2 \(gRPC\) server",
    b"-ERR wrong number of arguments\r\n": "a Redis server",
    b"220 mail.example ESMTP\r\n": "a mail or FTP server",
    b"<html>no head</html>": "it begins with b'<html>no head</html>'",
}


@pytest.mark.parametrize(("is_whole", "is_asked"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("data", FOREIGN)
def test_what_is_not_http_is_asked_once_and_called_what_it_looks_like(
    run: Run, data: bytes, is_whole: bool, is_asked: bool
) -> None:
    async def behave(line: Line) -> None:
        if is_asked:
            await line.request()
        await line.say(data)
        await line.request()

    async def call() -> int:
        async with peer_on(behave) as peer:
            with pytest.raises(NotHttpError, match=FOREIGN[data]):
                await called(peer.port, is_whole)
            return len(peer.lines)

    assert run(call()) == 1


def test_a_port_without_tls_is_called_that(run: Run) -> None:
    async def call() -> None:
        async with peer_on(silence_after_garbage) as peer:
            await NeMoGymAsyncOpenAI(base_url=f"https://127.0.0.1:{peer.port}/v1", api_key="k").create_models()

    with pytest.raises(aiohttp.ClientError, match="use http://"):
        run(call())


async def silence_after_garbage(line: Line) -> None:
    """What a plain HTTP server does with the beginning of TLS."""
    await line.reader.read(10)
    await line.say(plain(b"", "400 Bad Request", "Connection: close"))


LARGE = 1 << 20
SETTINGS = GlobalAIOHTTPAsyncClientConfig(max_response_bytes=LARGE)
BOMB = gzip.compress(b"\0" * 20_000_000)
TOO_LARGE = {
    "of known length": plain(b"x" * (LARGE + 1)),
    "in chunks": chunks(*[b"x" * 10_000] * 105),
    "to the end of the connection": OK + b"\r\n" + b"x" * (LARGE + 1),
    "a bomb": zipped("gzip", BOMB),
    "a bomb in many members": zipped("gzip", gzip.compress(b"\0" * 300_000) * 4),
    "a deflated bomb": zipped("deflate", zlib.compress(b"\0" * 20_000_000)),
}


@pytest.fixture
def _bounded() -> Any:
    use_client_settings(SETTINGS)
    yield
    use_client_settings(None)


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", TOO_LARGE)
def test_an_answer_that_is_too_large_is_given_up_naming_the_setting(run: Run, kind: str, whole: bool) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(TOO_LARGE[kind])

    async def call() -> int:
        async with peer_on(behave) as peer:
            with pytest.raises(ResponseTooLargeError, match=f"max_response_bytes={LARGE}"):
                await called(peer.port, whole)
            return len(peer.lines)

    assert run(call()) == 1


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "data", [plain(b"x" * LARGE), zipped("gzip", gzip.compress(b"x" * LARGE)), chunks(b"x" * LARGE)]
)
def test_an_answer_of_just_the_allowed_size_arrives(run: Run, data: bytes, whole: bool) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(data)

    async def call() -> int:
        async with peer_on(behave) as peer:
            answer = await request("GET", f"http://127.0.0.1:{peer.port}", _internal=whole)
            return len(await answer.read())

    assert run(call()) == LARGE


@pytest.mark.usefixtures("_bounded")
def test_an_error_that_is_too_large_keeps_its_status(run: Run) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(plain(b"x" * (LARGE + 1), "404 Not Found"))

    async def call() -> None:
        async with peer_on(behave) as peer:
            await raise_for_status(await request("GET", f"http://127.0.0.1:{peer.port}"))

    with pytest.raises(ServerResponseError) as caught:
        run(call())
    assert caught.value.status == 404


@pytest.mark.parametrize("flood", [b"X-A: a\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"a"])
def test_a_head_that_never_ends_is_given_up(run: Run, flood: bytes) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        if not flood.startswith(b"HTTP"):
            await line.say(OK)
        for _ in range(100):
            await line.say(flood * 1000)
        await line.request()

    async def call() -> None:
        async with peer_on(behave) as peer, pool_of() as pool, asyncio.timeout(20):
            with pytest.raises(aiohttp.ClientConnectionError, match=r"more than (65536 bytes|128 headers)"):
                await ask(pool, peer.port)

    run(call())


def test_trailers_that_never_end_are_given_up(run: Run) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        for _ in range(100):
            await line.say(b"X-A: a\r\n" * 1000)
        await line.request()

    async def call() -> None:
        async with peer_on(behave) as peer, pool_of(max_response_bytes=100_000) as pool, asyncio.timeout(20):
            with pytest.raises(AnswerTooLargeError):
                await ask(pool, peer.port)

    run(call())
