"""What a model server knows about its endpoint: real sockets that refuse, swallow, hang up, are slow, and answer."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from nemo_gym.http import model_endpoint
from nemo_gym.http.model_endpoint import EndpointContact, NeMoGymAsyncOpenAI
from tests.ports import free_port


def client_of(port: int) -> NeMoGymAsyncOpenAI:
    return NeMoGymAsyncOpenAI(base_url=f"http://me:secret@127.0.0.1:{port}/v1", api_key="key")


def state_of(url: str) -> dict[str, Any]:
    return asyncio.run(EndpointContact(url).state())


def while_asked(client: NeMoGymAsyncOpenAI, for_s: float) -> dict[str, Any]:
    """The state after a call has been under way for so long."""

    async def scenario() -> dict[str, Any]:
        call = asyncio.ensure_future(client.create_response(model="m"))
        await asyncio.wait([call], timeout=for_s)
        state = await client.contact.state()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return state

    return asyncio.run(scenario())


def test_nobody_listens_there_and_nobody_has_asked_yet() -> None:
    state = state_of(f"http://me:secret@127.0.0.1:{free_port()}/v1")

    assert state["problem"] == "connection refused"
    assert (state["has_answered"], state["waiting"], state["asked_s_ago"]) == (False, 0, None)
    assert "secret" not in state["url"]


def test_an_unknown_host_and_what_is_no_address_are_called_so() -> None:
    assert state_of("http://no-such-host.invalid:80/v1")["problem"] == "unknown host name"
    assert state_of("localhost")["problem"] == "this is no address"
    assert state_of("http://localhost:99999999/v1")["problem"] == "this is no address"
    assert state_of(f"http://localhost:{free_port()}/v1")["problem"] == "connection refused"


def test_connections_that_are_swallowed_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_endpoint, "_CONNECTS_WITHIN_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        assert state_of(f"http://127.0.0.1:{address[1]}/v1")["problem"] == "no connection in time"
        for filler in fillers:
            filler.close()


def test_a_long_first_answer_is_no_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as slow:
        state = while_asked(client_of(slow.getsockname()[1]), 0.3)

    assert (state["problem"], state["has_answered"], state["waiting"]) == ("", False, 1)
    assert state["asked_s_ago"] > 0


def test_an_endpoint_that_hangs_up_has_a_problem_and_one_that_listens_by_now_has_none(
    peer: Callable[..., Any],
) -> None:
    hangs_up = peer(lambda connection, number: connection.close())
    client = client_of(hangs_up.port)
    state = while_asked(client, 0.3)
    assert state["problem"]
    assert not state["has_answered"]
    contact = EndpointContact("http://127.0.0.1:1/v1")
    assert asyncio.run(contact.state())["problem"] == "connection refused"
    contact.base_url = client.base_url
    assert asyncio.run(contact.state())["problem"] == ""


@pytest.mark.parametrize("status", [200, 401, 503])
def test_any_answer_is_an_answer_and_later_failures_are_told_with_it(
    serve: Callable[..., int], status: int, configure: Callable[..., Any]
) -> None:
    configure(model_retry_max_tries=1)
    app = FastAPI()

    @app.post("/v1/responses")
    async def answer() -> JSONResponse:
        return JSONResponse({}, status_code=status)

    client = client_of(serve(app))
    assert while_asked(client, 20.0)["has_answered"]
    client.contact.failed("connection refused", was_sent=False)
    state = asyncio.run(client.contact.state())
    assert (state["has_answered"], state["problem"]) == (True, "connection refused")
    assert while_asked(client, 20.0)["problem"] == ""


def test_what_was_ridden_out_is_counted_with_its_cost_and_what_waits_now(serve: Callable[..., int]) -> None:
    app, statuses = FastAPI(), [429, 503, 429]

    @app.post("/v1/responses")
    async def respond() -> Any:
        if statuses:
            pause_s = "0.01" if len(statuses) > 1 else "30"
            return JSONResponse({}, statuses.pop(0), headers={"retry-after": pause_s})
        return {}

    state = while_asked(client_of(serve(app)), 3.0)

    assert state["ridden_out"] == {"429": 2, "503": 1}
    assert state["pausing"] == {"429": 1}
    assert 0.02 <= state["ridden_out_cost_s"] < 30
