"""As many calls at once as were asked for: no limit that nobody set holds them back."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nemo_gym.http.request import request
from nemo_gym.runtime import raise_open_file_limit
from tests.http.raw_peers import plain

Run = Callable[[Coroutine[Any, Any, Any]], Any]
CALLS = 1_500


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_endpoint_sees_as_many_calls_at_once_as_are_made(run: Run, is_whole: bool) -> None:
    raise_open_file_limit()
    waiting = asyncio.Semaphore(0)
    under_way = most = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        await reader.readuntil(b"\r\n\r\n")
        under_way += 1
        most = max(most, under_way)
        if under_way == CALLS:
            for _ in range(CALLS):
                waiting.release()
        await waiting.acquire()
        under_way -= 1
        writer.write(plain(b"{}", "200 OK", "Connection: close"))
        writer.close()

    async def calls() -> list[int]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server, asyncio.timeout(100):
            return [
                answer.status
                for answer in await asyncio.gather(*(request("GET", url, _internal=is_whole) for _ in range(CALLS)))
            ]

    assert run(calls()) == [200] * CALLS
    assert most == CALLS
