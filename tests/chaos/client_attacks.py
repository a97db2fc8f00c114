"""What endpoints may send: cut connections, odd answers, bombs, hostile bodies. None hangs, lies or blocks anybody."""

import asyncio
import gzip
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym.collect.failures import failure_of
from nemo_gym.errors import GymError
from nemo_gym.http.errors import ServerResponseError
from nemo_gym.http.model_answers import EndpointSettings, explained_error
from nemo_gym.http.request import request
from nemo_gym.http.session import use_client_settings
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from tests.chaos.attacks import Tried, attack
from tests.http.odd_answers import ODD, zipped
from tests.http.raw_peers import Line, peer_on, plain
from tests.security.growth import of_all_kinds

_PATIENCE_S = 20.0
_NEWS_TRAVELS_S = 0.01
"""Until a client knows that a server has ended a connection, which it may do at any moment after an answer."""
_CUTS = 300
_BODY = bytes(range(256)) * 40
_SETTINGS = EndpointSettings("policy_model", "http://127.0.0.1:1/v1", "m")


def _answers(say: Callable[[Line], Awaitable[None]], calls: int) -> list[Any]:
    """What becomes of calls to a server that answers like that: status and body, an error, or that it hung."""

    async def once(port: int) -> Any:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                answer = await request("POST", f"http://127.0.0.1:{port}/", _internal=True, data=b"{}")
                return answer.status, await answer.read()
        except TimeoutError:
            return "hung"
        except (GymError, aiohttp.ClientError) as error:
            return error

    async def all_calls() -> list[Any]:
        async with peer_on(say) as peer:
            answers = []
            for _ in range(calls):
                answers.append(await once(peer.port))
                await asyncio.sleep(_NEWS_TRAVELS_S)
            return answers

    return asyncio.run(all_calls())


@attack("client: connections cut within an answer", short=True)
def cut_connections(folder: Path) -> Tried:
    """An answer cut anywhere is an error, never a shorter answer."""
    tried, whole = Tried(), plain(_BODY, "200 OK", "X-A: 1")
    places = random.Random(7)

    async def cut(line: Line) -> None:
        await line.request()
        await line.say(whole[: places.randrange(1, len(whole))])
        if places.random() < 0.5:
            line.reset()

    for number, answer in enumerate(_answers(cut, _CUTS)):
        tried.count(f"cut {number}", None if isinstance(answer, Exception) else f"was taken for {str(answer)[:80]}")
    return tried


@attack("client: odd answers, garbage and what is not HTTP", short=True)
def odd_answers(folder: Path) -> Tried:
    """Whatever a server says, the call ends, and the next one gets its own answer."""
    tried = Tried()
    for name, odd in ODD.items():

        async def behave(line: Line, data: bytes = odd.data, ends: bool = odd.ends) -> None:
            if line.number == 1 and await line.request():
                await line.say(data)
                if ends:
                    return
            while await line.request():
                await line.say(plain(b"mine"))

        first, second = _answers(behave, 2)
        problem = "hung" if first == "hung" else None
        tried.count(name, problem if second == (200, b"mine") else f"the next call got {str(second)[:80]}")
    return tried


@attack("client: answers that are too large, or become so when unpacked")
def bombs(folder: Path) -> Tried:
    """Given up at the setting."""
    tried = Tried()
    use_client_settings(GlobalAIOHTTPAsyncClientConfig(max_response_bytes=1 << 20))
    kinds = {"plain": plain(bytes(2 << 20)), "gzip": zipped("gzip", gzip.compress(bytes(200 << 20)))}
    try:
        for name, data in kinds.items():

            async def behave(line: Line, data: bytes = data) -> None:
                await line.request()
                await line.say(data)

            (answer,) = _answers(behave, 1)
            is_named = isinstance(answer, Exception) and "max_response_bytes" in str(answer)
            tried.count(name, None if is_named else f"was taken for {str(answer)[:80]}")
    finally:
        use_client_settings(None)
    return tried


@attack("client: error bodies of 1 MB made to be slow to look at", short=True)
def hostile_bodies(folder: Path) -> Tried:
    """Each is explained and filed in a moment."""
    tried = Tried()
    for text in of_all_kinds():
        body = text.of(1 << 20).encode(errors="replace")
        started_s = time.process_time()
        refused = ServerResponseError("http://127.0.0.1:1/v1/responses", 404, body)
        explained_error(refused, _SETTINGS)
        failure_of(refused, "agent")
        taken_s = time.process_time() - started_s
        tried.count(repr(text.repeated), None if taken_s < 1 else f"took {taken_s:.1f} s")
    return tried
