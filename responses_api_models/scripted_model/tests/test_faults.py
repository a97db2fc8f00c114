"""Faults are real on the wire, due when the script says, and over when it says."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import orjson
import pytest
from fastapi.testclient import TestClient
from omegaconf import OmegaConf

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from nemo_gym.testing import Address, register_local_app
from responses_api_models.scripted_model.app import ScriptedModel
from responses_api_models.scripted_model.conversation import Conversation, Said
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.faults import FaultPlan
from responses_api_models.scripted_model.script import load_script

Serve = Callable[..., str]
_T = TypeVar("_T")
ASK = {"input": "hello"}


def over_http(url: str, use: Callable[[aiohttp.ClientResponse], Awaitable[_T]], patience_s: float = 20.0) -> _T:
    """What `use` makes of the answer to one POST; nothing is tried again."""

    async def call() -> _T:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience_s)) as session,
            session.post(f"{url}/v1/responses", json=ASK) as response,
        ):
            return await use(response)

    return asyncio.run(call())


async def status_and_body(response: aiohttp.ClientResponse) -> tuple[int, bytes]:
    return response.status, await response.read()


def test_a_status_comes_with_an_error_body_and_retry_after(serve: Serve) -> None:
    url = serve({"faults": [{"kind": "status", "status": 429, "retry_after": 1.5, "message": "slow down"}]})

    async def use(response: aiohttp.ClientResponse) -> tuple[int, str | None, str | None, Any]:
        headers = response.headers
        return (
            response.status,
            headers.get("retry-after"),
            headers.get("x-nemo-gym-error-status"),
            await response.json(),
        )

    status, retry_after, innermost, body = over_http(url, use)
    assert (status, retry_after, innermost) == (429, "1.5", "429")
    assert body["error"]["message"] == "slow down"


def test_a_disconnect_closes_the_connection_without_a_byte(serve: Serve) -> None:
    url = serve({"faults": [{"kind": "disconnect"}]})
    host, port = url.removeprefix("http://").split(":")

    async def raw() -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        payload = json.dumps(ASK).encode()
        head = "POST /v1/responses HTTP/1.1", "Host: localhost", "Content-Type: application/json"
        writer.write("\r\n".join([*head, f"Content-Length: {len(payload)}", "", ""]).encode() + payload)
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return received

    assert asyncio.run(raw()) == b""
    with pytest.raises(aiohttp.ServerDisconnectedError):
        over_http(url, status_and_body)


def test_a_hang_gives_no_answer_and_ends_in_a_disconnect(serve: Serve) -> None:
    with pytest.raises(TimeoutError):
        over_http(serve({"faults": [{"kind": "hang", "seconds": 60}]}), status_and_body, patience_s=0.3)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        over_http(serve({"faults": [{"kind": "hang", "seconds": 0.1}]}), status_and_body)


def test_a_malformed_body_arrives_whole_and_makes_no_sense(serve: Serve) -> None:
    status, body = over_http(serve({"faults": [{"kind": "malformed"}]}), status_and_body)
    own_status, own_body = over_http(
        serve({"faults": [{"kind": "malformed", "body": '{"object": "?"}'}]}), status_and_body
    )

    assert (status, own_status, own_body) == (200, 200, b'{"object": "?"}')
    assert body.startswith(b'{"id":"resp_')
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(body)


def test_a_truncated_body_breaks_off(serve: Serve) -> None:
    url = serve({"faults": [{"kind": "truncate", "keep": 0.3}]})

    with pytest.raises(aiohttp.ClientPayloadError):
        over_http(url, status_and_body)


def test_a_slow_drip_brings_the_whole_answer_in_pieces(serve: Serve) -> None:
    url = serve({"faults": [{"kind": "slow_drip", "seconds": 0.5, "pieces": 5, "times": 1}]})

    async def pieces(response: aiohttp.ClientResponse) -> list[bytes]:
        return [piece async for piece in response.content.iter_any()]

    dripped, at_once = over_http(url, pieces), over_http(url, pieces)
    assert len(dripped) > len(at_once)
    assert b"".join(dripped) == b"".join(at_once)


def test_the_server_goes_on_after_every_fault(serve: Serve) -> None:
    kinds: list[dict[str, Any]] = [
        {"kind": "disconnect"},
        {"kind": "truncate"},
        {"kind": "malformed"},
        {"kind": "status", "status": 503},
    ]
    url = serve({"faults": [{**kind, "times": 1} for kind in kinds]})
    outcomes = []
    for _ in range(5):
        try:
            outcomes.append(str(over_http(url, status_and_body)[0]))
        except aiohttp.ClientError as error:
            outcomes.append(type(error).__name__)

    assert outcomes == ["ServerDisconnectedError", "ClientPayloadError", "200", "503", "200"]


def test_in_memory_faults_break_the_answer_too(model: Callable[..., ScriptedModel]) -> None:
    def call(fault: dict[str, Any]) -> tuple[int, bytes]:
        async def run() -> tuple[int, bytes]:
            address = Address("127.0.0.1", 1)
            register_local_app("policy_model", model({"faults": [fault]}).complete_app(), [address])
            block = {"policy_model": {"responses_api_models": {"scripted_model": {"host": "127.0.0.1", "port": 1}}}}
            client = ServerClient(
                head_server_config=BaseServerConfig(host="127.0.0.1", port=2),
                global_config_dict=OmegaConf.create(block),
            )
            response = await client.post("policy_model", "/v1/responses", json=ASK)
            return response.status, await response.read()

        return asyncio.run(run())

    assert call({"kind": "status", "status": 503})[0] == 503
    for broken in ({"kind": "disconnect"}, {"kind": "hang", "seconds": 0.01}, {"kind": "truncate"}):
        with pytest.raises(aiohttp.ClientError):
            call(broken)
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(call({"kind": "malformed"})[1])


def test_a_client_that_tries_again_gets_through(serve: Serve) -> None:
    from nemo_gym.openai_utils import NeMoGymAsyncOpenAI

    url = serve({"faults": [{"kind": "status", "status": 503, "times_per_request": 2}]})

    async def ask() -> Any:
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig(model_retry_first_delay_s=0.01))
        return await NeMoGymAsyncOpenAI(base_url=f"{url}/v1", api_key="none").create_response(**ASK)

    assert asyncio.run(ask())["object"] == "response"


def strikes(fault: dict[str, Any], texts: list[str], seed: int | None = None) -> list[bool]:
    plan = FaultPlan(load_script({"faults": [fault]})[0].faults)
    struck = []
    for text in texts:
        conversation = Conversation((Said("user", text),), seed=seed)
        struck.append(plan.strike(conversation, Draws(seed or 0, conversation.fingerprint)) is not None)
    return struck


def test_a_fault_strikes_when_it_is_due() -> None:
    hang = {"kind": "hang"}

    assert strikes(hang, ["a", "b"]) == [True, True]
    assert strikes({**hang, "every": 3}, list("abcdefg")) == [False, False, True, False, False, True, False]
    assert strikes({**hang, "times": 2}, list("abcd")) == [True, True, False, False]
    assert strikes({**hang, "times_per_request": 1}, list("abab")) == [True, True, False, False]
    assert strikes({**hang, "match": {"last_user_contains": "b"}}, list("abcb")) == [False, True, False, True]
    assert strikes({**hang, "match": {"last_user_contains": "b"}, "every": 2}, list("abcb")) == [
        False,
        False,
        False,
        True,
    ]


def test_chance_falls_equally_in_every_run_and_anew_for_every_try() -> None:
    fault = {"kind": "hang", "probability": 0.5}
    texts = [str(number) for number in range(100)]

    first = strikes(fault, texts)
    assert first == strikes(fault, texts)
    assert first != strikes(fault, texts, seed=1)
    assert 30 < sum(first) < 70
    tries = strikes(fault, ["the same"] * 40)
    assert {True, False} == set(tries)


def test_a_script_with_a_mistake_stops_the_server_from_being_made(model: Callable[..., ScriptedModel]) -> None:
    with pytest.raises(Exception, match=r"faults\[0\]"):
        model({"faults": [{"kind": "status"}]})


def test_other_requests_are_not_touched(client: Callable[..., TestClient]) -> None:
    http = client({"faults": [{"kind": "status", "status": 500, "match": {"last_user_contains": "boom"}}]})

    assert http.post("/v1/responses", json={"input": "boom"}).status_code == 500
    assert http.post("/v1/responses", json={"input": "calm"}).status_code == 200
    assert http.get("/health").json() == {"status": "ok"}
