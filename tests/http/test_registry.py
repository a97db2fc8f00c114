"""The registry of transports: the first that can carries a request, and any but the last can be taken out."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from nemo_gym.http.addresses import Address, base_url
from nemo_gym.http.request import try_once
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.http.transports import base
from nemo_gym.http.transports.base import JSON_HEADERS, Transport, local_request, open_transports
from nemo_gym.http.transports.memory import find_local_app, register_local_app
from nemo_gym.http.transports.response import LocalResponse
from nemo_gym.paths import PARENT_DIR
from tests.http.test_wire_calls import CALLS, echo, told
from tests.http.wire_peers import numbering, peer_on

REQUEST_TESTS = ["test_request.py", "test_server_client.py", "test_openai_client.py", "test_session.py"]


def names_of_transports() -> list[str]:
    async def opened() -> list[str]:
        transports = open_transports(GlobalAIOHTTPAsyncClientConfig())
        for transport in transports:
            await transport.aclose()
        return [type(transport).__name__ for transport in transports]

    return asyncio.run(opened())


def test_transports_are_opened_in_the_order_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of_transports() == ["WirePool", "SessionTransport"]
    monkeypatch.setattr(base, "TRANSPORTS", base.TRANSPORTS[::-1])
    assert names_of_transports() == ["SessionTransport", "WirePool"]


@pytest.mark.parametrize(
    ("transports", "answer_type"), [(base.TRANSPORTS, LocalResponse), (base.TRANSPORTS[1:], aiohttp.ClientResponse)]
)
def test_a_whole_request_to_an_address_goes_the_first_way(
    monkeypatch: pytest.MonkeyPatch, transports: list[str], answer_type: type
) -> None:
    monkeypatch.setattr(base, "TRANSPORTS", transports)

    async def call() -> tuple[object, bytes]:
        async with peer_on(numbering) as peer:
            kwargs = {"data": b"{}", "headers": JSON_HEADERS, "cookies": {"a": "1"}}
            answer = await try_once("POST", f"http://127.0.0.1:{peer.port}/x", kwargs, whole=True)
            return answer, await answer.read()

    answer, body = asyncio.run(call())

    assert isinstance(answer, answer_type)
    assert body == b"1.1"


def test_a_server_is_told_the_same_by_aiohttp_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TRANSPORTS", base.TRANSPORTS[1:])

    async def both() -> None:
        async with peer_on(echo) as peer:
            for method, path, kwargs in CALLS:
                url = f"http://127.0.0.1:{peer.port}{path}"
                said = [await (await try_once(method, url, kwargs, whole=whole)).read() for whole in (True, False)]
                assert told(said[0]) == told(said[1]), (method, path)

    asyncio.run(both())


async def greet(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI app that answers with what it was asked."""
    asked = f"{scope['method']} {scope['path']}?{scope['query_string'].decode()} {(await receive())['body'].decode()}"
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(asked)), (b"set-cookie", b"seen=1")]
    await send({"type": "http.response.start", "status": 418, "headers": headers})
    await send({"type": "http.response.body", "body": asked.encode()})


def test_the_same_request_gets_the_same_answer_from_every_transport(listening: Callable[[Any, int], Any]) -> None:
    async def answers() -> list[tuple[int, str, str, bytes]]:
        async with listening(greet, 0) as port:
            address = Address("127.0.0.1", port)
            register_local_app("greeter", greet, [address])
            request = local_request(
                "PUT", base_url(address), "/a?b=c", {"data": b"{}", "headers": JSON_HEADERS}, address
            )
            in_memory = find_local_app("greeter", address)
            assert request is not None
            assert in_memory is not None
            opened = open_transports(GlobalAIOHTTPAsyncClientConfig())
            transports: list[Transport] = [in_memory, *opened]
            got = [await transport.exchange(request, 10.0) for transport in transports]
            found = [(each.status, str(each.url), each.cookies["seen"].value, await each.read()) for each in got]
            for transport in opened:
                await transport.aclose()
            return [(status, url.replace(str(port), "port"), cookie, body) for status, url, cookie, body in found]

    assert asyncio.run(answers()) == [(418, "http://127.0.0.1:port/a?b=c", "1", b"PUT /a?b=c {}")] * 3


@pytest.mark.usefixtures("bare_pytest")
def test_the_request_tests_pass_without_the_wire_transport() -> None:
    tests = [f"tests/http/{name}" for name in REQUEST_TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.http.without_wire", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=PARENT_DIR, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
