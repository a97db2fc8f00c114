import asyncio
import logging
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from fastapi import FastAPI, Request

from nemo_gym.http.errors import MalformedResponseError, ServerResponseError, ServerUnreachableError
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI, retry_after_s

Configure = Callable[..., Any]
StartPeer = Callable[[Callable[[socket.socket, int], None]], Any]


def ask(port: int, **body: Any) -> dict[str, Any]:
    client = NeMoGymAsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key")
    return asyncio.run(client.create_response(**body))


def test_each_method_has_its_path_and_sends_the_key(serve: Callable[..., int]) -> None:
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def echo(path: str, request: Request) -> dict[str, Any]:
        return {
            "call": f"{request.method} /{path}",
            "key": request.headers["authorization"],
            "extra": request.headers["x-extra"],
            "body": (await request.body()).decode(),
        }

    client = NeMoGymAsyncOpenAI(
        base_url=f"http://127.0.0.1:{serve(app)}/v1/",
        api_key="key",
        default_headers={"X-Extra": "yes", "Authorization": "Bearer other"},
    )

    async def all_calls() -> list[dict[str, Any]]:
        return [
            await client.create_models(),
            await client.create_chat_completion(model="m"),
            await client.create_completion(model="m"),
            await client.create_response(model="m"),
            await client.create_tokenize(prompt="p"),
        ]

    answers = asyncio.run(all_calls())

    assert [answer["call"] for answer in answers] == [
        "GET /v1/models",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "POST /tokenize",
    ]
    assert {(answer["key"], answer["extra"]) for answer in answers} == {("Bearer key", "yes")}
    assert [answer["body"] for answer in answers] == ["", *['{"model":"m"}'] * 3, '{"prompt":"p"}']


@pytest.mark.parametrize("status", ["429 Too Many", "502 Bad", "503 Busy", "504 Late", "520 Odd"])
def test_a_busy_endpoint_is_asked_again(
    status: str, peer: StartPeer, http_answer: Any, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure()
    caplog.set_level(logging.WARNING)

    def busy_four_times(connection: socket.socket, number: int) -> None:
        connection.sendall(http_answer(status, b"later") if number <= 4 else http_answer("200 OK", b'{"id": "r"}'))

    endpoint = peer(busy_four_times)

    assert ask(endpoint.port, input="hi") == {"id": "r"}
    assert len(endpoint.received) == 5
    assert len({request.partition(b"\r\n\r\n")[2] for request in endpoint.received}) == 1
    assert len(caplog.records) == 1
    assert f"rate_limit: {status[:3]}" in caplog.text


def test_an_endpoint_that_stays_busy_is_given_up_with_its_last_answer(
    peer: StartPeer, http_answer: Any, configure: Configure
) -> None:
    configure(model_retry_max_tries=4)
    endpoint = peer(lambda connection, number: connection.sendall(http_answer("429 Too Many", b"quota %d" % number)))

    with pytest.raises(ServerResponseError) as caught:
        ask(endpoint.port)

    assert caught.value.status == 429
    assert caught.value.response_content == b"quota 4"
    assert caught.value.attempts == 4
    assert "try 4" in str(caught.value)


def test_an_endpoint_that_asks_for_patience_gets_it(peer: StartPeer, http_answer: Any, configure: Configure) -> None:
    configure()
    asked_at: list[float] = []

    def limited_once(connection: socket.socket, number: int) -> None:
        asked_at.append(time.monotonic())
        limited = http_answer("429 Too Many", b"", "Retry-After: 1")
        connection.sendall(limited if number == 1 else http_answer("200 OK"))

    ask(peer(limited_once).port)

    assert asked_at[1] - asked_at[0] >= 0.99


def test_patience_ends_with_the_allowed_time(peer: StartPeer, http_answer: Any, configure: Configure) -> None:
    configure(model_retry_max_elapsed_s=0.2)
    limited = http_answer("429 Too Many", b"", "Retry-After: 86400")
    endpoint = peer(lambda connection, number: connection.sendall(limited))

    with pytest.raises(ServerResponseError) as caught:
        ask(endpoint.port)

    assert caught.value.attempts == 2


def test_a_failing_endpoint_is_asked_three_times(peer: StartPeer, http_answer: Any, configure: Configure) -> None:
    configure()
    endpoint = peer(lambda connection, number: connection.sendall(http_answer("500 Oops", b"broken")))

    with pytest.raises(ServerResponseError) as caught:
        ask(endpoint.port)

    assert (caught.value.status, caught.value.response_content) == (500, b"broken")
    assert len(endpoint.received) == 3


@pytest.mark.parametrize(("status", "body"), [("401 No", b'{"error": "bad key"}'), ("404 No", b"no such model")])
def test_a_wrong_key_or_model_is_raised_at_once(
    status: str, body: bytes, peer: StartPeer, http_answer: Any, configure: Configure
) -> None:
    configure()
    endpoint = peer(lambda connection, number: connection.sendall(http_answer(status, body)))

    with pytest.raises(ServerResponseError) as caught:
        ask(endpoint.port)

    assert (caught.value.status, caught.value.response_content) == (int(status[:3]), body)
    assert len(endpoint.received) == 1
    assert "key" not in repr(caught.value.request_info.headers)


def test_a_broken_connection_is_no_reason_to_lose_a_model_call(
    peer: StartPeer, http_answer: Any, configure: Configure
) -> None:
    configure(model_total_timeout_s=0.3)

    def break_in_every_way(connection: socket.socket, number: int) -> None:
        if number == 1:
            connection.close()
        elif number == 2:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            connection.close()
        elif number == 4:
            connection.sendall(http_answer("200 OK", b'{"id": "r"}'))

    endpoint = peer(break_in_every_way)

    assert ask(endpoint.port) == {"id": "r"}
    assert len(endpoint.received) == 4


def test_an_endpoint_that_is_not_there_is_given_up(free_port: int, configure: Configure) -> None:
    configure(model_retry_max_tries=3)

    with pytest.raises(ServerUnreachableError, match=f"http://127.0.0.1:{free_port}/v1/responses") as caught:
        ask(free_port)

    assert caught.value.attempts == 3


def test_an_endpoint_that_answers_with_a_web_page_is_named(peer: StartPeer, http_answer: Any) -> None:
    page = http_answer("200 OK", b"<html>")
    endpoint = peer(lambda connection, number: connection.sendall(page))

    with pytest.raises(MalformedResponseError, match="<html>"):
        ask(endpoint.port)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"Retry-After": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "Retry-After": "9"}, 0.25),
        ({"Retry-After": formatdate(1_000_060, usegmt=True)}, 60),
        ({"Retry-After": formatdate(999_000, usegmt=True)}, 0),
        ({"Retry-After": "soon"}, 0),
        ({"Retry-After": "-5"}, 0),
        ({"Retry-After": "nan"}, 0),
        (None, 0),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str] | None, seconds: float) -> None:
    assert retry_after_s(headers, now_s=1_000_000) == seconds


def test_a_user_in_the_address_is_sent_in_place_of_the_key_and_neither_shows_in_an_error(
    peer: StartPeer, http_answer: Any, free_port: int, configure: Configure
) -> None:
    configure(model_retry_max_tries=1)
    refused = "Basic bWU6aHVudGVyMg== is wrong, and so is header-key"
    stranger = peer(lambda connection, _: connection.sendall(http_answer("403 No", refused.encode())))

    def failure(port: int) -> str:
        client = NeMoGymAsyncOpenAI(
            base_url=f"http://me:hunter2@127.0.0.1:{port}/v1",
            api_key="unused-key",
            default_headers={"X-Api-Key": "header-key"},
        )
        with pytest.raises((ServerResponseError, ServerUnreachableError)) as raised:
            asyncio.run(client.create_response(model="m"))
        return f"{raised.value} {raised.value!r} {vars(raised.value)}"

    answered, unreachable = failure(stranger.port), failure(free_port)

    assert b"Authorization: Basic bWU6aHVudGVyMg==" in stranger.received[0]
    assert b"unused-key" not in stranger.received[0]
    assert "Basic **** is wrong, and so is ****" in answered
    assert "me:****@127.0.0.1" in unreachable
    for secret in ("hunter2", "bWU6aHVudGVyMg==", "header-key"):
        assert secret not in answered + unreachable
