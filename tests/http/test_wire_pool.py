"""Bare connections kept, shared and given up: no call is forgotten, no connection is left over."""

import asyncio
import errno
import random
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from typing import Any

import aiohttp
import pytest

from nemo_gym.http.errors import CannotConnectError, cause_of
from nemo_gym.http.transports import wire
from nemo_gym.http.transports.base import LocalRequest, target_of
from nemo_gym.http.transports.wire import WirePool
from tests.http.wire_peers import (
    PATIENCE_S,
    Line,
    ask,
    body_of,
    numbering,
    peer_on,
    plain,
    pool_of,
    silence,
    until,
)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def test_calls_that_follow_one_another_share_a_connection(run: Run) -> None:
    async def calls() -> Any:
        async with pool_of() as pool, peer_on(numbering) as peer:
            one_by_one = [await body_of(pool, peer.port) for _ in range(3)]
            at_once = await asyncio.gather(*(body_of(pool, peer.port) for _ in range(3)))
            return one_by_one, sorted(at_once)

    assert run(calls()) == ([b"1.1", b"1.2", b"1.3"], [b"1.4", b"2.1", b"3.1"])


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK\r\nConnection: close", "HTTP/1.0 200 OK"])
def test_a_connection_the_server_gives_up_is_not_used_again(run: Run, head: str) -> None:
    async def behave(line: Line) -> None:
        while await line.request():  # it does not close the connection itself
            await line.say(f"{head}\r\nContent-Length: 1\r\n\r\n{line.number}".encode())

    async def calls() -> list[bytes]:
        async with pool_of() as pool, peer_on(behave) as peer:
            return [await body_of(pool, peer.port) for _ in range(3)]

    assert run(calls()) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_connection_that_ends_while_idle_is_replaced(run: Run, how: str) -> None:
    async def behave(line: Line) -> None:
        await line.request()
        await line.say(plain(b"%d" % line.number))
        if how == "reset":
            line.reset()

    async def calls() -> list[bytes]:
        async with pool_of(limit=1) as pool, peer_on(behave) as peer:
            bodies = []
            for _ in range(3):
                bodies.append(await body_of(pool, peer.port))
                await until(lambda: not pool._connections)
            return bodies

    assert run(calls()) == [b"1", b"2", b"3"]


def test_a_connection_known_to_end_is_not_used_any_more(run: Run) -> None:
    async def calls() -> list[bytes]:
        async with pool_of() as pool, peer_on(numbering) as peer:
            first = await body_of(pool, peer.port)
            (connection,) = pool._connections
            assert connection.transport is not None
            connection.transport.close()  # as asyncio does at the end of the other side, a step before it says so
            return [first, await body_of(pool, peer.port)]

    assert run(calls()) == [b"1.1", b"2.1"]


def test_idle_connections_are_closed_after_a_while(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEEPALIVE_TIMEOUT_S", 0.05)

    async def call() -> None:
        async with pool_of() as pool, peer_on(numbering) as peer:
            await asyncio.gather(*(ask(pool, peer.port) for _ in range(3)))
            for line in peer.lines:
                await line.is_over.wait()
            await until(lambda: not pool._connections and not pool._idle)

    run(call())


def test_an_old_connection_is_not_used_even_before_it_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEEPALIVE_TIMEOUT_S", 0.0)

    async def calls() -> list[bytes]:
        async with pool_of() as pool, peer_on(numbering) as peer:
            return [await body_of(pool, peer.port) for _ in range(2)]

    assert run(calls()) == [b"1.1", b"2.1"]


@pytest.mark.parametrize(("limit", "per_host"), [(3, 0), (0, 2), (3, 2), (1, 1)])
def test_calls_beyond_the_limits_wait_their_turn(run: Run, limit: int, per_host: int) -> None:
    async def calls() -> None:
        async with pool_of(limit, per_host) as pool, peer_on(numbering) as one, peer_on(numbering) as other:
            ports = [one.port, other.port] * 20
            await asyncio.gather(*(ask(pool, port) for port in ports))
            assert sum(line.requests for line in one.lines + other.lines) == 40
            if not limit:
                assert [len(one.lines), len(other.lines)] == [per_host, per_host]

    run(calls())


def test_whoever_waits_is_not_overtaken_for_ever(run: Run) -> None:
    async def calls() -> int:
        async with pool_of(per_host=1) as pool, peer_on(numbering) as peer:
            waiting = []
            for number in range(200):
                await ask(pool, peer.port)
                if number == 3:
                    waiting = [asyncio.create_task(ask(pool, peer.port)) for _ in range(3)]
                if waiting and all(task.done() for task in waiting):
                    return number
            return 200

    assert run(calls()) < 20


def test_a_call_waits_on_although_another_that_was_let_in_before_it_is_cancelled(run: Run) -> None:
    async def breaks(line: Line) -> None:
        if line.number == 1:
            await line.request()
            await released.wait()
        else:
            await numbering(line)

    released = asyncio.Event()

    async def calls() -> bytes:
        async with pool_of(limit=1, per_host=1) as pool, peer_on(breaks) as one, peer_on(numbering) as other:
            first = asyncio.create_task(ask(pool, one.port))
            await until(lambda: bool(one.lines and one.lines[0].requests))
            cancelled, waiting = (asyncio.create_task(body_of(pool, one.port)) for _ in range(2))
            await asyncio.sleep(0)
            released.set()
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await first
            elsewhere = asyncio.create_task(ask(pool, other.port))
            await asyncio.sleep(0)
            cancelled.cancel()
            await elsewhere
            return await waiting

    assert run(calls()).endswith(b".1")


@pytest.mark.parametrize("steps", range(8))
def test_a_call_cancelled_at_any_step_of_opening_counts_for_nothing(run: Run, steps: int) -> None:
    async def calls() -> int:
        async with pool_of(per_host=1) as pool, peer_on(numbering) as peer:
            for _ in range(3):
                call = asyncio.create_task(ask(pool, peer.port))
                for _ in range(steps):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
                assert all(count == 1 for count in pool._open.values())
            return (await ask(pool, peer.port)).status

    assert run(calls()) == 200


def test_waiting_is_part_of_the_time_a_call_may_take(run: Run) -> None:
    async def calls() -> None:
        async with pool_of(per_host=1) as pool, peer_on(silence) as peer:
            first = asyncio.create_task(ask(pool, peer.port))
            await until(lambda: bool(peer.lines and peer.lines[0].requests))
            second = asyncio.create_task(ask(pool, peer.port, timeout_s=0.3))
            asyncio.get_running_loop().call_later(0.25, first.cancel)
            await asyncio.sleep(0.5)
            await asyncio.sleep(0)
            assert second.done()
            with pytest.raises(TimeoutError):
                await second
            await asyncio.wait([first])

    run(calls())


def test_a_call_that_never_gets_its_turn_times_out(run: Run) -> None:
    async def calls() -> None:
        async with pool_of(limit=1) as pool, peer_on(silence) as peer:
            first = asyncio.create_task(ask(pool, peer.port))
            await until(lambda: bool(peer.lines))
            with pytest.raises(TimeoutError) as caught:
                await ask(pool, peer.port, timeout_s=0.05)
            assert type(caught.value) is TimeoutError
            first.cancel()
            await asyncio.wait([first])

    run(calls())


def test_a_connection_that_cannot_be_opened_in_time_was_never_used(run: Run) -> None:
    async def call(port: int) -> None:
        async with pool_of(per_host=1, connect_timeout_s=0.1) as pool:
            for _ in range(2):
                with pytest.raises(aiohttp.ConnectionTimeoutError, match=f"127.0.0.1:{port}"):
                    await ask(pool, port)
            assert not pool._connections

    with ExitStack() as stack:
        deaf = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=0)))
        for _ in range(3):  # fill its queue, so that it answers nobody else
            filler = stack.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        run(call(deaf.getsockname()[1]))


def test_a_refused_connection_says_so_and_all_who_waited_are_told(run: Run, free_port: int) -> None:
    async def calls() -> list[Any]:
        async with pool_of(per_host=1) as pool:
            return await asyncio.gather(*(ask(pool, free_port) for _ in range(5)), return_exceptions=True)

    errors = run(calls())
    assert [type(error) for error in errors] == [CannotConnectError] * 5
    assert {error.errno for error in errors} == {errno.ECONNREFUSED}
    assert f"127.0.0.1:{free_port}" in str(errors[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_localhost_is_found_at_either_address(run: Run, host: str) -> None:
    async def call(url_host: str, port: int) -> int:
        async with pool_of() as pool, peer_on(numbering, host, port):
            return await status_at(pool, url_host, port)

    try:
        with closing(
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        ) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip(f"this machine has no {host}")
    literal = f"[{host}]" if ":" in host else host

    assert [run(call(name, port)) for name in ("localhost", literal)] == [200, 200]


def test_localhost_where_nobody_listens_refuses_also_without_its_second_address(run: Run, free_port: int) -> None:
    def only_of_old(address: Any) -> socket.socket:
        if address[0] == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return socket.socket(*address[:3])

    async def call() -> None:
        async with pool_of() as pool:
            pool._opener._new_socket = only_of_old
            await status_at(pool, "localhost", free_port)

    with pytest.raises(CannotConnectError) as caught:
        run(call())
    assert cause_of(caught.value) == "connection refused"


async def status_at(pool: WirePool, host: str, port: int) -> int:
    target = target_of(f"http://{host}:{port}/")
    assert target is not None
    request = LocalRequest("GET", "http://x/", "/", b"/", b"", [(b"host", b"x")], b"", None, address=target.address)
    return (await pool.exchange(request, PATIENCE_S)).status


def test_closing_the_pool_ends_every_call(run: Run) -> None:
    async def calls() -> list[Any]:
        async with pool_of(per_host=2) as pool, peer_on(silence) as peer:
            calls = [asyncio.create_task(ask(pool, peer.port)) for _ in range(4)]
            await until(lambda: len(peer.lines) == 2 and all(line.requests for line in peer.lines))
            pool.close()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            for line in peer.lines:
                await line.is_over.wait()
            return [*ended, *await asyncio.gather(ask(pool, peer.port), return_exceptions=True)]

    lost, refused = aiohttp.ServerDisconnectedError, CannotConnectError
    assert [type(error) for error in run(calls())] == [lost, lost, refused, refused, refused]


async def erratic(line: Line) -> None:
    """Do what the path says."""
    while request := await line.request():
        path = request.split(b" ")[1]
        good = plain(path)
        if path == b"/slow":
            await asyncio.sleep(0.005)
        if path == b"/reset":
            line.reset()
        elif path != b"/lost":
            await line.say({b"/noise": b"noise", b"/cut": good[:-1], b"/more": good + good}.get(path, good))
        if path in (b"/lost", b"/cut", b"/leave"):
            break


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_some_calls_all_of_them_end(run: Run, seed: int, free_port: int) -> None:
    chance = random.Random(seed)
    paths = ["/ok", "/slow", "/lost", "/reset", "/noise", "/cut", "/more", "/leave"]
    expected = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, asyncio.CancelledError)

    async def one(pool: WirePool, ports: list[int]) -> bool:
        await asyncio.sleep(chance.random() * 0.05)
        path, port = chance.choice(paths), chance.choice(ports)
        call = asyncio.create_task(body_of(pool, port, path, timeout_s=chance.choice([0.01, PATIENCE_S, PATIENCE_S])))
        if chance.random() < 0.3:
            asyncio.get_running_loop().call_later(chance.random() * 0.02, call.cancel)
        try:
            body = await call
        except expected:
            return False
        finally:
            assert all(0 < count <= 2 for count in pool._open.values())
            assert sum(each.is_open or each.transport is None for each in pool._connections) <= 4
        assert body == path.encode()
        return True

    async def calls() -> None:
        async with pool_of(4, 2) as pool, peer_on(erratic) as a, peer_on(erratic) as b, peer_on(erratic) as c:
            ports = [a.port, b.port, c.port, free_port]
            went_well = await asyncio.gather(*(one(pool, ports) for _ in range(300)))
            assert 30 < sum(went_well) < 270
            after = await asyncio.gather(*(body_of(pool, port, "/ok") for port in ports[:3] * 3))
            assert after == [b"/ok"] * 9

    run(calls())
