"""Endpoints with a name, and behind TLS: found, checked and kept as aiohttp would, over bare connections."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym.http.errors import ServerUnreachableError
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from nemo_gym.http.request import request, try_once
from tests.http.certificates import Authority
from tests.http.raw_peers import (
    Line,
    peer_on,
    plain,
    silence,
)

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Configure = Callable[..., Any]

AT_ONCE, EACH = 8, 20


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """An authority that this process believes, as users have it believe theirs."""
    made = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.file))
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", ssl.create_default_context())  # made at import
    return made


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


def untrusted(authority: Authority, tmp_path: Path) -> dict[str, ssl.SSLContext]:
    other = tmp_path / "other"
    other.mkdir()
    return {
        "unable to get local issuer certificate": Authority(other).server("localhost"),
        "self-signed certificate": authority.server("localhost", is_self_signed=True),
        "certificate has expired": authority.server("localhost", is_expired=True),
        "Hostname mismatch": authority.server("elsewhere.test"),
    }


def test_a_certificate_that_proves_nothing_is_refused_at_once(
    run: Run, configure: Configure, authority: Authority, tmp_path: Path
) -> None:
    configure()

    async def calls(tls: ssl.SSLContext) -> tuple[Any, ...]:
        async with peer_on(silence, tls=tls) as peer:
            url = f"https://localhost:{peer.port}/"
            with pytest.raises(aiohttp.ClientConnectorCertificateError) as ours:
                await try_once("GET", url, {})
            with pytest.raises(ServerUnreachableError) as told:
                await request("GET", url, _internal=True)
            with pytest.raises(ServerUnreachableError) as told_of_model:
                await NeMoGymAsyncOpenAI(base_url=url, api_key="none").create_response(input="hi")
            assert all(not line.requests for line in peer.lines)
            return str(ours.value), told.value, told_of_model.value

    for words, tls in untrusted(authority, tmp_path).items():
        ours, *told = run(calls(tls))
        assert words in ours
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


def test_an_unknown_name_is_asked_for_again_as_nothing_was_sent(run: Run, configure: Configure) -> None:
    configure(http_retry_max_tries=3)

    with pytest.raises(ServerUnreachableError, match="unknown host name") as caught:
        run(request("POST", "http://no-such-host.invalid:80/run", _internal=True, json={}))
    assert caught.value.attempts == 3
    assert isinstance(caught.value.__cause__, aiohttp.ClientConnectorDNSError)
