"""Calls of a run over bare connections beside aiohttp's: the server is told the same, the caller sees the same."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from omegaconf import OmegaConf
from yarl import URL

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import ServerClient
from nemo_gym.http.errors import ServerLostError, ServerResponseError, ServerUnreachableError
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from nemo_gym.http.request import get_response_json, raise_for_status, request, try_once
from nemo_gym.http.run_answers import ATTEMPT_HEADER
from nemo_gym.http.session import (
    close_global_aiohttp_client,
)
from tests.http.raw_peers import Line, numbering, once, peer_on, plain, silence

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Configure = Callable[..., Any]


async def echo(line: Line) -> None:
    """Answer with the request itself."""
    while said := await line.request():
        await line.say(plain(said))


def told(raw: bytes) -> tuple[bytes, list[str], bytes]:
    """Request line, headers (they and cookies in any order), and body."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value for name, _, value in (line.decode().partition(": ") for line in lines)}
    if "cookie" in headers:
        headers["cookie"] = "; ".join(sorted(headers["cookie"].split("; ")))
    return first, sorted(f"{name}: {value}" for name, value in headers.items()), body


@pytest.mark.parametrize(
    "kwargs",
    [
        {"timeout": aiohttp.ClientTimeout(sock_read=0.05)},
        {"timeout": aiohttp.ClientTimeout(total=0.05)},
    ],
)
def test_a_timeout_of_any_kind_holds(run: Run, kwargs: dict[str, Any]) -> None:
    async def call() -> None:
        async with peer_on(silence) as peer:
            await try_once("GET", f"http://127.0.0.1:{peer.port}/", kwargs)

    with pytest.raises(TimeoutError):
        run(call())


def test_a_user_in_the_url_is_sent_as_its_authorization(run: Run) -> None:
    async def call() -> Any:
        async with peer_on(echo) as peer:
            answer = await try_once("GET", f"http://me:mine@127.0.0.1:{peer.port}/", {})
            return told(await answer.read())[1]

    headers = run(call())
    assert "authorization: Basic bWU6bWluZQ==" in headers


@pytest.mark.parametrize(
    ("status", "method", "body"),
    [("303 See Other", b"GET", b""), ("302 Found", b"GET", b""), ("307 Temporary Redirect", b"POST", b"{}")],
)
def test_a_redirect_is_followed_and_what_was_redirected_is_not_sent_again(
    run: Run, status: str, method: bytes, body: bytes
) -> None:
    seen: list[bytes] = []

    async def behave(line: Line) -> None:
        while said := await line.request():
            seen.append(said)
            if said.startswith(b"POST /old"):
                await line.say(plain(b"", status, "Location: new?a=b"))
            else:
                await line.say(plain(b'"here"'))

    async def calls() -> Any:
        async with peer_on(behave) as peer:
            url = f"http://127.0.0.1:{peer.port}/old"
            headers = {"Authorization": "Bearer token"}
            followed = await request("POST", url, _internal=True, json={}, params={"q": "1"}, headers=headers)
            stayed = await request("POST", url, _internal=True, json={}, allow_redirects=False)
            return await get_response_json(followed), str(followed.url.relative()), stayed.status

    assert run(calls()) == ("here", "/new?a=b", int(status[:3]))
    assert [said.partition(b" HTTP")[0] for said in seen] == [b"POST /old?q=1", method + b" /new?a=b", b"POST /old"]
    assert told(seen[1])[2] == body
    assert "authorization: Bearer token" in told(seen[1])[1]


CREDENTIALS = {
    "Authorization": "Bearer token",
    "Proxy-Authorization": "Basic dTpw",
    "Cookie": "session=1",
    "api-key": "azure",
    "X-Api-Key": "anthropic",
    "Ocp-Apim-Subscription-Key": "azure, too",
    "x-goog-api-key": "google",
    "X-Auth-Token": "token",
    "X-Who-Knows": "what this proves",
}


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("hops", [1, 2])
def test_a_redirect_to_another_origin_takes_no_credentials_along(run: Run, is_whole: bool, hops: int) -> None:
    async def call() -> Any:
        async with AsyncExitStack() as peers:
            port = (await peers.enter_async_context(peer_on(echo))).port
            for _ in range(hops):
                there = f"Location: http://127.0.0.1:{port}/"
                answer = once(plain(b"", "307 Temporary Redirect", there))
                port = (await peers.enter_async_context(peer_on(answer))).port
            headers = {**CREDENTIALS, "Accept-Language": "kept"}
            url = f"http://127.0.0.1:{port}/"
            answered = await request("POST", url, _internal=is_whole, headers=headers, data=b"{}")
            return told(await answered.read())

    _, headers, body = run(call())
    assert body == b"{}"
    assert "accept-language: kept" in [line.lower() for line in headers]
    names = {line.partition(":")[0].lower() for line in headers}
    assert names & {name.lower() for name in CREDENTIALS} == set()


@pytest.mark.parametrize("is_whole", [True, False])
def test_redirects_in_a_circle_come_to_an_end(run: Run, is_whole: bool) -> None:
    async def circle(line: Line) -> None:
        while await line.request():
            await line.say(plain(b"", "302 Found", "Location: /again"))

    async def call() -> int:
        async with peer_on(circle) as peer:
            with pytest.raises(aiohttp.TooManyRedirects):
                await request("GET", f"http://127.0.0.1:{peer.port}/", _internal=is_whole)
            return sum(line.requests for line in peer.lines)

    assert run(call()) == 11


@pytest.mark.parametrize("location", [(), ("Location: http://[",)])
def test_a_redirect_that_leads_nowhere_ends_there(run: Run, location: tuple[str, ...]) -> None:
    async def call() -> int:
        async with peer_on(once(plain(b"", "302 Found", *location))) as peer:
            return (await request("GET", f"http://127.0.0.1:{peer.port}/", _internal=True)).status

    if location:
        with pytest.raises(aiohttp.InvalidUrlRedirectClientError):
            run(call())
    else:
        assert run(call()) == 302


def test_a_secret_that_an_error_repeats_is_masked(run: Run) -> None:
    async def refuse(line: Line) -> None:
        while said := await line.request():
            await line.say(plain(said, "401 Unauthorized"))

    async def calls() -> None:
        async with peer_on(refuse) as peer:
            url = f"http://127.0.0.1:{peer.port}"
            headers = {"Authorization": "Bearer sk-secret-one", "X-Api-Key": "sk-secret-two", "X-Other": "shown"}
            await raise_for_status(await request("GET", url, _internal=True, headers=headers))

    with pytest.raises(ServerResponseError) as caught:
        run(calls())
    assert b"sk-secret" not in caught.value.response_content
    assert caught.value.response_content.count(b"****") == 2
    assert b"X-Other: shown" in caught.value.response_content


def test_a_model_endpoint_is_asked_again_after_a_disconnect(run: Run, configure: Configure) -> None:
    configure()

    async def behave(line: Line) -> None:
        while said := await line.request():
            if line.number == 1:
                break
            assert b"Authorization: Bearer sk-key\r\n" in said
            await line.say(plain(b'{"choices": []}'))

    async def call() -> Any:
        async with peer_on(behave) as peer:
            client = NeMoGymAsyncOpenAI(base_url=f"http://127.0.0.1:{peer.port}/v1", api_key="sk-key")
            answer = await client.create_chat_completion(messages=[])
            return answer, len(peer.lines)

    assert run(call()) == ({"choices": []}, 2)


def test_a_refused_call_is_tried_again_as_it_was_not_sent(run: Run, configure: Configure, free_port: int) -> None:
    configure(http_retry_max_tries=3)

    with pytest.raises(ServerUnreachableError, match="connection refused") as caught:
        run(request("POST", f"http://127.0.0.1:{free_port}/", _internal=True, json={}))
    assert caught.value.attempts == 3


@contextlib.contextmanager
def no_file_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_file_descriptors_the_remedy_is_named(run: Run, configure: Configure) -> None:
    configure(http_retry_max_tries=1)

    async def call() -> None:
        async with peer_on(numbering) as peer:
            with no_file_descriptors():
                await request("GET", f"http://127.0.0.1:{peer.port}/", _internal=True)

    with pytest.raises(ServerUnreachableError, match="ulimit -n 65535"):
        run(call())


def test_closing_the_client_of_a_loop_closes_its_bare_connections(run: Run) -> None:
    async def calls() -> list[bytes]:
        async with peer_on(numbering) as peer:
            url, bodies = f"http://127.0.0.1:{peer.port}/", []
            for _ in range(2):
                bodies.append(await (await request("GET", url, _internal=True)).read())
                await close_global_aiohttp_client()
                await peer.lines[-1].is_over.wait()
            return bodies

    assert run(calls()) == [b"1.1", b"2.1"]


def test_the_url_of_an_answer_is_that_of_its_request(run: Run) -> None:
    async def call() -> URL:
        async with peer_on(numbering, "127.0.0.1") as peer:
            return (await request("GET", f"http://127.0.0.1:{peer.port}/a b?c#d", _internal=True)).url.with_port(1)

    assert run(call()) == URL("http://127.0.0.1:1/a%20b?c")


async def roll_out(port: int, name: str) -> aiohttp.ClientResponse:
    """Ask the server `tools` for a rollout under that name."""
    block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"tools": {"responses_api_agents": {"some_agent": block}}}),
    )
    return await client.post(server_name="tools", url_path="/run", json={}, headers={ATTEMPT_HEADER: name})


def test_a_rollout_that_reached_nobody_is_sent_again(run: Run, free_port: int, configure: Configure) -> None:
    configure(http_retry_max_tries=50, http_retry_first_delay_s=0.01, http_retry_max_delay_s=0.05)

    async def work() -> bytes:
        sent = asyncio.ensure_future(roll_out(free_port, "run/0/0"))
        await asyncio.sleep(0.05)
        async with peer_on(echo, port=free_port):
            return await (await sent).read()

    assert b"run/0/0" in run(work())


def test_a_rollout_follows_redirects_and_names_what_was_lost(run: Run) -> None:
    async def there(line: Line) -> None:
        await line.request()
        await line.say(plain(b"", "307 Temporary Redirect", "Location: /run"))
        await line.request()
        await line.say(plain(b"arrived"))
        await line.request()
        line.reset()

    async def work() -> tuple[bytes, str]:
        async with peer_on(there) as peer:
            arrived = await (await roll_out(peer.port, "run/0/0")).read()
            with pytest.raises(ServerLostError) as lost:
                await roll_out(peer.port, "run/0/1")
            return arrived, str(lost.value)

    arrived, message = run(work())

    assert arrived == b"arrived"
    assert "'tools'" in message
    assert "tries: 1" in message
