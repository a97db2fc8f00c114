"""Endpoints with a name, and behind TLS: found, checked and kept as aiohttp would, over bare connections."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from nemo_gym.http.errors import CannotConnectError, ServerUnreachableError
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from nemo_gym.http.request import request, try_once
from nemo_gym.http.transports import wire
from nemo_gym.http.transports.response import LocalResponse
from nemo_gym.http.transports.session import get_global_aiohttp_client
from tests.http.certificates import Authority
from tests.http.wire_peers import (
    PATIENCE_S,
    Line,
    WirePeer,
    body_of,
    numbering,
    peer_on,
    plain,
    pool_of,
    silence,
    until,
)

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Configure = Callable[..., Any]

AT_ONCE, EACH = 8, 20
NAME = "endpoint.test"


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Authority]:
    """An authority that this process believes, as users have it believe theirs."""
    made = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.file))
    wire._tls.cache_clear()
    yield made
    wire._tls.cache_clear()


class Listed(AbstractResolver):
    """Says that every name has these addresses, in turn each of the answers, the last one for ever."""

    def __init__(self, *answers: list[str] | OSError) -> None:
        self._answers = list(answers)
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked += 1
        await self.may_answer.wait()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        rest = {"hostname": host, "port": port, "family": family, "proto": 0, "flags": 0}
        return [ResolveResult(host=address, **rest) for address in answer]  # type: ignore[typeddict-item]

    async def close(self) -> None:
        pass


def test_calls_over_tls_share_as_many_connections_as_there_are_at_once(run: Run, authority: Authority) -> None:
    async def behave(line: Line) -> None:
        while await line.request():
            await line.say(plain(b'{"id":"ok"}'))

    async def rollouts() -> tuple[int, int]:
        async with peer_on(behave, tls=authority.server("localhost")) as peer:
            client = NeMoGymAsyncOpenAI(base_url=f"https://localhost:{peer.port}/v1", api_key="none")

            async def rollout() -> None:
                for _ in range(EACH):
                    assert await client.create_response(input="hi") == {"id": "ok"}

            for _ in range(2):
                await asyncio.gather(*(rollout() for _ in range(AT_ONCE)))
            return len(peer.lines), sum(line.requests for line in peer.lines)

    connections, requests = run(rollouts())
    assert requests == 2 * AT_ONCE * EACH
    assert 1 <= connections <= AT_ONCE


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_is_told_the_same_as_by_aiohttp(run: Run, authority: Authority, scheme: str) -> None:
    async def echo(line: Line) -> None:
        while said := await line.request():
            await line.say(plain(said))

    def told(raw: bytes) -> set[bytes]:
        return {line.lower() for line in raw.split(b"\r\n")}

    async def both() -> list[set[bytes]]:
        host = socket.gethostname() if scheme == "http" else "localhost"
        tls = authority.server(host) if scheme == "https" else None
        async with peer_on(echo, "0.0.0.0", tls=tls) as peer:
            url, kwargs = f"{scheme}://{host}:{peer.port}/a?b=c", {"data": b"{}", "cookies": {"d": "e"}}
            ours = await try_once("POST", url, kwargs, whole=True)
            theirs = await get_global_aiohttp_client().post(url, ssl=wire._tls(), **kwargs)  # type: ignore[arg-type]
            assert isinstance(ours, LocalResponse)
            return [told(await each.read()) for each in (ours, theirs)]

    ours, theirs = run(both())
    assert ours == theirs
    assert any(line.startswith(b"user-agent: python/") for line in ours)


def untrusted(authority: Authority, tmp_path: Path) -> dict[str, ssl.SSLContext]:
    other = tmp_path / "other"
    other.mkdir()
    return {
        "unable to get local issuer certificate": Authority(other).server("localhost"),
        "self-signed certificate": authority.server("localhost", is_self_signed=True),
        "certificate has expired": authority.server("localhost", is_expired=True),
        "Hostname mismatch": authority.server("elsewhere.test"),
    }


def test_a_certificate_that_proves_nothing_is_refused_at_once_in_the_words_of_aiohttp(
    run: Run, configure: Configure, authority: Authority, tmp_path: Path
) -> None:
    configure()

    async def calls(tls: ssl.SSLContext) -> tuple[Any, ...]:
        async with peer_on(silence, tls=tls) as peer:
            url = f"https://localhost:{peer.port}/"
            with pytest.raises(aiohttp.ClientConnectorCertificateError) as theirs:
                await get_global_aiohttp_client().get(url, ssl=wire._tls())
            with pytest.raises(aiohttp.ClientConnectorCertificateError) as ours:
                await try_once("GET", url, {}, whole=True)
            with pytest.raises(ServerUnreachableError) as told:
                await request("GET", url, _internal=True)
            with pytest.raises(ServerUnreachableError) as told_of_model:
                await NeMoGymAsyncOpenAI(base_url=url, api_key="none").create_response(input="hi")
            assert all(not line.requests for line in peer.lines)
            return str(ours.value), str(theirs.value), told.value, told_of_model.value

    for words, tls in untrusted(authority, tmp_path).items():
        ours, theirs, *told = run(calls(tls))
        assert words in ours
        assert ours == theirs
        assert [each.attempts for each in told] == [1, 1]
        assert all(words in str(each) for each in told)


def test_a_port_without_tls_is_called_that_and_not_tried_again(
    run: Run, configure: Configure, authority: Authority
) -> None:
    configure()

    async def refuse(line: Line) -> None:
        await line.say(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await line.reader.read()

    async def call() -> None:
        async with peer_on(refuse) as peer:
            await request("GET", f"https://localhost:{peer.port}/", _internal=True)

    with pytest.raises(ServerUnreachableError, match=r"port without TLS: use http://") as caught:
        run(call())
    assert caught.value.attempts == 1
    assert isinstance(caught.value.__cause__, aiohttp.ClientConnectorSSLError)


def test_a_handshake_that_hangs_comes_to_an_end(run: Run, authority: Authority) -> None:
    async def hang(line: Line) -> None:
        await line.reader.read()
        line.is_over.set()

    async def calls() -> None:
        async with pool_of(per_host=1, connect_timeout_s=0.1) as pool, peer_on(hang) as peer:
            for number in range(2):
                with pytest.raises(aiohttp.ConnectionTimeoutError, match=f"localhost:{peer.port}"):
                    await body_of(pool, peer.port, scheme="https", host="localhost")
                await until(lambda number=number: len(peer.lines) == number + 1)  # type: ignore[misc]
                await peer.lines[number].is_over.wait()
            assert not pool._connections

    run(calls())


@pytest.mark.parametrize("steps", [1, 3, 6, 10, 15, 25])
def test_a_call_cancelled_during_a_handshake_leaves_nothing(run: Run, authority: Authority, steps: int) -> None:
    async def calls() -> bytes:
        tls = authority.server("localhost")
        async with pool_of(per_host=1) as pool, peer_on(numbering, tls=tls) as peer:
            for _ in range(3):
                call = asyncio.create_task(body_of(pool, peer.port, scheme="https", host="localhost"))
                for _ in range(steps):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
            return await body_of(pool, peer.port, scheme="https", host="localhost")

    assert run(calls()).count(b".") == 1


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_tls_connection_that_ends_while_idle_is_replaced(run: Run, authority: Authority, how: str) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(plain(b"%d" % line.number))
        if how == "reset":
            line.reset()

    async def calls() -> list[bytes]:
        tls = authority.server("localhost")
        async with pool_of(limit=1) as pool, peer_on(behave, tls=tls) as peer:
            bodies = []
            for _ in range(3):
                bodies.append(await body_of(pool, peer.port, scheme="https", host="localhost"))
                await until(lambda: not any(each.is_open for each in pool._connections))
            return bodies

    assert run(calls()) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("size", [0, 70_000, 5_000_000])
def test_bodies_of_any_size_go_there_and_back_over_tls(run: Run, authority: Authority, size: int) -> None:
    data = bytes(range(250)) * (size // 250)

    async def echo(line: Line) -> None:
        while said := await line.request():
            await line.say(plain(said.partition(b"\r\n\r\n")[2]))

    async def calls() -> list[bool]:
        async with pool_of() as pool, peer_on(echo, tls=authority.server("localhost")) as peer:
            options: dict[str, Any] = {"method": "POST", "data": data, "scheme": "https", "host": "localhost"}
            bodies = [await body_of(pool, peer.port, **options) for _ in range(2)]
            assert len(peer.lines) == 1
            return [body == data for body in bodies]

    assert run(calls()) == [True, True]


def test_an_answer_before_the_end_of_its_request_is_the_last_on_its_connection(run: Run, authority: Authority) -> None:
    async def too_large(line: Line) -> None:
        await line.reader.readuntil(b"\r\n\r\n")
        await line.say(plain(b"%d" % line.number, "413 Content Too Large"))
        await line.is_over.wait()

    async def calls() -> list[bytes]:
        async with pool_of() as pool, peer_on(too_large, tls=authority.server("localhost")) as peer:
            options: dict[str, Any] = {"method": "POST", "scheme": "https", "host": "localhost"}
            return [await body_of(pool, peer.port, data=b"x" * 30_000_000, **options) for _ in range(2)]

    assert run(calls()) == [b"1", b"2"]


def test_an_answer_may_end_with_its_connection(run: Run, authority: Authority) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(b"HTTP/1.1 200 OK\r\n\r\nhello")

    async def call() -> bytes:
        async with pool_of() as pool, peer_on(behave, tls=authority.server("localhost")) as peer:
            return await body_of(pool, peer.port, scheme="https", host="localhost")

    assert run(call()) == b"hello"


def test_of_several_addresses_one_that_answers_is_enough(run: Run) -> None:
    async def calls(deaf: socket.socket) -> list[bytes]:
        port = deaf.getsockname()[1]  # where 127.0.0.2 answers nobody, and 127.0.0.3 refuses
        names = Listed(["127.0.0.3", "127.0.0.2", "127.0.0.1"])
        async with pool_of(resolver=names) as pool, peer_on(numbering, "127.0.0.1", port):
            return [await body_of(pool, port, host=NAME) for _ in range(2)]

    with ExitStack() as stack:
        deaf = stack.enter_context(closing(socket.create_server(("127.0.0.2", 0), backlog=0)))
        for _ in range(3):  # fill its queue
            filler = stack.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        assert run(calls(deaf)) == [b"1.1", b"1.2"]


def test_of_several_addresses_one_that_speaks_tls_is_enough(run: Run, authority: Authority) -> None:
    async def calls() -> bytes:
        names = Listed(["127.0.0.1", "127.0.0.2"])
        async with pool_of(resolver=names) as pool, peer_on(numbering, tls=authority.server(NAME)) as good:
            wrong = authority.server("elsewhere.test")
            async with peer_on(numbering, "127.0.0.2", good.port, tls=wrong) as bad:
                calls = (body_of(pool, good.port, scheme="https", host=NAME) for _ in range(2))
                bodies = await asyncio.gather(*calls)
                assert not any(line.requests for line in bad.lines)  # although the second call has tried it first
                return b" ".join(sorted(bodies))

    assert run(calls()) == b"1.1 2.1"


@asynccontextmanager
async def peers_at_two_addresses() -> AsyncIterator[tuple[WirePeer, WirePeer]]:
    """Servers at 127.0.0.1 and 127.0.0.2, on the same port."""
    async with peer_on(numbering) as one, peer_on(numbering, "127.0.0.2", one.port) as other:
        yield one, other


def test_connections_spread_over_the_addresses_of_a_name_which_is_asked_for_once(run: Run) -> None:
    async def calls() -> tuple[list[int], int]:
        names = Listed(["127.0.0.1", "127.0.0.2"])
        async with pool_of(resolver=names) as pool, peers_at_two_addresses() as (one, other):
            names.may_answer.clear()
            under_way = [asyncio.create_task(body_of(pool, one.port, host=NAME)) for _ in range(6)]
            await until(lambda: bool(names.asked))
            under_way[0].cancel()  # who asked first; the others wait on
            await asyncio.wait(under_way[:1])
            names.may_answer.set()
            await asyncio.gather(*under_way[1:])
            return sorted(len(peer.lines) for peer in (one, other)), names.asked

    assert run(calls()) == ([2, 3], 1)


def test_a_name_is_asked_for_again_after_a_while(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_NAMES_KNOWN_FOR_S", 0.0)
    monkeypatch.setattr(wire, "KEEPALIVE_TIMEOUT_S", 0.0)

    async def calls() -> tuple[list[int], int]:
        names = Listed(["127.0.0.1"], ["127.0.0.2"])
        async with pool_of(resolver=names) as pool, peers_at_two_addresses() as (one, other):
            for _ in range(2):
                await body_of(pool, one.port, host=NAME)
                await asyncio.sleep(0.01)
            return [len(peer.lines) for peer in (one, other)], names.asked

    assert run(calls()) == ([1, 1], 2)


def test_a_name_that_is_unknown_may_be_known_the_next_time(run: Run) -> None:
    async def calls() -> bytes:
        names = Listed(socket.gaierror(socket.EAI_NONAME, "Name or service not known"), [], ["127.0.0.1"])
        async with pool_of(resolver=names) as pool, peer_on(numbering) as peer:
            for _ in range(2):
                with pytest.raises(aiohttp.ClientConnectorDNSError, match=f"{NAME}:{peer.port} ssl:default"):
                    await body_of(pool, peer.port, host=NAME)
            return await body_of(pool, peer.port, host=NAME)

    assert run(calls()) == b"1.1"


def test_whoever_is_asked_for_a_name_has_to_answer_in_time(run: Run) -> None:
    async def calls() -> None:
        names = Listed(["127.0.0.1"])
        async with pool_of(connect_timeout_s=0.05, resolver=names) as pool:
            names.may_answer.clear()
            with pytest.raises(aiohttp.ConnectionTimeoutError, match=f"{NAME}:1"):
                await body_of(pool, 1, host=NAME, timeout_s=PATIENCE_S)
            await pool.aclose()

    run(calls())


def test_an_unknown_name_is_asked_for_again_as_nothing_was_sent(run: Run, configure: Configure) -> None:
    configure(http_retry_max_tries=3)

    with pytest.raises(ServerUnreachableError, match="unknown host name") as caught:
        run(request("POST", "http://no-such-host.invalid:80/run", _internal=True, json={}))
    assert caught.value.attempts == 3
    assert isinstance(caught.value.__cause__, aiohttp.ClientConnectorDNSError)


def test_all_addresses_of_a_name_that_refuse_are_named(run: Run, free_port: int) -> None:
    async def call() -> None:
        async with pool_of(resolver=Listed(["127.0.0.1", "127.0.0.2"])) as pool:
            await body_of(pool, free_port, host=NAME)

    with pytest.raises(CannotConnectError, match=rf"{NAME}:{free_port}.*refused"):
        run(call())
