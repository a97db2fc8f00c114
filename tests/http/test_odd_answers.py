"""Odd answers: each is taken for an answer or an error, within bounds, and leaves the next call alone."""

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from nemo_gym.http.errors import NotHttpAnswerError, NotHttpError, ResponseTooLargeError, ServerResponseError
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from nemo_gym.http.request import get_response_json, raise_for_status, request, try_once
from nemo_gym.http.session import use_client_settings
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from tests.http.odd_answers import LENGTHS, ODD, OK, Odd, chunks, zipped
from tests.http.raw_peers import Behaviour, Line, peer_on, plain

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Client = Callable[[int], Awaitable[Any]]
SECOND = plain(b"second")


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


@pytest.mark.parametrize("kind", sorted(ODD))
def test_the_call_after_an_odd_answer_gets_its_own(run: Run, kind: str) -> None:
    async def both() -> Any:
        async with peer_on(saying(ODD[kind])) as peer:
            url = f"http://127.0.0.1:{peer.port}/"
            await outcome(try_once("GET", url, {}))
            await asyncio.sleep(0.01)  # for what came after the answer
            return (await outcome(try_once("GET", url, {})))[1]

    assert run(both()) in (b"1", b"2")


def test_the_table_covers_every_kind_of_framing() -> None:
    assert len(ODD) == 148
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

    def call(port: int, method: str = "GET", data: bytes = b"") -> Awaitable[Any]:
        return try_once(method, f"http://127.0.0.1:{port}/", {"data": data})

    assert run(calls(call)) == ((413, b"too large") if is_kept else None, b"second", 2)


def test_what_a_server_says_as_soon_as_it_is_called_is_its_answer(run: Run) -> None:
    busy = plain(b"come back later", "503 Service Unavailable", "Connection: close")

    async def behave(line: Line) -> None:
        await line.say(busy)
        await line.request()

    async def call() -> Any:
        async with peer_on(behave) as peer:
            return await outcome(try_once("GET", f"http://127.0.0.1:{peer.port}/", {}))

    assert run(call())[:2] == (503, b"come back later")


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


@pytest.mark.parametrize("is_model", [True, False])
@pytest.mark.parametrize("data", FOREIGN)
def test_what_is_not_http_is_asked_once_and_called_what_it_looks_like(run: Run, data: bytes, is_model: bool) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(data)
        await line.request()

    async def call() -> int:
        async with peer_on(behave) as peer:
            with pytest.raises(NotHttpError, match=FOREIGN[data]):
                await called(peer.port, is_model)
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


@pytest.mark.parametrize("flood", [b"X-A: a\r\n", b"a"])
def test_a_head_that_never_ends_is_given_up(run: Run, flood: bytes) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(OK)
        for _ in range(100):
            await line.say(flood * 1000)
        await line.request()

    async def call() -> None:
        async with peer_on(behave) as peer, asyncio.timeout(20):
            await (await try_once("GET", f"http://127.0.0.1:{peer.port}/", {})).read()

    with pytest.raises(NotHttpAnswerError, match=r"Too many headers|more than 65536 bytes"):
        run(call())


def test_trailers_that_never_end_are_given_up(run: Run) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        for _ in range(100):
            await line.say(b"X-A: a\r\n" * 1000)
        await line.request()

    async def call() -> None:
        async with peer_on(behave) as peer, asyncio.timeout(20):
            await (await try_once("GET", f"http://127.0.0.1:{peer.port}/", {})).read()

    with pytest.raises((aiohttp.ClientPayloadError, NotHttpAnswerError), match="Too many headers"):
        run(call())
