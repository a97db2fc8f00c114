import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import ClientSession
from fastapi import FastAPI, Request

from nemo_gym.http import session as session_module
from nemo_gym.http.request import get_response_json, request
from nemo_gym.http.session import (
    close_global_aiohttp_client,
    current_settings,
    ensure_connection_capacity,
    get_global_aiohttp_client,
    global_aiohttp_client_exit,
    is_global_aiohttp_client_request_debug_enabled,
    is_global_aiohttp_client_setup,
    set_global_aiohttp_client,
    socket_factory,
)
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.keys import NUM_WORKERS_ENV_VAR_NAME

Configure = Callable[..., GlobalAIOHTTPAsyncClientConfig]
Serve = Callable[..., int]


@pytest.fixture
def url(serve: Serve) -> str:
    app = FastAPI()

    @app.get("/cookies")
    async def cookies(request: Request) -> dict[str, str]:
        return request.cookies

    return f"http://127.0.0.1:{serve(app)}/cookies"


async def status_of(url: str) -> int:
    async with await request("GET", url) as response:
        return response.status


@pytest.fixture(autouse=True)
def _no_capacity_left_over() -> Iterator[None]:
    yield
    session_module._SESSIONS.min_connections = 0


def test_one_session_serves_a_loop_and_is_closed_with_it(url: str) -> None:
    async def twice() -> ClientSession:
        await status_of(url)
        first = get_global_aiohttp_client()
        await status_of(url)
        assert get_global_aiohttp_client() is first
        assert is_global_aiohttp_client_setup()
        return first

    assert asyncio.run(twice()).closed
    assert not is_global_aiohttp_client_setup()


def test_a_second_event_loop_in_the_same_process_works(url: str) -> None:
    assert [asyncio.run(status_of(url)) for _ in range(3)] == [200, 200, 200]


def test_event_loops_of_other_threads_have_sessions_of_their_own(url: str) -> None:
    sessions: list[ClientSession] = []
    meeting = threading.Barrier(3)

    async def call() -> None:
        assert await status_of(url) == 200
        sessions.append(get_global_aiohttp_client())
        await asyncio.to_thread(meeting.wait, 10)

    threads = [threading.Thread(target=lambda: asyncio.run(call())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({id(session) for session in sessions}) == 3
    assert all(session.closed for session in sessions)


def test_a_session_whose_loop_died_without_ceremony_is_forgotten() -> None:
    loop = asyncio.new_event_loop()

    async def make() -> ClientSession:
        return get_global_aiohttp_client()

    orphan = loop.run_until_complete(make())
    loop.close()
    asyncio.run(make())

    assert orphan.closed
    assert loop not in session_module._SESSIONS.by_loop


def test_a_session_can_be_closed_in_order_and_a_new_one_takes_its_place(url: str) -> None:
    async def close_between() -> tuple[bool, int]:
        first = get_global_aiohttp_client()
        await close_global_aiohttp_client()
        await close_global_aiohttp_client()
        return first.closed, await status_of(url)

    assert asyncio.run(close_between()) == (True, 200)


def test_at_exit_the_sessions_of_idle_and_of_running_loops_are_closed() -> None:
    async def make() -> ClientSession:
        return get_global_aiohttp_client()

    idle = asyncio.new_event_loop()
    idle_session = idle.run_until_complete(make())
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    running_session = asyncio.run_coroutine_threadsafe(make(), running).result(10)

    global_aiohttp_client_exit()

    running.call_soon_threadsafe(running.stop)
    thread.join()
    idle.close()
    running.close()
    assert idle_session.closed
    assert running_session.closed


def test_cookies_are_not_kept_between_calls(serve: Serve) -> None:
    app = FastAPI()

    @app.get("/")
    async def give_and_show(request: Request) -> Any:
        from fastapi.responses import JSONResponse

        answer = JSONResponse(request.cookies)
        answer.set_cookie("given", "1")
        return answer

    address = f"http://127.0.0.1:{serve(app)}/"

    async def twice() -> list[Any]:
        return [await get_response_json(await request("GET", address)) for _ in range(2)]

    assert asyncio.run(twice()) == [{}, {}]


def test_limits_are_the_workers_share(monkeypatch: pytest.MonkeyPatch, configure: Configure) -> None:
    monkeypatch.setenv(NUM_WORKERS_ENV_VAR_NAME, "4")
    configure(global_aiohttp_connector_limit=100, global_aiohttp_connector_limit_per_host=2)

    async def limits() -> tuple[int, int]:
        connector: Any = get_global_aiohttp_client().connector
        return connector.limit, connector.limit_per_host

    assert asyncio.run(limits()) == (25, 1)


def test_capacity_can_be_raised_but_not_lowered_before_and_after_the_session_is_made(configure: Configure) -> None:
    configure(global_aiohttp_connector_limit=10, global_aiohttp_connector_limit_per_host=0)

    async def limits() -> list[tuple[int, int]]:
        ensure_connection_capacity(20)
        connector: Any = get_global_aiohttp_client().connector
        seen = [(connector.limit, connector.limit_per_host)]
        for wanted in (30, 5):
            ensure_connection_capacity(wanted)
            seen.append((connector.limit, connector.limit_per_host))
        return seen

    assert asyncio.run(limits()) == [(20, 0), (30, 0), (30, 0)]


def test_a_session_made_with_a_config_keeps_it_and_is_made_once() -> None:
    chosen = GlobalAIOHTTPAsyncClientConfig(http_total_timeout_s=7)

    async def make() -> float | None:
        session = set_global_aiohttp_client(chosen)
        with pytest.raises(AssertionError, match="already has"):
            set_global_aiohttp_client(chosen)
        assert current_settings() is chosen
        return session.timeout.total

    try:
        assert asyncio.run(make()) == 7
    finally:
        session_module.use_client_settings(None)


def test_debugging_follows_the_settings(configure: Configure) -> None:
    assert not is_global_aiohttp_client_request_debug_enabled()
    configure(global_aiohttp_client_request_debug=True)
    assert is_global_aiohttp_client_request_debug_enabled()


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the platform has no such option")
def test_connections_ask_whether_the_peer_is_still_there(configure: Configure) -> None:
    settings = configure(global_aiohttp_tcp_keepalive_idle_seconds=42)

    with socket_factory(settings)((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("", 0))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 42
