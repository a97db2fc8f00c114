"""Many connections at once to a server that is slow to take them up."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession

from nemo_gym.http import connector
from nemo_gym.http.connector import GymConnector

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


@asynccontextmanager
async def busy_server() -> AsyncIterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        listener.setblocking(False)
        yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}/"


async def take_up(listener: socket.socket) -> list[socket.socket]:
    """What waits in the queue now."""
    taken = []
    while True:
        try:
            taken.append(listener.accept()[0])
        except BlockingIOError:
            return taken


async def get(session: ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        return await answer.text()


def test_no_more_connections_are_opened_than_a_busy_server_can_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "OPENED_UNSEEN", 10)

    async def scenario() -> list[int]:
        queued = []
        async with busy_server() as (listener, url), ClientSession(connector=GymConnector(limit=0)) as session:
            calls = [asyncio.ensure_future(get(session, url)) for _ in range(35)]
            while not all(call.done() for call in calls):
                await asyncio.sleep(0.2)
                taken = await take_up(listener)
                queued.append(len(taken))
                for one in taken:
                    with one:
                        one.recv(65_536)
                        one.sendall(ANSWER)
            assert [call.result() for call in calls] == ["ok"] * 35
        return queued

    queued = asyncio.run(asyncio.wait_for(scenario(), 60))

    assert max(queued) <= 11  # ten calls and the question
    assert sum(queued) == 35 + 3


def test_a_server_that_does_not_answer_the_question_is_left_to_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "OPENED_UNSEEN", 1)
    monkeypatch.setattr(connector, "_ANSWER_TIMEOUT_S", 0.1)

    async def scenario() -> int:
        async with busy_server() as (listener, url), ClientSession(connector=GymConnector()) as session:
            calls = [asyncio.ensure_future(get(session, url)) for _ in range(3)]
            await asyncio.sleep(1.0)
            taken = await take_up(listener)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            for one in taken:
                one.close()
            return len(taken)

    assert asyncio.run(scenario()) == 5  # three calls, and two questions in vain
