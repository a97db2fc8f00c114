"""What comes back over a bare connection, well-formed or not, whole or in pieces."""

import asyncio
import errno
import gzip
import random
import zlib
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import ANY

import aiohttp
import pytest

from nemo_gym.http.errors import CannotConnectError, NotHttpAnswerError
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.http.transports import wire
from nemo_gym.http.transports.base import target_of
from tests.http.wire_peers import Line, ask, body_of, numbering, once, peer_on, plain, pool_of, silence, until

Run = Callable[[Coroutine[Any, Any, Any]], Any]

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
GZIP = "Content-Encoding: gzip "
TEXT = b"much of the same " * 50
RAW_DEFLATE = zlib.compressobj(wbits=-zlib.MAX_WBITS)
RAW = RAW_DEFLATE.compress(TEXT) + RAW_DEFLATE.flush()

COMPLETE = {
    "of known length": (plain(b"hello"), 200, b"hello"),
    "of no length": (plain(b"", "500 Internal Server Error"), 500, b""),
    "in chunks": (CHUNKED + b"3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nX-Trailer: 1\r\n\r\n", 200, b"hello"),
    "that has no body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", 304, b""),
    "that ends with its connection": (b"HTTP/1.1 200 OK\r\n\r\nhello", 200, b"hello"),
    "of another age": (b"HTTP/1.0 404 Not Found\r\n\r\nhello", 404, b"hello"),
    "after interim ones": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + plain(b"hello"),
        200,
        b"hello",
    ),
    "compressed": (plain(gzip.compress(TEXT), "200 OK", GZIP), 200, TEXT),
    "compressed in two members": (
        plain(gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:]), "200 OK", GZIP),
        200,
        TEXT,
    ),
    "deflated": (plain(zlib.compress(TEXT), "200 OK", "content-encoding: Deflate"), 200, TEXT),
    "deflated without a header": (plain(RAW, "200 OK", "Content-Encoding: deflate"), 200, TEXT),
    "compressed and empty": (plain(b"", "200 OK", GZIP), 200, b""),
}


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("kind", COMPLETE)
def test_an_answer_is_understood_however_it_is_framed_and_cut(run: Run, kind: str, size: int) -> None:
    data, status, body = COMPLETE[kind]

    async def call() -> Any:
        async with pool_of() as pool, peer_on(once(data, size)) as peer:
            answer = await ask(pool, peer.port)
            return answer.status, await answer.read(), "link" in answer.headers

    assert run(call()) == (status, body, False)


HEADS = [
    b"X-A:1\r\nContent-Length: 5",
    b"x-a: \t 1 2 \t\r\ncontent-length:5 \r\nConnection: Keep-Alive\r\nx-a: \xff\r\nx-b:",
    b"Content-Length: 5\r\nContent-Length: 5",
    b"Content-Length: 05",
    b"Content-Length: 5\r\nX-A: folded\r\n over two lines",
    b"Content-Length: 5\r\nConnection: close",
    b"Content-Length: 5\nX-A: 1",
    b"X-%d: 1\r\n" % 7 * 127 + b"Content-Length: 5",
    b"X-%d: 1\r\n" % 7 * 128 + b"Content-Length: 5",
    b"Content-Length: 5\r\nX A: 1",
    b"Content-Length: 5\r\nX-A: \0",
    b"Content-Length: +5",
    b"Content-Length: " + b"5" * 5000,
]


@pytest.mark.parametrize("head", HEADS)
def test_an_answer_in_one_piece_is_read_as_one_in_many(run: Run, head: bytes) -> None:
    async def call(size: int) -> Any:
        async with pool_of() as pool, peer_on(once(b"HTTP/1.1 201 Made\r\n" + head + b"\r\n\r\nhello", size)) as peer:
            try:
                answer = await ask(pool, peer.port)
                return answer.status, answer.raw_headers, await answer.read()
            except (aiohttp.ClientError, NotHttpAnswerError) as error:
                return type(error)

    assert run(call(0)) == run(call(3))


BROKEN = {
    "of known length": plain(b"hello")[:-1],
    "in chunks": CHUNKED + b"5\r\nhello\r\n",
    "within a chunk": CHUNKED + b"5\r\nhel",
    "with a chunk that is none": CHUNKED + b"xyz\r\n",
    "compressed": plain(gzip.compress(TEXT)[:-9], "200 OK", GZIP),
    "compressed, it is said": plain(b"plain text", "200 OK", GZIP),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_answer_that_ends_too_early_has_a_status_and_no_body(run: Run, kind: str) -> None:
    async def call() -> int:
        async with pool_of() as pool, peer_on(once(BROKEN[kind])) as peer:
            answer = await ask(pool, peer.port)
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
            return answer.status

    assert run(call()) == 200


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_connection_that_ends_before_the_answer_is_a_disconnect(run: Run, data: bytes) -> None:
    async def call() -> None:
        async with pool_of() as pool, peer_on(once(data)) as peer:
            await ask(pool, peer.port)

    with pytest.raises(aiohttp.ServerDisconnectedError):
        run(call())


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_what_is_not_http_is_called_that(run: Run, data: bytes) -> None:
    async def call() -> None:
        async def behave(line: Line) -> None:
            await line.request()
            await line.say(data)
            assert await line.request() == b""

        async with pool_of() as pool, peer_on(behave) as peer:
            with pytest.raises(NotHttpAnswerError, match="not HTTP"):
                await ask(pool, peer.port)
            await peer.lines[0].is_over.wait()

    run(call())


def test_a_reset_keeps_its_errno(run: Run) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        line.reset()

    async def call() -> None:
        async with pool_of() as pool, peer_on(behave) as peer:
            await ask(pool, peer.port)

    with pytest.raises(aiohttp.ClientOSError) as caught:
        run(call())
    assert caught.value.errno == errno.ECONNRESET
    assert not isinstance(caught.value, CannotConnectError)


def test_a_reset_within_an_answer_that_ends_with_its_connection_is_no_end(run: Run) -> None:
    read = asyncio.Event()

    async def behave(line: Line) -> None:
        await line.request()
        await line.say(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await read.wait()
        line.reset()

    async def call() -> None:
        async with pool_of() as pool, peer_on(behave) as peer:
            under_way = asyncio.create_task(ask(pool, peer.port))
            await until(lambda: any(each._chunks for each in pool._connections))
            read.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await (await under_way).read()

    run(call())


UNASKED = [plain(b"evil"), b"HTTP/1.1 200 OK\r\nX-Half: ", b"H", b"garbage", b"\r\n" + plain(b"evil")]


@pytest.mark.parametrize("extra", UNASKED)
@pytest.mark.parametrize("moment", ["at once", "right after", "later"])
def test_what_nobody_asked_for_is_never_taken_for_an_answer(run: Run, extra: bytes, moment: str) -> None:
    answered = asyncio.Event()

    async def behave(line: Line) -> None:
        while await line.request():
            good = plain(b"%d" % line.number, "200 OK", f"X-Number: {line.number}")
            if line.number > 1:
                await line.say(good)
            elif moment == "at once":
                await line.say(good + extra)
            else:
                await line.say(good)
                if moment == "later":
                    await answered.wait()
                await line.say(extra)

    async def calls() -> Any:
        async with pool_of() as pool, peer_on(behave) as peer:
            first = await ask(pool, peer.port)
            answered.set()
            await peer.lines[0].is_over.wait()
            second = await ask(pool, peer.port)
            return [(await each.read(), each.headers.getall("x-number")) for each in (first, second)]

    assert run(calls()) == [(b"1", ["1"]), (b"2", ["2"])]


@pytest.mark.parametrize("size", [0, 1024, 64 * 1024, 64 * 1024 + 1, 5_000_000])
def test_bodies_of_any_size_go_there_and_back(run: Run, size: int) -> None:
    data = random.Random(size).randbytes(size)

    async def echo(line: Line) -> None:
        while request := await line.request():
            await line.say(plain(request.partition(b"\r\n\r\n")[2]))

    async def calls() -> list[bool]:
        async with pool_of() as pool, peer_on(echo) as peer:
            bodies = [await body_of(pool, peer.port, method="POST", data=data) for _ in range(2)]
            assert len(peer.lines) == 1
            return [body == data for body in bodies]

    assert run(calls()) == [True, True]


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"X-A": "1\r\nX-B: 2"}},
        {"headers": {"X-A": "1\nX-B: 2"}},
        {"headers": {"X-A": "1\rX-B: 2"}},
        {"headers": {"X-A\r\nX-B": "2"}},
        {"headers": {"X-A": "\0"}},
        {"headers": {"X-A": "\ud800"}},
        {"method": "GET /x HTTP/1.1\r\nX-B: 2\r\n\r\nGET"},
        {"method": "GET /x"},
    ],
)
def test_nothing_can_be_smuggled_into_the_head(run: Run, options: dict[str, Any]) -> None:
    async def call() -> int:
        async with pool_of() as pool, peer_on(numbering) as peer:
            with pytest.raises(ValueError, match=r"line break|surrogates"):
                await ask(pool, peer.port, **options)
            return len(peer.lines)

    assert run(call()) == 0


def test_a_length_that_is_not_that_of_the_body_does_not_go_out(run: Run) -> None:
    async def behave(line: Line) -> None:
        while request := await line.request():
            await line.say(plain(request))

    async def call() -> bytes:
        async with pool_of() as pool, peer_on(behave) as peer:
            headers = {"Content-Length": "2", "Transfer-Encoding": "chunked"}
            return await body_of(pool, peer.port, method="POST", data=b"12345", headers=headers)

    request = run(call())
    assert request.endswith(b"\r\n\r\n12345")
    assert request.count(b"content-length: 5\r\n") == 1
    assert b"transfer-encoding" not in request


def test_an_answer_that_takes_too_long_is_a_timeout_and_the_connection_is_not_used_again(run: Run) -> None:
    async def behave(line: Line) -> None:
        if line.number == 1:
            await line.request()
            await line.say(plain(b"never whole")[:-3])
            await line.request()
        await numbering(line)

    async def calls() -> bytes:
        async with pool_of(per_host=1) as pool, peer_on(behave) as peer:
            with pytest.raises(TimeoutError) as caught:
                await ask(pool, peer.port, timeout_s=0.1)
            assert not isinstance(caught.value, aiohttp.ClientError)
            await peer.lines[0].is_over.wait()
            return await body_of(pool, peer.port)

    assert run(calls()) == b"2.1"


def test_a_cancelled_call_ends_its_connection_and_makes_room(run: Run) -> None:
    async def behave(line: Line) -> None:
        await (silence if line.number == 1 else numbering)(line)

    async def calls() -> bytes:
        async with pool_of(limit=1, per_host=1) as pool, peer_on(behave) as peer:
            call = asyncio.create_task(ask(pool, peer.port))
            await until(lambda: bool(peer.lines and peer.lines[0].requests))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await peer.lines[0].is_over.wait()
            return await body_of(pool, peer.port)

    assert run(calls()) == b"2.1"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.1:80/x",
        "http://2130706433/x",
        "http://example.org./x",
        "https://user@example.org/x",
        "http://user:password@127.0.0.1/x",
        "http://user@127.0.0.1/x",
        "ftp://127.0.0.1/x",
        "http+unix://127.0.0.1/x",
        "http://127.0.0.1:port/x",
        "127.0.0.1:80",
        "/x",
        "",
    ],
)
def test_what_takes_more_than_a_connection_has_no_target(url: str) -> None:
    assert target_of(url) is None


def test_a_target_names_address_origin_and_path() -> None:
    assert target_of("http://127.0.0.1/a?b#c") == (("127.0.0.1", 80), "http://127.0.0.1", "/a?b")
    assert target_of("HTTP://LocalHost:81?b=/c") == (("localhost", 81), "http://localhost:81", "/?b=/c")
    assert target_of("http://[::1]:82/%7Ea b") == (("::1", 82), "http://[::1]:82", "/~a%20b")
    assert target_of("http://Example.org/a") == (("example.org", 80), "http://example.org", "/a")
    assert target_of("http://bücher_1.example:443") == (("xn--bcher_1-n2a.example", 443), ANY, "/")
    assert target_of("https://example.org") == (("example.org", 443, "https"), "https://example.org", "/")


def test_without_a_parser_there_are_no_bare_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "httptools", None)

    assert wire.open_transport(GlobalAIOHTTPAsyncClientConfig()) is None
